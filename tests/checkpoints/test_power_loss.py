"""After any loss of power the newest valid checkpoint is whole, and no older than the last one reported durable."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rowcast.prefetcher.checkpoints import row_files
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from tests.checkpoints.fake_run import FakeRun, Rows, assert_holds, damages, small_job
from tests.support.recording_disk import DiskModel, Operation, RecordingDisk
from tests.support.repeats import count


@pytest.fixture(autouse=True)
def two_files_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 1000)


SEEDS = count(3, 20)


@dataclass(frozen=True)
class Recorded:
    run: FakeRun
    log: list[Operation]
    durable: list[tuple[int, int]]  # (operations before it was reported durable, its step)
    merges: int

    def durable_step(self, cut: int) -> int | None:
        return max((step for at, step in self.durable if at <= cut), default=None)

    def states(self) -> dict[int, Rows]:
        return self.run.states


def record(run_dir: Path, seed: int) -> Recorded:
    """Five checkpoints, of which two stay; few rows change at first and then many, so that layers are merged. The last
    is made again at its step, as the end."""
    disk = RecordingDisk()
    run = FakeRun(small_job(run_dir), disk=disk, keep=2, block=5)
    rng = np.random.default_rng(seed)
    durable, merges, newest = [], 0, None
    for number, share in enumerate([0.5, 0.2, 0.6, 0.1, 0.1, None]):
        if share is not None:
            run.train_at_random(rng, share)
        run.begin(finished=share is None)
        run.hand_over()
        while run.writer.busy:
            run.writer.advance()
            if run.writer.newest is not newest:
                newest = run.writer.newest
                assert newest is not None
                durable.append((len(disk.log), newest.position.step))
        run.complete()
        assert newest is not None
        merges += number > 1 and len(newest.layers) == 2
    return Recorded(run, disk.log, durable, merges)


def check_cut(recorded: Recorded, model: DiskModel, cut: int, seed: int, out: Path) -> int | None:
    """The step of the checkpoint that a run would go on from, where `model` is at `cut`."""
    model.lose_power(seed, out)
    with damages() as damaged:
        newest = Checkpoints(out, Disk()).newest_valid()
    expected = recorded.durable_step(cut)
    where = f"cut {cut} behind {recorded.log[cut - 1] if cut else None}, seed {seed}"
    assert damaged == [], f"{where}: a manifest names what is not whole"
    if newest is None:
        assert expected is None, f"{where}: step {expected} was durable"
        return None
    assert newest.position.step >= (expected or 0), f"{where}: step {newest.position.step}, but {expected} was durable"
    assert_holds(out, recorded.run.job, newest, recorded.states()[newest.position.step])
    return newest.position.step


def test_a_loss_of_power_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", 1)
    assert recorded.merges >= 1
    assert len(recorded.log) > 100
    model, found = DiskModel(recorded.run.job.run_dir), set[int | None]()
    for cut in range(len(recorded.log) + 1):
        if cut:
            model.apply(recorded.log[cut - 1])
        found |= {check_cut(recorded, model, cut, seed, tmp_path / "after") for seed in range(SEEDS)}
    assert found == {None, *recorded.run.states}, "every checkpoint is the newest after some cut"


@pytest.mark.parametrize("skipped", ["sync", "sync_folder"])
def test_the_model_finds_a_writer_that_does_not_sync(tmp_path: Path, skipped: str) -> None:
    recorded = record(tmp_path / "run", 1)
    careless = Recorded(recorded.run, [op for op in recorded.log if op.kind != skipped], [], 0)
    durable_at = len(careless.log)
    careless.durable.append((durable_at, 50))
    model = DiskModel(recorded.run.job.run_dir)
    for operation in careless.log:
        model.apply(operation)
    with pytest.raises((AssertionError, DataError)):
        check_seeds(careless, model, durable_at, tmp_path / "after")


def check_seeds(recorded: Recorded, model: DiskModel, cut: int, out: Path) -> None:
    for seed in range(20):
        check_cut(recorded, model, cut, seed, out)
