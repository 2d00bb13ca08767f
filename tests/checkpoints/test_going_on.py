"""Training goes on while a checkpoint is written, and the checkpoint has the rows of its barrier."""

from pathlib import Path

import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints import writer
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import restore_rows
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.disk import Disk
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Past, Settings, table_state

EVERY = 5
NUM_STEPS = 3 * EVERY


def begun(folder: Path, num_steps: int = NUM_STEPS) -> InProcessRun:
    job = small_job("adagrad", "single", horizon=3, checkpoint={"every": EVERY})
    batches = small_batches(job, "single", num_steps=NUM_STEPS, eval_at=())[:num_steps]
    slots = slots_for(group_specs(job), batches, "one batch")
    folder.mkdir(exist_ok=True)
    past = Past(checkpoints=Checkpoints(folder, Disk()), newest=None)
    return InProcessRun(job, batches, Settings(slots=slots, seeded_streams=False), past)


def advance_all_but_the_writer(run: InProcessRun) -> None:
    stages = [*run.prefetcher.stages.values(), *run.trainer.stages.values(), run.streams.advance]
    while sum(stage() for stage in stages):
        pass


def test_steps_follow_a_barrier_although_none_of_its_rows_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "QUEUE_BYTES", 1)
    run = begun(tmp_path)
    advance_all_but_the_writer(run)
    assert run.trainer.loop.step_done == 2 * EVERY - 1, "the second barrier waits for the first checkpoint"
    assert run.prefetcher.waiting_for == "a checkpoint to be on disk"


def test_a_checkpoint_that_is_written_late_has_the_rows_of_its_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1000)
    whole = begun(tmp_path / "whole", num_steps=EVERY).run()
    run = begun(tmp_path / "late")
    advance_all_but_the_writer(run)
    assert run.writer is not None
    while run.writer.busy:
        run.writer.advance()
    assert run.writer.newest is not None
    assert run.writer.newest.train_steps == EVERY
    stores = [TrackedStore(MemoryStore(group), group, run.job.job.seed) for group in run.groups]
    restore_rows(tmp_path / "late" / "checkpoints", run.writer.newest, run.groups, stores)
    changed_since = 0
    for group, store, own, wanted in zip(run.groups, stores, run.tables, whole.tables, strict=True):
        expected, later = (table_state(group, tables, run.job.job.seed) for tables in (wanted, own))
        for name, found in table_state(group, store, run.job.job.seed).items():
            assert torch.equal(found, expected[name])
            changed_since += int((found != later[name]).sum())
    assert changed_since > 0, "nothing was written over the checkpoint's rows"
