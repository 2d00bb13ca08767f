"""Whatever is lost while several ranks write a checkpoint, the newest one is whole, and any number of ranks goes on."""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.prefetcher.checkpoints import commit, row_files
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError, RowcastError
from tests.checkpoints.fake_ranks import FakeRanks
from tests.checkpoints.fake_run import MAX_ADVANCES, Rows, assert_holds, damages, small_job
from tests.checkpoints.faulty import KINDS, Failure, Fault, FaultyDisk, Kind
from tests.support.recording_disk import DiskModel, Operation, RecordingDisk
from tests.support.repeats import count

TABLES = (("narrow_a", 600, 4), ("wide", 500, 8), ("narrow_b", 700, 4))
SHARES = (0.5, 0.2, 0.6, 0.1, 0.1)  # share of the rows that change; layers are merged once
SITES = [(kind, fault) for kind in KINDS for fault in ("ENOSPC", "EIO", *(["short"] if kind == "write" else []))]


@pytest.fixture(autouse=True)
def several_files_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 6000)


def some(rng: np.random.Generator, share: float) -> dict[int, list[int]]:
    return {table: np.flatnonzero(rng.random(rows) < share).tolist() for table, (_, rows, _) in enumerate(TABLES)}


def go_on(run_dir: Path, states: dict[int, Rows], ranks: int, least: int) -> None:
    """Another number of ranks goes on from what is left, which is the checkpoint of step `least` or a later one."""
    with damages() as damaged:
        newest = Checkpoints(run_dir, Disk()).newest_for_ranks(None)
    assert damaged == [], "a manifest names what is not whole"
    rows: Rows = {}
    if newest is not None:
        rows = states[newest.position.step]
        assert_holds(run_dir, small_job(run_dir, tables=TABLES), newest, rows, ranks)
    assert (0 if newest is None else newest.position.step) >= least, f"the checkpoint of step {least} was durable"
    job = small_job(run_dir, tables=TABLES)
    later = FakeRanks(job, ranks, newest=newest, start=rows, block=50, seed=least)
    rng = np.random.default_rng(ranks)
    for _ in range(2):
        later.train(some(rng, 0.2))
        manifest = later.checkpoint()
    assert_holds(run_dir, job, manifest, later.rows(), ranks)
    manifests = [later.checkpoints.load(name) for name in later.checkpoints.candidates()]
    named = {file.file for m in manifests for file in m.files} | {f"{m.name}/{MANIFEST_NAME}" for m in manifests}
    root = later.checkpoints.root
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == named, "something is left"


# power


@dataclass(frozen=True)
class Recorded:
    log: list[Operation]
    durable: list[tuple[int, int]]  # operations before it was reported durable, its step
    states: dict[int, Rows]


def record(run_dir: Path, ranks: int) -> Recorded:
    disk = RecordingDisk()
    run = FakeRanks(small_job(run_dir, tables=TABLES), ranks, disk=disk, block=50, seed=ranks)
    rng = np.random.default_rng(ranks)
    durable: list[tuple[int, int]] = []
    for share in SHARES:
        run.train(some(rng, share))
        run.begin()
        run.hand_over()
        while run.busy:
            run.advance()
            # whoever sees the manifest may say that the checkpoint is durable
            steps = [rank.writer.newest.position.step for rank in run.ranks if rank.writer.newest is not None]
            if steps and max(steps) > max((step for _, step in durable), default=0):
                durable.append((len(disk.log), max(steps)))
        run.complete()
    return Recorded(disk.log, durable, run.states)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loss_of_power_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, ranks: int) -> None:
    recorded = record(tmp_path / "run", ranks)
    assert len(recorded.log) > 200
    rng = np.random.default_rng(ranks)
    cuts = set(rng.choice(len(recorded.log), min(len(recorded.log), count(12, 1000)), replace=False).tolist())
    model = DiskModel(tmp_path / "run")
    for cut, operation in enumerate(recorded.log, 1):
        model.apply(operation)
        if cut in cuts:
            model.lose_power(cut, tmp_path / "after")
            least = max((step for at, step in recorded.durable if at <= cut), default=0)
            go_on(tmp_path / "after", recorded.states, int(rng.integers(1, 5)), least)


# disks that fail, and ranks that are killed


def run_until_failure(
    run_dir: Path, kind: Kind, nth: int, fault: Fault
) -> tuple[FakeRanks, RowcastError | None] | None:
    """Makes three checkpoints; None where no such operation was left to fail. The error is None where all are made, as
    only a removal has failed."""
    failure = Failure(kind, nth, fault)
    run = FakeRanks(small_job(run_dir, tables=TABLES), 3, disk=FaultyDisk(failure), keep=1, block=50, seed=nth)
    (run.job.run_dir / "checkpoints" / "step-000000000007").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with capture_logs() as logs:
        try:
            for share in (0.3, 0.1, 0.6):
                run.train(some(rng, share))
                run.checkpoint()
        except RowcastError as error:
            assert failure.happened
            return run, error
    assert len(logs) == failure.happened, f"{kind} {nth} failed, and nobody said so"
    return (run, None) if failure.happened else None


@pytest.mark.parametrize(("kind", "fault"), SITES)
def test_a_disk_that_fails_one_rank_ends_it_with_a_sentence_and_the_checkpoint_before_stays(
    kind: Kind, fault: Fault, tmp_path: Path
) -> None:
    chosen, failed = range(0, 400, count(23, 1)), 0
    for nth in chosen:
        outcome = run_until_failure(tmp_path / str(nth), kind, nth, fault)
        if outcome is None:
            break
        failed += 1
        run, error = outcome
        assert not isinstance(error, DataError)
        if error is not None:
            assert f"{run.checkpoints.root}" in str(error)
            assert ("Input/output error" if fault == "EIO" else "No space left on device") in str(error)
        durable = 0 if run.durable is None else run.durable.position.step
        go_on(run.job.run_dir, run.states, 1 + nth % 4, durable)
    assert failed, f"no {kind} ever failed"


@pytest.mark.parametrize("seed", range(count(20, 500)))
def test_a_rank_that_is_killed_at_any_moment_costs_at_most_the_checkpoint_in_progress(
    tmp_path: Path, seed: int
) -> None:
    """The others complete the checkpoint if it lacks nothing, and give it up otherwise."""
    rng = np.random.default_rng(seed)
    run = FakeRanks(small_job(tmp_path / "run", tables=TABLES), int(rng.integers(2, 5)), block=50, seed=seed)
    for share in SHARES[: int(rng.integers(1, 4))]:
        run.train(some(rng, share))
        run.checkpoint()
    durable = run.step
    run.train(some(rng, 0.4))
    run.begin()
    run.hand_over()
    for _ in range(int(rng.integers(0, 300))):
        run.advance()
    killed = int(rng.integers(run.count))
    left = [rank for rank in run.ranks if rank.shard.number != killed]
    for rank in left:
        rank.writer.abandon()
    with patch.object(commit, "GIVE_UP_S", -1.0):
        for _ in range(MAX_ADVANCES):
            busy = [rank for rank in left if rank.writer.busy]
            if not busy:
                break
            busy[int(rng.integers(len(busy)))].writer.advance()
    assert not any(rank.writer.busy for rank in left)
    newest = Checkpoints(run.job.run_dir, Disk()).newest_for_ranks(None)
    assert newest is not None
    for rank in left:
        assert rank.writer.newest is not None
        has_it = rank.writer.newest.position.step == run.step
        assert has_it <= (newest.position.step == run.step), "a rank knows a checkpoint that does not exist"
        assert has_it != rank.writer.gave_up
    go_on(run.job.run_dir, run.states, int(rng.integers(1, 5)), durable)
