"""A file that this host cannot read now is neither missing nor another run's: the cause is told, nothing is lost."""

import ast
import builtins
import errno
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rowcast.prefetcher.checkpoints.folder import Checkpoints, why_foreign
from rowcast.prefetcher.run.starting_point import RUN_FILE, read_note
from rowcast.runtime.checkpoint_manifest import (
    SHARD_NAME,
    checked_file,
    checkpoint_folders,
    newest_checkpoint,
    read_manifest,
    read_shard_file,
    readable,
    run_of,
)
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import OS_ADVICE, DataError, RowcastError, Unreadable
from rowcast.runtime.run_directory import COMPLETE, RunDirectory
from tests.checkpoints.fake_run import FakeRun
from tests.serving.served_run import SMALL, ServedRun, serving_job
from tests.support.facts import facts

ROOT = Path(__file__).parents[2]
ERRORS = (errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    found = ServedRun(serving_job(tmp_path / "run", SMALL))
    for share in (0.6, 0.3):
        found.train_some(share)
        found.checkpoint()
    return found


def failing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: Any, *_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), str(name))

    for module, function in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir")):
        monkeypatch.setattr(module, function, fail)


READS: dict[str, Callable[[Path, Path, Any], Any]] = {
    "run_of": lambda folder, newest, manifest: run_of(newest),
    "read_manifest": lambda folder, newest, manifest: read_manifest(newest),
    "readable": lambda folder, newest, manifest: readable(newest),
    "checked_file": lambda folder, newest, manifest: checked_file(folder / "checkpoints", manifest.dense),
    "checkpoint_folders": lambda folder, newest, manifest: checkpoint_folders(folder / "checkpoints"),
    "newest_checkpoint": lambda folder, newest, manifest: newest_checkpoint(folder),
    "newest_valid": lambda folder, newest, manifest: Checkpoints(folder, Disk()).newest_valid(),
    "choose": lambda folder, newest, manifest: Checkpoints(folder, Disk()).choose(None),
    "read_note": lambda folder, newest, manifest: read_note(folder),
    "read_shard_file": lambda folder, newest, manifest: read_shard_file(newest / "shard-001.json"),
    "completion": lambda folder, newest, manifest: RunDirectory(folder, "trainer").completion(),
}


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("read", READS)
def test_an_error_of_the_host_is_told_and_is_no_value(
    read: str, number: int, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.job.run_dir
    [newest, _] = checkpoint_folders(folder / "checkpoints")
    manifest = read_manifest(newest)
    failing(number, monkeypatch)
    with pytest.raises(RowcastError, match=facts(os.strerror(number))) as caught:
        READS[read](folder, newest, manifest)
    assert not isinstance(caught.value, DataError), "damage is answered with an older checkpoint"
    assert "elsewhere" not in str(caught.value)
    if number in OS_ADVICE and read != "completion":
        assert OS_ADVICE[number] in str(caught.value)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    lowest = os.open(os.devnull, os.O_RDONLY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)


def test_without_a_descriptor_a_run_keeps_its_newest_checkpoint(run: FakeRun) -> None:
    [newest, older] = checkpoint_folders(run.job.run_dir / "checkpoints")
    with no_descriptor_left(), pytest.raises(Unreadable, match=facts(newest, "ulimit -n")):
        run_of(newest)
    with no_descriptor_left(), pytest.raises(RowcastError, match=facts("ulimit -n")):
        Checkpoints(run.job.run_dir, Disk()).newest_valid()
    with no_descriptor_left():
        reason = why_foreign(newest, "0123456789ab")
    assert "ulimit -n" in str(reason)
    assert newest.exists()
    assert older.exists()


def test_what_is_missing_is_missing(tmp_path: Path) -> None:
    (tmp_path / "step-000000000010").mkdir()
    assert run_of(tmp_path / "step-000000000010") is None
    assert readable(tmp_path / "step-000000000010") is None
    assert checkpoint_folders(tmp_path) == checkpoint_folders(tmp_path / "none") == []
    assert read_note(tmp_path) is None
    assert read_shard_file(tmp_path / SHARD_NAME) is None
    assert RunDirectory(tmp_path, "trainer").completion() is None
    assert not (tmp_path / COMPLETE).exists()
    assert not (tmp_path / RUN_FILE).exists()


# every place where an error becomes a value

PRODUCT = ("runtime", "job", "protocol", "prefetcher", "trainer", "serving", "analysis", "deploy")
VALUES = {ast.Constant, ast.List, ast.Dict, ast.Tuple}
MEANT = {  # function: why no harm is done
    "prefetcher/checkpoints/folder.py: softly": "told as a warning; nothing is removed",
    "prefetcher/readers/copies.py: find": "the file is copied again",
    "protocol/transport/endpoint.py: _name_of": "a caller is refused, and comes again",
    "protocol/transport/endpoint.py: is_ipv6": "a name without an address yet",
    "protocol/transport/rank_links.py: read_listens": "looked for again, until a time-out that is told",
    "protocol/transport/ring_file.py: _remove_if_left": "a file stays",
    "runtime/checkpoint_manifest.py: run_of": "only where no file is: a folder has the manifest's name",
    "runtime/compiled.py: _load_index": "told once; the loop is compiled",
    "runtime/compiled.py: _locked": "without a lock two processes compile one loop",
    "runtime/compiled.py: prepared_for": "only says why a loop is compiled",
    "runtime/machine.py: at_other_end": "of the kernel: not visible",
    "runtime/machine.py: room_of": "of /sys: not visible",
    "runtime/machine.py: stat_of": "of /proc: the process is gone",
    "runtime/machine.py: interface_toward": "of the kernel: no route",
    "runtime/run_directory.py: failure_since": "a note shortens a wait, and its loss lengthens it",
    "runtime/telemetry/server.py: _accept": "a caller has left",
    "trainer/run/meeting.py: answers": "asked again, until a time-out that is told",
}


def values_of_errors(source: str) -> Iterator[str]:
    """Names the functions that return a constant where an OSError of any number was caught."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.type is not None:
                    caught = ast.unparse(node.type).strip("()").split(", ")
                    ends = [own for own in node.body if isinstance(own, ast.Return)]
                    if "OSError" in caught and ends and (ends[0].value is None or type(ends[0].value) in VALUES):
                        yield function.name


def test_every_place_where_an_error_becomes_a_value_is_meant() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        for name in values_of_errors(path.read_text())
    }
    assert found == set(MEANT)
    example = "def f():\n try: pass\n except (OSError, ValueError): return ''\n except OSError: raise"
    assert list(values_of_errors(example)) == ["f"]
