"""A fresh run leaves the earlier one as it is until it has a checkpoint of its own, whatever is lost on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rowcast.prefetcher.checkpoints.folder import IMPORT, Checkpoints, carry_out
from rowcast.runtime.checkpoint_manifest import Position, write_durably
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import COMPLETE
from tests.checkpoints.fake_run import FakeRun, assert_holds, damages, small_job
from tests.support.recording_disk import DiskModel, RecordingDisk
from tests.support.repeats import count

SEEDS = count(5, 40)
ROWS = {0: [1, 2, 3], 1: [5, 7]}


def earlier_run(run_dir: Path, disk: Disk) -> FakeRun:
    """Complete after step 20, with two checkpoints."""
    run = FakeRun(small_job(run_dir), disk=disk)
    for _ in range(2):
        run.train(ROWS)
        run.checkpoint()
    write_durably(run_dir / COMPLETE, b"{}", disk)
    return run


def fresh_run(run_dir: Path, disk: Disk) -> FakeRun:
    run = FakeRun(small_job(run_dir), disk=disk)
    carry_out(run.checkpoints.begin_fresh())
    run.train({0: [9], 2: [4]}, steps=3)
    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_earlier_run_stays_byte_for_byte_until_the_first_checkpoint_is_durable(tmp_path: Path) -> None:
    earlier = earlier_run(tmp_path / "run", Disk())
    before = snapshot(tmp_path / "run")
    fresh = fresh_run(tmp_path / "run", Disk())
    assert snapshot(tmp_path / "run") == before
    fresh.begin()
    fresh.hand_over()
    while fresh.writer.newest is None:
        found = Checkpoints(tmp_path / "run", Disk()).newest_valid()
        if found is not None and found.position.step == 20:
            assert_holds(tmp_path / "run", earlier.job, found, earlier.states[20])
        fresh.writer.advance()
    fresh.complete()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]
    newest = Checkpoints(tmp_path / "run", Disk()).newest_valid()
    assert newest is not None
    assert_holds(tmp_path / "run", fresh.job, newest, fresh.states[3])
    fresh.train(ROWS)
    assert fresh.checkpoint().position.step == 13, "the run goes on in the place that it has taken"


def test_a_loss_of_power_at_any_moment_leaves_one_of_the_two_runs_whole(tmp_path: Path) -> None:
    disk = RecordingDisk()
    (tmp_path / "run").mkdir()
    earlier = earlier_run(tmp_path / "run", disk)
    begun = len(disk.log)
    fresh = fresh_run(tmp_path / "run", disk)
    fresh.begin()
    fresh.hand_over()
    while fresh.writer.newest is None:
        fresh.writer.advance()
    durable = len(disk.log)
    fresh.complete()
    model, steps = DiskModel(tmp_path / "run"), set[int]()
    for cut, operation in enumerate(disk.log, 1):
        model.apply(operation)
        for seed in range(SEEDS if cut >= begun else 0):
            out = tmp_path / "after"
            model.lose_power(seed, out)
            settled = Checkpoints(out, Disk())
            with damages() as damaged:
                carry_out(settled.settle())
                newest = settled.newest_valid()
            where = f"cut {cut} after {operation}, seed {seed}"
            assert damaged == [], where
            assert newest is not None, f"{where}: both runs are lost"
            step = newest.position.step
            assert step == 3 or cut < durable, f"{where}: the fresh run's checkpoint was durable"
            assert_holds(out, earlier.job, newest, (fresh if step == 3 else earlier).states[step])
            assert (out / COMPLETE).exists() == (step != 3), where
            assert not list(out.glob(".checkpoints.*")), f"{where}: something is left"
            steps.add(step)
    assert steps == {3, 20}


def killed(run: FakeRun) -> None:
    """While its first checkpoint is being written."""
    run.begin()
    while not run.checkpoints.root.exists():
        run.writer.advance()


def imported(run: FakeRun) -> None:
    """A checkpoint with which the run began: nothing was trained."""
    run.writer.begin(Position(), False, IMPORT)
    run.writer.finish(None, [])
    run.complete()


@pytest.mark.parametrize("what", [killed, imported])
def test_what_a_fresh_run_without_a_trained_checkpoint_left_is_cleared_away(
    tmp_path: Path, what: Callable[[FakeRun], None]
) -> None:
    earlier_run(tmp_path / "run", Disk())
    before = snapshot(tmp_path / "run")
    what(fresh_run(tmp_path / "run", Disk()))
    assert (tmp_path / "run" / ".checkpoints.new").is_dir()
    carry_out(Checkpoints(tmp_path / "run", Disk()).settle())
    assert snapshot(tmp_path / "run") == before
    assert not (tmp_path / "run" / ".checkpoints.new").exists()


def test_a_damaged_checkpoint_of_a_fresh_run_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    earlier = earlier_run(tmp_path / "run", Disk())
    fresh = fresh_run(tmp_path / "run", Disk())
    fresh.begin()
    fresh.hand_over()
    manifest = fresh.checkpoints.root / "step-000000000003" / "manifest.json"
    while not manifest.exists():
        fresh.writer.advance()
    manifest.write_bytes(manifest.read_bytes()[:-40])
    settled = Checkpoints(tmp_path / "run", Disk())
    with damages() as damaged:
        carry_out(settled.settle())
    newest = settled.newest_valid()
    assert newest is not None
    assert_holds(tmp_path / "run", earlier.job, newest, earlier.states[20])
    assert len(damaged) == 1


def test_checkpoints_behind_a_link_are_replaced_where_they_are(tmp_path: Path) -> None:
    earlier_run(tmp_path / "run", Disk())
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk" / "mine")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "mine")
    fresh = fresh_run(tmp_path / "run", Disk())
    fresh.checkpoint()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["mine"]
    carry_out(Checkpoints(tmp_path / "run", Disk()).settle())
    newest = Checkpoints(tmp_path / "run", Disk()).newest_valid()
    assert newest is not None
    assert_holds(tmp_path / "run", fresh.job, newest, fresh.states[3])


def test_a_mount_point_is_refused_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier_run(tmp_path / "run", Disk())
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "checkpoints")
    with pytest.raises(ConfigError, match="mount point"):
        carry_out(Checkpoints(tmp_path / "run", Disk()).begin_fresh())
