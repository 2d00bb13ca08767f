"""A disk that fails while a checkpoint is written ends the run with a sentence; the previous checkpoint stays valid.

After any loss of power the newest valid checkpoint is whole, and no older than the last one reported durable.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.prefetcher.checkpoints import row_files
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, write_durably
from rowcast.runtime.disk import Disk, FileWrite
from rowcast.runtime.errors import DataError, RowcastError
from tests.checkpoints.fake_run import FakeRun, Rows, assert_holds, damages, small_job
from tests.checkpoints.faulty import KINDS, Failure, Fault, FaultyDisk, Kind
from tests.support.recording_disk import DiskModel, Operation, RecordingDisk
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("small_files")
MAX_SITES = 500
SITES = [(kind, fault) for kind in KINDS for fault in ("ENOSPC", "EIO", *(["short"] if kind == "write" else []))]


def run_until_failure(run_dir: Path, kind: Kind, nth: int, fault: Fault) -> tuple[FakeRun, RowcastError | None] | None:
    """Makes three checkpoints, merges once and drops the oldest; None where no such operation was left to fail. The
    error is None where all are made, as only a removal has failed."""
    failure = Failure(kind, nth, fault)
    run = FakeRun(small_job(run_dir), disk=FaultyDisk(failure), keep=1, block=20)
    left_over = run.job.run_dir / "checkpoints" / "step-000000000007"
    left_over.mkdir(parents=True)
    (left_over / "dense-00000.safetensors").write_bytes(b"of a crash")
    rng = np.random.default_rng(0)
    with capture_logs() as logs:
        try:
            for share in (0.3, 0.6, 0.1):
                run.train_at_random(rng, share)
                run.checkpoint()
        except RowcastError as error:
            assert failure.happened
            return run, error
    assert len(logs) == failure.happened, f"{kind} {nth} failed, and nobody said so"
    return (run, None) if failure.happened else None


@pytest.mark.parametrize(("kind", "fault"), SITES)
def test_a_fault_at_any_operation_is_a_sentence_and_the_previous_checkpoint_stays(
    kind: Kind, fault: Fault, tmp_path: Path
) -> None:
    for nth in range(MAX_SITES):
        failed = run_until_failure(tmp_path / str(nth), kind, nth, fault)
        if failed is None:
            break
        run, error = failed
        check_failure(run, error, fault) if error is not None else check_removed_later(run)
    assert 1 <= nth < MAX_SITES, f"no {kind} ever failed"


def check_failure(run: FakeRun, error: RowcastError, fault: Fault) -> None:
    assert not isinstance(error, DataError)
    reason = "Input/output error" if fault == "EIO" else "No space left on device"
    assert f"{run.checkpoints.root}" in str(error)
    assert f"({reason})" in str(error)
    assert "run again" in str(error)
    with damages() as damaged:
        found = Checkpoints(run.job.run_dir, Disk()).newest_valid()
    assert damaged == []
    if run.writer.newest is None:
        assert found is None, "a checkpoint that failed was taken for one"
    else:
        assert found is not None
        assert found.checksum == run.writer.newest.checksum
        assert_holds(run.job.run_dir, run.job, found, run.states[found.position.step])
        go_on(FakeRun(run.job, newest=found), run)


def check_removed_later(run: FakeRun) -> None:
    run.train({0: [0, 1]})
    manifest = run.checkpoint()
    assert_holds(run.job.run_dir, run.job, manifest, run.rows())
    root = run.checkpoints.root
    expected = {file.file for file in manifest.files} | {f"{manifest.name}/{MANIFEST_NAME}"}
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == expected
    assert not (root / "step-000000000007").exists()


def go_on(later: FakeRun, before: FakeRun) -> None:
    """The same commands again, on a disk that works."""
    assert later.newest is not None
    expected = before.states[later.newest.position.step]
    later.train({0: [0, 1]}, steps=10)
    manifest = later.checkpoint()
    assert_holds(later.job.run_dir, later.job, manifest, expected | later.rows())


def test_a_disk_that_takes_only_a_part_of_each_write_still_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda descriptor, content: write(descriptor, content[: max(1, len(content) // 3)])
    )
    file = FileWrite(tmp_path / "file")
    file.write(bytes(range(256)))
    file.write(memoryview(b"and more"))
    file.sync()
    file.close()
    file.close()
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == bytes(range(256)) + b"and more"


def test_a_file_that_is_written_durably_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_durably(path, b"old")
    faults: list[tuple[Kind, Fault]] = [("create", "EIO"), ("write", "short"), ("sync", "EIO"), ("rename", "EIO")]
    for kind, fault in faults:
        with pytest.raises(OSError):
            write_durably(path, b"the new one", FaultyDisk(Failure(kind, 0, fault)))
        assert path.read_bytes() == b"old"
    write_durably(path, b"the new one")
    assert path.read_bytes() == b"the new one"


def test_the_real_disk_does_what_its_words_say(tmp_path: Path) -> None:
    disk = Disk()
    disk.mkdir(tmp_path / "folder")
    disk.create(tmp_path / "folder" / "a").close()
    disk.rename(tmp_path / "folder" / "a", tmp_path / "folder" / "b")
    disk.sync_folder(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["b"]
    disk.unlink(tmp_path / "folder" / "b")
    disk.rmdir(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        disk.mkdir(tmp_path / "no" / "parent")


@pytest.fixture(autouse=True)
def two_files_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 1000)


SEEDS = count(2, 20)


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
