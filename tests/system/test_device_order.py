"""Each wait between streams is needed, and all are enough: a scheduler that uses all freedom they leave shows it.

Once with its own streams, once with CUDA's on a device that is not there.
"""

import functools
from collections.abc import Callable
from typing import get_args

import pytest
from torch import Tensor

from benchmarks.gpu_check.in_process import DeviceRun
from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import RowcastError
from rowcast.trainer.device.streams import RankWait, Wait
from rowcast.trainer.models.exchanges import LocalCollectives
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, Sharing, StuckError, start_state
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.repeats import count

VARIANTS = (  # capacity, bytes of each ring, of staging each way
    ("one batch", 24 * 1024, None),  # a plan takes several pieces, each of which uses the staging of the one before
    ("two batches", 2**20, None),  # several plans are in flight, each of which evicts what the steps before it use
    ("two batches", 2**20, 16 * 1024),  # and their pieces lie beside each other in staging, and over those before
)


@functools.cache
def workload(parts: int = 1) -> tuple[Job, list[ScheduledBatch], list[float], dict[str, Tensor]]:
    job = small_job("adagrad", "multi", depth=4, horizon=4)
    batches = small_batches(job, "multi", num_steps=8, eval_at=(3,))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches, parts)
    return job, batches, losses, end


def settings_of(seed: int, without: Wait | None) -> Settings:
    job, batches, _, _ = workload()
    capacity, ring_bytes, staging_bytes = VARIANTS[seed % 3]
    return Settings(
        slots=slots_for(group_specs(job), batches, capacity),
        ring_bytes=ring_bytes,
        staging_bytes=staging_bytes,
        seed=seed,
        late_store=seed % 4 == 0,
        bounced=seed % 5 == 0,
        without=without,
    )


def run(seed: int, without: Wait | None = None) -> None:
    """Raises where the result has other bits than the plain loop's, or the run breaks."""
    job, batches, losses, end = workload()
    assert_equal_bits(InProcessRun(job, batches, settings_of(seed, without)).run(), losses, end)


def run_on_cuda(seed: int, without: Wait | None = None, parts: int = 1) -> FakeCuda:
    job, batches, losses, end = workload(parts)
    sharing = Sharing(rank=Rank(number=0, count=1, parts=parts), collectives=LocalCollectives())
    cuda: FakeCuda
    with pytest.MonkeyPatch.context() as patched, FakeCuda(patched, seed, without) as cuda:
        made = DeviceRun(CUDA, job, batches, settings_of(seed, without), sharing=sharing)
        cuda.synchronize()
        cuda.pageable = 0  # the start may wait
        assert_equal_bits(made.run(), losses, end)
    return cuda


@pytest.mark.parametrize("first", range(0, count(40, soak=200), 20))
def test_every_order_that_the_waits_allow_gives_the_bits_of_the_plain_loop(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


@pytest.mark.parametrize("parts", [1, 4])
def test_cuda_streams_give_the_bits_of_the_plain_loop_and_copy_from_page_locked_memory_only(parts: int) -> None:
    for seed in range(count(4, soak=200)):
        cuda = run_on_cuda(seed, parts=parts)
        assert not cuda.pageable, "the host waits for such a copy"
        assert not cuda.registered, "a ring stayed page-locked"


# those: tests/adopt/test_streams.py, tests/system/test_ranks.py
@pytest.mark.parametrize("run", [run, run_on_cuda])
@pytest.mark.parametrize("wait", [wait for wait in get_args(Wait) if wait not in ("used", *get_args(RankWait))])
def test_without_any_one_wait_some_order_gives_wrong_bits(wait: Wait, run: Callable[[int, Wait], object]) -> None:
    for seed in range(50):
        try:
            run(seed, wait)
        except StuckError:
            raise  # leaving out a wait must not block a run
        except (AssertionError, RowcastError, IndexError, RuntimeError):
            return
    pytest.fail(f"50 seeds without the wait {wait!r} gave the right bits: it is not needed, or this test cannot see it")
