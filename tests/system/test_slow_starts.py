"""A process that is still starting: its peer waits for as long as it lives, whatever `transport.connect_timeout` is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rowcast.runtime.run_directory import PeerStart, Role, has_started, note_path, note_start
from tests.support.processes import Process, Session
from tests.support.watched import Clock, FakeLink, pass_time, watch_of

SLOW = 15  # seconds before a process executes the first line of its program
STARTED = (
    "import os, signal, sys, time\nif 'rowcast.{module}' in sys.orig_argv and 'run' in sys.orig_argv:\n    {does}\n"
)


def start_with(session: Session, module: str, does: str, *options: str) -> Process:
    """Starts `rowcast train`; one of its children `does` something before any line of ours."""
    (session.folder / "sitecustomize.py").write_text(STARTED.format(module=module, does=does))
    path = os.pathsep.join([str(session.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return session.start("train", "--max-steps=2", *options, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("trainer", []),
        ("prefetcher", ["--set=ranks.count=2"]),
    ],
)
def test_a_launched_process_may_take_any_time_to_start(module: str, options: list[str], session: Session) -> None:
    impatient = ["--set=transport.connect_timeout=5s", *options]
    start_with(session, module, f"time.sleep({SLOW})", *impatient).ended().quiet()
    assert session.remains() == []
    assert list(session.run_dir.rglob("*.starting")) == []


def test_a_launched_process_that_dies_at_its_start_is_noticed_at_once(session: Session) -> None:
    ended = start_with(session, "prefetcher", "os._exit(7)", "--set=transport.connect_timeout=1h").ended()
    assert ended.code == 7
    assert session.remains() == []


def test_a_launched_process_that_is_stopped_at_its_start_is_given_up(session: Session) -> None:
    does = "os.kill(os.getpid(), signal.SIGSTOP)"
    ended = start_with(session, "trainer", does, "--set=transport.connect_timeout=1s").ended()
    assert (ended.code, "no trainer came within 1 s" in ended.stderr) == (3, True)


def test_the_time_out_counts_from_the_end_of_the_peers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, starting = Clock(monkeypatch), [True]
    watch = watch_of(FakeLink(), connected=False, is_starting=lambda: starting[0])
    pass_time(clock, watch, 300.0)
    starting[0] = False
    pass_time(clock, watch, 59.0)
    with pytest.raises(Exception, match="no prefetcher came within 60 s"):
        pass_time(clock, watch, 2.0)


# the note

ROLE: Role = "trainer"
HANGS_AFTER_S = 300.0


def asleep() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"], stdout=-1)


def test_a_start_goes_on_until_its_process_is_stopped_or_ends(tmp_path: Path) -> None:
    start = PeerStart(tmp_path, ROLE, HANGS_AFTER_S)
    assert not start.goes_on(), "nobody has started"
    with asleep() as process:
        try:
            note_start(tmp_path, ROLE, process.pid)
            assert start.goes_on()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert not start.goes_on()
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            assert start.goes_on()
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not start.goes_on()
    note_start(tmp_path, ROLE, os.getpid())
    assert start.goes_on()
    has_started(tmp_path, ROLE)
    assert not start.goes_on()


def test_a_process_that_uses_no_processor_time_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asleep() as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it sleeps
            note_start(tmp_path, ROLE, process.pid)
            clock, start = Clock(monkeypatch), PeerStart(tmp_path, ROLE, HANGS_AFTER_S)
            assert start.goes_on()
            clock.now_s += HANGS_AFTER_S - 1
            assert start.goes_on()
            clock.now_s += 2
            assert not start.goes_on()
        finally:
            process.kill()


@pytest.mark.parametrize("written", ["", "12", "x y", "1 0", "OWN 1", "\xff"])
def test_a_note_of_nobody_here_is_no_start(written: str, tmp_path: Path) -> None:
    note_path(tmp_path, ROLE).write_bytes(written.replace("OWN", str(os.getpid())).encode("latin1"))
    assert not PeerStart(tmp_path, ROLE, HANGS_AFTER_S).goes_on()
