"""fp16 and bf16 rows, with and without fp32 master weights, alone and mixed in a job, give the plain loop's bits."""

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.embedding_tables import RowType
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.disk import Disk
from rowcast.trainer.kernels import DTYPES
from tests.support.batches import BAGS, NUM_DENSE, OPTIMIZERS, Bags, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, assert_tested_what_it_claims
from tests.support.driver import InProcessRun, Past, Settings, start_state

MIXES: Mapping[str, tuple[RowType, ...]] = {
    "bf16": ("bf16", "bf16", "bf16", "bf16"),
    "fp16": ("fp16", "fp16", "fp16", "fp16"),
    "mixed": ("fp32", "bf16", "fp16", "bf16"),
}
WAYS = tuple(itertools.product((1, 2, 4), ("one batch", "more"), (2**20, 2**24)))  # depth, capacity, ring bytes


@functools.cache
def reference(
    optimizer: str, bags: Bags, mix: str, master: bool
) -> tuple[list[float], dict[str, Tensor], list[ScheduledBatch]]:
    job = small_job(optimizer, bags, dtypes=MIXES[mix], master=master)
    batches = small_batches(job, bags)
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    return losses, end, batches


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_rows_give_the_bits_of_the_plain_loop(optimizer: str, mix: str, master: bool) -> None:
    turn = OPTIMIZERS.index(optimizer) + 2 * list(MIXES).index(mix) + 3 * master
    bags = BAGS[turn % len(BAGS)]
    losses, end, batches = reference(optimizer, bags, mix, master)
    for seed, (depth, capacity, ring_bytes) in list(enumerate(WAYS))[turn % 6 :: 6]:
        job = small_job(optimizer, bags, depth=depth, dtypes=MIXES[mix], master=master)
        slots = slots_for(group_specs(job), batches, capacity)
        settings = Settings(slots=slots, ring_bytes=ring_bytes, seed=seed, late_store=seed % 2 == 0)
        run = InProcessRun(job, batches, settings).run()
        assert_equal_bits(run, losses, end)
        assert_tested_what_it_claims(run, job)
    assert_kept_as_the_job_says(job, start_state(job, NUM_DENSE), end)


def assert_kept_as_the_job_says(job: Job, start: dict[str, Tensor], end: dict[str, Tensor]) -> None:
    for table in job.tables:
        name, master = f"embedding_bags.{table.name}.weight", f"optimizer.{table.name}.master"
        assert end[name].dtype == DTYPES[table.dtype]
        assert not torch.equal(end[name], start[name]), f"table {table.name} was not trained"
        assert (master in end) == (job.optimizer.sparse.master and table.dtype != "fp32")
        if master in end:
            assert torch.equal(end[master].to(end[name].dtype), end[name])
            assert not torch.equal(end[master], end[name].float()), "no master weight was rounded"


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
def test_a_run_of_half_rows_goes_on_from_its_checkpoint_with_the_same_bits(master: bool, tmp_path: Path) -> None:
    losses, end, batches = reference("adagrad", "multi", "mixed", master)
    job = small_job("adagrad", "multi", dtypes=MIXES["mixed"], master=master, job={"run_dir": str(tmp_path)})
    checkpoints = Checkpoints(tmp_path, Disk())
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"))
    first = InProcessRun(job, batches[:6], settings, Past(checkpoints=checkpoints, newest=None)).run()
    newest = checkpoints.choose(None)
    assert newest.position.step == 6
    assert newest.num_rows > 0
    assert len(first.results.losses) == newest.position.train_step < len(losses)
    assert_equal_bits(
        InProcessRun(job, batches, settings, Past(checkpoints=checkpoints, newest=newest)).run(), losses, end
    )
