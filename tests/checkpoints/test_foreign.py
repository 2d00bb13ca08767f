"""Only what a run has surely written is removed from among its checkpoints; what anybody else put there stays."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rowcast.prefetcher.checkpoints.folder import OWN_NAME, Checkpoints, carry_out
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME
from rowcast.runtime.disk import Disk, FileWrite
from rowcast.runtime.errors import RowcastError
from tests.checkpoints.fake_ranks import FakeRanks
from tests.checkpoints.fake_run import FakeRun, UnsyncedDisk, assert_holds, small_job
from tests.support.facts import facts

pytestmark = pytest.mark.usefixtures("small_files")
ROWS = {0: [1, 2, 3], 1: [5, 7], 2: list(range(20))}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(small_job(tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes | str]:
    """Files, links and folders below it."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def checkpoints(run: FakeRun, number: int) -> list[dict[str, object]]:
    """Makes so many. Returns the warnings."""
    with capture_logs() as logs:
        for _ in range(number):
            run.train(ROWS)
            run.checkpoint()
    return [dict(entry) for entry in logs if entry["log_level"] == "warning"]


def notes(folder: Path) -> None:
    (folder / "notes.txt").write_text("why this one is good")


def export(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_bytes(b"exported")


def named_like_ours(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"of a model in two files")


def folder_named_as_ours(folder: Path) -> None:
    (folder / "dense-00007.safetensors").mkdir()
    (folder / "dense-00007.safetensors" / "backup").write_bytes(b"kept")


def link_named_as_ours(folder: Path) -> None:
    (folder / "dense-00007.safetensors").symlink_to("../../../elsewhere")


PUT = pytest.mark.parametrize("put", [notes, export, named_like_ours, folder_named_as_ours, link_named_as_ours])


@PUT
def test_a_checkpoint_with_something_else_in_its_folder_stays_whole(run: FakeRun, put: Callable[[Path], None]) -> None:
    run.train(ROWS)
    manifest = run.checkpoint()
    folder = run.checkpoints.root / manifest.name
    put(folder)
    before = content(folder)
    warnings = checkpoints(run, 20)
    assert content(folder) == before
    run.checkpoints.verify(manifest)
    assert_holds(run.job.run_dir, run.job, manifest, run.states[10])
    assert run.checkpoints.candidates() == ["step-000000000210", "step-000000000200", manifest.name]
    assert [entry["folder"] for entry in warnings] == [str(folder)], "one warning, not one for each checkpoint"
    assert "rowcast did not write" in str(warnings[0]["because"])


@PUT
def test_a_folder_that_is_called_as_ours_and_holds_something_else_stays(
    run: FakeRun, put: Callable[[Path], None]
) -> None:
    folder = run.checkpoints.root / "step-000000000003"
    folder.mkdir(parents=True)
    (folder / "fp32_d4_adagrad-00000.safetensors").write_bytes(b"a backup of mine")
    put(folder)
    before = content(folder)
    warnings = checkpoints(run, 3)
    checkpoints(FakeRun(run.job, newest=run.newest), 2)
    assert content(folder) == before
    assert [entry["folder"] for entry in warnings] == [str(folder)]


def test_another_runs_checkpoint_stays_whole_and_is_not_counted_among_those_kept(run: FakeRun, tmp_path: Path) -> None:
    other = FakeRun(small_job(tmp_path / "other"), run_id="fedcba987654", keep=1)
    other.train(ROWS, steps=3)
    other.checkpoint()
    other.train({0: [4]}, steps=4)
    copied = other.checkpoint()
    checkpoints(run, 1)
    shutil.copytree(other.checkpoints.root, run.checkpoints.root, dirs_exist_ok=True)
    assert (run.checkpoints.root / "step-000000000003").is_dir(), "its base"
    warnings = checkpoints(run, 3)
    assert run.checkpoints.candidates() == ["step-000000000040", "step-000000000030", copied.name]
    assert_holds(run.job.run_dir, run.job, copied, other.rows())
    assert [(entry["folder"], entry["because"]) for entry in warnings] == [
        (str(run.checkpoints.root / copied.name), "it holds a checkpoint of run fedcba987654")
    ]


@pytest.mark.parametrize("harm", [b"", b"{"])
def test_a_damaged_checkpoint_of_another_run_stays_too(run: FakeRun, tmp_path: Path, harm: bytes) -> None:
    other = FakeRun(small_job(tmp_path / "other"), run_id="fedcba987654")
    other.train(ROWS, steps=3)
    copied = run.checkpoints.root / other.checkpoint().name
    shutil.copytree(other.checkpoints.root, run.checkpoints.root)
    manifest = copied / MANIFEST_NAME
    manifest.write_bytes(harm + manifest.read_bytes()[:-9])
    before = content(copied)
    checkpoints(run, 3)
    assert content(copied) == before


def test_a_checkpoint_never_takes_the_place_of_another_runs(run: FakeRun, tmp_path: Path) -> None:
    other = FakeRun(small_job(tmp_path / "other"), run_id="fedcba987654")
    other.train(ROWS, steps=20)
    copied = other.checkpoint()
    checkpoints(run, 1)
    shutil.copytree(other.checkpoints.root, run.checkpoints.root, dirs_exist_ok=True)
    run.train(ROWS)
    with pytest.raises(RowcastError, match=facts("step-000000000020", "run fedcba987654", "folder")):
        run.checkpoint()
    assert_holds(run.job.run_dir, run.job, copied, other.rows())


def test_links_are_never_followed(run: FakeRun, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "fp32_d4_adagrad-00000.safetensors").write_bytes(b"moved to a larger disk")
    (elsewhere / "victim").write_bytes(b"not ours")
    before = content(elsewhere)
    checkpoints(run, 1)
    root = run.checkpoints.root
    (root / "step-000000000003").symlink_to(elsewhere)
    (root / "step-000000000020").mkdir()
    (root / "step-000000000020" / "manifest.json.partial").symlink_to(elsewhere / "victim")
    (root / "step-000000000020" / "dense-00000.safetensors").symlink_to(elsewhere / "nothing yet")
    run.train(ROWS)
    with pytest.raises(RowcastError, match="Too many levels of symbolic links"):
        run.checkpoint()
    (root / "step-000000000020" / "manifest.json.partial").unlink()
    later = FakeRun(run.job, newest=run.checkpoints.newest_valid())
    checkpoints(later, 3)
    assert content(elsewhere) == before
    assert (root / "step-000000000003").is_symlink()


def test_a_folder_in_the_place_of_a_manifest_stops_no_removal(run: FakeRun) -> None:
    folder = run.checkpoints.root / "step-000000000003" / MANIFEST_NAME
    folder.mkdir(parents=True)
    notes(folder)
    warnings = checkpoints(run, 4)
    assert (folder / "notes.txt").exists()
    assert run.checkpoints.candidates() == ["step-000000000040", "step-000000000030", "step-000000000003"]
    assert ["(unreadable)" in str(entry["because"]) for entry in warnings] == [True]
    replaced(run.job.run_dir)
    assert (run.job.run_dir / "checkpoints.left-1" / "step-000000000003" / MANIFEST_NAME / "notes.txt").exists()


def test_a_file_where_a_folder_belongs_stays(run: FakeRun) -> None:
    run.checkpoints.root.mkdir()
    file = run.checkpoints.root / "step-000000000003"
    file.write_bytes(b"a backup")
    checkpoints(run, 3)
    assert file.read_bytes() == b"a backup"


def test_every_name_of_a_run_is_known_as_its_own(tmp_path: Path) -> None:
    """Otherwise the run would keep its own files as if they were somebody else's."""
    names = set[str]()

    class Watched(UnsyncedDisk):
        def create(self, path: Path) -> FileWrite:
            names.add(path.name)
            return super().create(path)

        def rename(self, source: Path, target: Path) -> None:
            names.add(target.name)
            super().rename(source, target)

    for ranks in (1, 2):
        for optimizer in ("sgd", "rowwise_adagrad"):
            run = FakeRanks(small_job(tmp_path / f"{optimizer} {ranks}", optimizer), ranks, disk=Watched())
            run.train(ROWS)
            run.checkpoint()
    assert len(names) > 12
    assert {"shard-001.json", "manifest.json.partial", "fp32_d8_rowwise_adagrad-r001-00000.safetensors"} <= names
    assert [name for name in names if not OWN_NAME.fullmatch(name)] == []
    for name in ("dense-1.safetensors", "fp32_d4_adagrad-00000.safetensors.bak", "fp32_d4_mine-00000.safetensors"):
        assert not OWN_NAME.fullmatch(name)


# a fresh run


def earlier_run(run_dir: Path) -> FakeRun:
    earlier = FakeRun(small_job(run_dir))
    checkpoints(earlier, 2)
    (earlier.checkpoints.root / "interval.json").write_text("{}")  # of an earlier version
    return earlier


def replaced(run_dir: Path) -> FakeRun:
    """A fresh run has had its first checkpoint."""
    fresh = FakeRun(small_job(run_dir), run_id="00000000aaaa")
    carry_out(fresh.checkpoints.begin_fresh())
    fresh.train({0: [9]}, steps=3)
    fresh.checkpoint()
    return fresh


def test_a_fresh_run_leaves_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    earlier_run(tmp_path / "run")
    with capture_logs() as logs:
        replaced(tmp_path / "run")
    assert logs == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000000003"]


def test_what_others_put_among_the_checkpoints_outlives_their_replacement(tmp_path: Path) -> None:
    earlier = earlier_run(tmp_path / "run")
    root = earlier.checkpoints.root
    (root / "read me").write_text("mine")
    export(root)
    notes(root / "step-000000000020")
    before = content(root)
    with capture_logs() as logs:
        fresh = replaced(tmp_path / "run")
        fresh.train(ROWS)
        fresh.checkpoint()
    left = tmp_path / "run" / "checkpoints.left-1"
    kept = {"read me", "mine", "mine/model.safetensors"} | {name for name in before if "step-000000000020" in name}
    assert earlier.writer.newest is not None
    named = {file.file for file in earlier.writer.newest.files}
    found = content(left)
    assert kept | named <= found.keys() <= kept | named | {"step-000000000010"}
    assert all(found[name] == before[name] for name in found)
    assert [entry["folder"] for entry in logs if "stay, as" in entry["event"]] == [str(left)]
    assert Checkpoints(tmp_path / "run", Disk()).candidates() == ["step-000000000013", "step-000000000003"]
    carry_out(Checkpoints(tmp_path / "run", Disk()).settle())
    assert content(left) == found


def test_checkpoints_of_two_runs_are_both_left_where_nobody_knows_which_was_replaced(tmp_path: Path) -> None:
    earlier = earlier_run(tmp_path / "run")
    other = FakeRun(small_job(tmp_path / "other"), run_id="fedcba987654")
    checkpoints(other, 4)
    shutil.copytree(other.checkpoints.root, earlier.checkpoints.root, dirs_exist_ok=True)
    before = content(earlier.checkpoints.root)
    replaced(tmp_path / "run")
    assert content(tmp_path / "run" / "checkpoints.left-1") == before


@pytest.mark.parametrize("begins", [True, False])
def test_what_others_put_beside_a_fresh_run_that_was_killed_stays(tmp_path: Path, begins: bool) -> None:
    earlier_run(tmp_path / "run")
    new = tmp_path / "run" / ".checkpoints.new"
    (new / "step-000000000003").mkdir(parents=True)
    (new / "step-000000000003" / "dense-00000.safetensors").write_bytes(b"of the killed one")
    notes(new)
    (tmp_path / "run" / "checkpoints.left-1").mkdir()
    fresh = Checkpoints(tmp_path / "run", Disk())
    carry_out(fresh.begin_fresh() if begins else fresh.settle())
    assert content(tmp_path / "run" / "checkpoints.left-2") == {"notes.txt": b"why this one is good"}
    assert not new.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
@pytest.mark.parametrize("name", [".checkpoints.new", ".checkpoints.replaced"])
def test_a_file_or_a_link_in_the_place_of_a_fresh_runs_folder_is_moved_aside(
    tmp_path: Path, kind: str, name: str
) -> None:
    earlier_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    notes(tmp_path / "mine")
    place = tmp_path / "run" / name
    if kind == "file":
        place.write_bytes(b"mine")
    else:
        place.symlink_to(tmp_path / "mine")
    carry_out(Checkpoints(tmp_path / "run", Disk()).settle())
    replaced(tmp_path / "run")
    left = tmp_path / "run" / "checkpoints.left-1"
    assert left.is_symlink() if kind == "link" else left.read_bytes() == b"mine"
    assert (tmp_path / "mine" / "notes.txt").exists()


# removals that fail


class Stubborn(UnsyncedDisk):
    """Removes nothing while `refuses` names one of its operations."""

    def __init__(self) -> None:
        self.refuses = ""
        self.log: list[tuple[str, str]] = []

    def unlink(self, path: Path) -> None:
        self._refuse("unlink", path)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._refuse("rmdir", path)
        super().rmdir(path)

    def sync_folder(self, path: Path) -> None:
        # those of a checkpoint that is written come before anything is removed
        if "old manifest" in self.refuses and not (path / MANIFEST_NAME).exists():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        self.log.append(("sync", path.name))

    def _refuse(self, kind: str, path: Path) -> None:
        if kind in self.refuses:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        self.log.append((kind, f"{path.parent.name}/{path.name}"))


@pytest.mark.parametrize("refuses", ["unlink", "rmdir"])
def test_what_cannot_be_removed_is_a_warning_and_is_tried_again_at_the_next_checkpoint(
    tmp_path: Path, refuses: str
) -> None:
    disk = Stubborn()
    run = FakeRun(small_job(tmp_path / "run"), disk=disk, keep=1)
    left_over = run.checkpoints.root / "step-000000000003"
    left_over.mkdir(parents=True)
    (left_over / "dense-00000.safetensors").write_bytes(b"of a crash")
    disk.refuses = refuses
    warnings = checkpoints(run, 3)
    assert left_over.exists()
    assert len(warnings) >= 6, "at each checkpoint before it and after it"
    assert {entry["error"] for entry in warnings} == {"Permission denied"}
    assert run.checkpoints.candidates()[0] == "step-000000000030"
    disk.refuses = ""
    assert checkpoints(run, 1) == []
    assert not left_over.exists()
    assert run.checkpoints.candidates() == ["step-000000000040"]
    assert run.writer.newest is not None
    assert_holds(run.job.run_dir, run.job, run.writer.newest, run.rows())


def test_files_go_only_after_the_removal_of_their_manifest_is_on_the_disk(tmp_path: Path) -> None:
    """Also where that had failed at the checkpoint before."""
    disk = Stubborn()
    run = FakeRun(small_job(tmp_path / "run"), disk=disk, keep=1)
    checkpoints(run, 1)
    disk.refuses = "old manifest"
    run.train({})
    folder = run.checkpoints.root / "step-000000000010"
    files = content(folder).keys() - {MANIFEST_NAME}
    run.begin()
    run.hand_over()
    disk.refuses = ""
    while run.writer.newest is None or run.writer.newest.position.step != 20:
        run.writer.advance()
    disk.refuses = "old manifest"
    run.complete()
    assert content(folder).keys() == files, "the manifest was removed, and perhaps is still on the disk"
    disk.refuses, disk.log = "", []
    checkpoints(run, 1)
    first = next(i for i, (kind, name) in enumerate(disk.log) if kind == "unlink" and "step-000000000010/" in name)
    assert ("sync", folder.name) in disk.log[:first]


def test_an_earlier_run_that_cannot_be_removed_yet_ends_no_fresh_run(tmp_path: Path) -> None:
    disk = Stubborn()
    earlier_run(tmp_path / "run")
    fresh = FakeRun(small_job(tmp_path / "run"), disk=disk, run_id="00000000aaaa")
    carry_out(fresh.checkpoints.begin_fresh())
    disk.refuses = "unlink"
    warnings = checkpoints(fresh, 2)
    assert len(warnings) >= 2
    assert (tmp_path / "run" / ".checkpoints.replaced").exists()
    carry_out(Checkpoints(tmp_path / "run", disk).settle())
    again = FakeRun(small_job(tmp_path / "run"), disk=disk, run_id="00000000bbbb")
    carry_out(again.checkpoints.begin_fresh())
    checkpoints(again, 1)
    assert (tmp_path / "run" / "checkpoints.left-1").is_dir(), "in the way of the next fresh run"
    disk.refuses = ""
    checkpoints(again, 1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "checkpoints.left-1"}
