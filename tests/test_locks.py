"""Locks where the file system has none, and links and pipes where a note or a log belongs."""

import ast
import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rowcast.protocol.transport.endpoint import EndpointLock
from rowcast.protocol.transport.ring_file import RingFile
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.run_directory import RunDirectory, holder, note_path, note_start
from rowcast.runtime.telemetry.logs import open_log
from rowcast.serving.publisher import Publisher
from rowcast.trainer.adopt.adoption import own_folder
from rowcast.trainer.report.results import LOSSES, ResultFiles
from tests.support.facts import facts

ROOT = Path(__file__).parent.parent
PRODUCT = ("runtime", "job", "protocol", "prefetcher", "trainer", "serving", "analysis", "deploy")


def enter(made: Any) -> None:
    with made:
        pass


TAKERS: dict[str, Callable[[Path], Any]] = {
    "a run directory": lambda folder: enter(RunDirectory(folder, "trainer")),
    "who holds it": lambda folder: holder(folder, "prefetcher"),
    "a socket": lambda folder: EndpointLock(folder / "a.sock", folder).acquire(),
    "a ring": lambda folder: RingFile.create(4096, "fetch", folder),
    "a publisher": lambda folder: enter(Publisher(folder, folder, "fp32", 1).lock()),
    "an adopted script": lambda folder: own_folder(),
}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO], ids=lambda own: errno.errorcode[own])
@pytest.mark.parametrize("taker", TAKERS)
def test_a_folder_without_locks_is_refused_with_a_sentence(
    taker: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "prefetcher.lock").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fcntl, "flock", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=facts(tmp_path, os.strerror(number))):
        TAKERS[taker](tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not [*tmp_path.glob("rowcast-*")]


def test_one_function_takes_locks() -> None:
    calls = {
        (path.name, ast.unparse(node.args[1]))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "fcntl.flock"
    }
    assert {(name, kind) for name, kind in calls if kind != "fcntl.LOCK_UN"} == {("disk.py", "kind | fcntl.LOCK_NB")}


def write_log(path: Path) -> None:
    with open_log(path, "ab") as log:
        log.write(b"a line\n")


def write_losses(path: Path) -> None:
    with ResultFiles(path.parent):
        pass


WRITERS: dict[str, Callable[[Path], None]] = {
    note_path(Path(), "trainer").name: lambda path: note_start(path.parent, "trainer", os.getpid()),
    "prefetcher.log": write_log,
    LOSSES: write_losses,
}


@pytest.mark.parametrize("name", WRITERS)
def test_notes_and_logs_do_not_follow_links_and_do_not_wait_for_pipes(name: str, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("ten years")
    for kind in ("link", "pipe"):
        run = tmp_path / kind
        run.mkdir()
        if kind == "link":
            (run / name).symlink_to(thesis)
        else:
            os.mkfifo(run / name)
        with suppress(RowcastError):
            WRITERS[name](run / name)
        assert thesis.read_text() == "ten years"
    WRITERS[name](tmp_path / name)
    assert (tmp_path / name).is_file()
