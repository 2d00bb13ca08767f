"""What an automatic ring and staging are: as much as plans move, and no more."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import rowcast.prefetcher.run.sizing
from benchmarks.training.recorded import recorded_plans
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.group_planner import planner_bytes
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.run import sizing
from rowcast.prefetcher.run.sizing import (
    LEAST_RING_BYTES,
    LEAST_STAGING_BYTES,
    automatic_threads,
    job_levels,
    sizes,
    tier_parts,
    tier_rows,
    trains_on_device,
    typical_plan,
)
from rowcast.prefetcher.stores.tier_budget import SLOT_BYTES
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.protocol.plan import step_block
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, GROUP_ARRAYS
from rowcast.protocol.transport.ring import largest_payload
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.batches import small_batches, small_job
from tests.support.facts import facts
from tests.support.planner_runs import placed

EXAMPLES = Path(__file__).parents[1] / "examples"
# as many new rows a batch
LIKE_RETAIL = ('data.format="synthetic"', "data.synthetic.samples=320705", "data.synthetic.zipf=0.95")


def first_batches(job: Job) -> list[ScheduledBatch]:
    return list(islice(schedule(job, open_reader(job), None), MEASURED_BATCHES))


@pytest.mark.parametrize(("name", "changes"), [("demo", ()), ("retail", LIKE_RETAIL)])
def test_an_examples_staging_is_smaller_than_its_cache_and_holds_what_a_plan_moves(
    name: str, changes: tuple[str, ...]
) -> None:
    job = load_job(EXAMPLES / f"{name}.toml", changes)
    groups, batches = group_specs(job), first_batches(job)
    slots = slots_of(job, groups, measure(groups, batches))
    own = sizes(job, groups, batches, job.lookahead.depth)
    assert 2 * own.staging_bytes < sum(n * group.record_bytes for n, group in zip(slots, groups, strict=True)) / 2
    plans = list(recorded_plans(job, batches, slots))
    moved = [
        sum(len(part.fetch_keys) * group.record_bytes for part, group in zip(each.plan.groups, groups, strict=True))
        for each in plans
    ]
    assert np.median(moved) < own.staging_bytes
    arrays = max(step_block(each.batch, each.plan, 0).nbytes for each in plans)
    assert (job.lookahead.depth + 1) * (np.median(moved) + arrays) < own.ring_bytes < 16 * 2**20


def test_the_arrays_of_a_plan_are_expected_to_take_what_they_take() -> None:
    for bags in ("single", "multi", "weighted", "apart"):
        job = small_job("adagrad", bags)
        batches = small_batches(job, bags)
        plans = recorded_plans(job, batches, tuple(group.num_rows for group in group_specs(job)))
        largest = max(step_block(each.batch, each.plan, 0).nbytes for each in plans)
        assert 0.5 * largest < typical_plan(group_specs(job), batches).arrays < 2 * largest, bags


@pytest.mark.parametrize("points", [{}, {0: 2**30}, {0: 0, 1: 2**30}])
def test_a_rank_expects_the_arrays_of_its_own_parts_and_of_the_exchange(points: dict[int, int]) -> None:
    """And of all parts in tables that it owns. `points`: of placed tables; this rank's is 2^30."""
    job, rank = small_job("adagrad", "multi"), Rank(number=1, count=4, parts=8)
    groups, batches = placed(group_specs(job), points), small_batches(job, "multi", num_steps=8, eval_at=())
    planner = job_planner(job, groups, [tuple(group.num_rows for group in groups)], batches, rank=rank)
    largest = 0
    for scheduled in batches:
        planner.add(scheduled)
    planner.end()
    while planner.ready():
        [plan] = planner.plan().steps
        shares = [(share, EXCHANGE_ARRAYS) for group in plan.groups if (share := group.share) is not None]
        arrays = [(group, GROUP_ARRAYS) for group in plan.groups]
        found = [getattr(each, name) for each, names in [*arrays, *shares] for name in names]
        largest = max(largest, sum(array.nbytes for array in found if array is not None))
    assert 0.5 * largest < typical_plan(groups, batches, rank).arrays < 2 * largest
    assert typical_plan(groups, batches, rank).rows < typical_plan(groups, batches).rows / (1 if points else 2)


def test_a_small_job_gets_the_least_and_a_job_file_its_own_ring() -> None:
    batches = small_batches(small_job("sgd"), "single")
    for ring, nbytes in (("auto", LEAST_RING_BYTES), ("1MiB", 2**20), ("64MiB", 2**26)):
        job = small_job("sgd", transport={"ring": ring})
        own = sizes(job, group_specs(job), batches, 4)
        assert (own.ring_bytes, own.staging_bytes) == (nbytes, min(LEAST_STAGING_BYTES, largest_payload(nbytes)))


def test_shared_memory_limits_a_ring_and_too_little_of_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("sgd")
    groups, batches = group_specs(job), small_batches(job, "single")
    monkeypatch.setattr(rowcast.prefetcher.run.sizing, "free_shared_memory", lambda: 4 * 2**20 + 5)
    assert sizes(job, groups, batches, 4).ring_bytes == 2**20
    monkeypatch.setattr(rowcast.prefetcher.run.sizing, "free_shared_memory", lambda: 2**20)
    with pytest.raises(ConfigError, match=facts("/dev/shm", "1048576 bytes", 8388608)):
        sizes(job, groups, batches, 4)


@pytest.mark.parametrize(
    ("cores", "beside_a_device", "alone"), [(1, 1, 1), (2, 1, 1), (6, 3, 1), (16, 8, 4), (64, 8, 8)]
)
def test_half_of_the_cores_plan_beside_a_device_and_a_quarter_otherwise(
    cores: int, beside_a_device: int, alone: int
) -> None:
    assert automatic_threads(cores, is_on_device=True) == beside_a_device
    assert automatic_threads(cores, is_on_device=False) == alone


def test_a_device_is_known_by_the_job_or_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "DEVICE_FILES", (tmp_path / "nvidiactl",))
    assert trains_on_device("cuda:1")
    assert not trains_on_device("auto")
    (tmp_path / "nvidiactl").touch()
    assert trains_on_device("auto")
    assert not trains_on_device("cpu")


def test_a_memory_tier_counts_the_whole_cache_lines_of_its_rows() -> None:
    """Records of 528 bytes take 576."""
    data = {"batch_size": 64, "synthetic": {"preset": "criteo-kaggle", "scale": 0.02, "samples": 6400}}
    job = jobs.job(
        data=data,
        tables=None,
        tables_from={"embedding_dim": 132},
        cache={"capacity": "2000 rows"},
        store={"kind": "tiered", "memory": "960MiB"},
        model={"kind": "dlrm", "bottom_mlp": [132], "top_mlp": [1]},
    )
    groups, measured = group_specs(job), first_batches(job)
    touched, of_rings = measure(groups, measured), sizes(job, groups, measured, job.lookahead.depth)
    slots, rows = job_levels(job, groups, touched, (2000,), lambda: of_rings)
    [in_memory] = tier_rows(job, groups, touched, rows)
    assert groups[0].record_bytes == 528
    assert in_memory < groups[0].num_rows
    parts = sum(tier_parts(job, groups, slots, of_rings.ring_bytes).values())
    taken = parts + in_memory * (576 + SLOT_BYTES) + planner_bytes(in_memory, 0, 1)
    assert 0 <= 960 * 2**20 - taken < 2**17


def test_the_memory_that_a_refusal_names_is_enough() -> None:
    """Its index is larger than that of the memory that was refused."""

    def levels(memory: str | int) -> tuple[tuple[int, ...], ...]:
        data = {"batch_size": 64, "synthetic": {"preset": "criteo-kaggle", "scale": 0.02, "samples": 6400}}
        store = {"kind": "tiered", "memory": memory}
        job = jobs.job(data=data, tables=None, tables_from={"embedding_dim": 4}, store=store)
        groups, measured = group_specs(job), first_batches(job)
        own = sizes(job, groups, measured, job.lookahead.depth)
        return job_levels(job, groups, measure(groups, measured), (2000,), lambda: own)

    with pytest.raises(ConfigError, match="is too small") as refused:
        levels("1KiB")
    [enough] = re.findall(r"set (\d+) bytes or more", str(refused.value))
    assert levels(int(enough))[1][0] >= 2000
    with pytest.raises(ConfigError, match="is too small"):
        levels(int(enough) - 2**12)
