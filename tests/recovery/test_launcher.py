"""`rowcast.deploy.local` when a process, itself included, dies by SIGKILL: it says who and why, and leaves none."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import END_TIMEOUT_S, Process, Session, proc_text


def child(session: Session, word: str) -> int:
    [pid] = [pid for pid in session.children() if word in proc_text(pid, "cmdline")]
    return pid


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[Session, Process]]:
    """A run in full swing, as a user starts it."""
    with Session(tmp_path) as session:
        launcher = session.start("local")
        launcher.until_counted("rowcast_train_steps_total", 5)
        yield session, launcher


def test_a_killed_prefetcher_is_named_and_leaves_no_orphan(launcher: tuple[Session, Process]) -> None:
    session, local = launcher
    prefetcher = child(session, "\0rowcast.prefetcher\0")
    session.kill(prefetcher)
    ended = local.ended()
    assert ended.code == 128 + signal.SIGKILL
    assert ended.sentences[-1].startswith(f"the prefetcher (process {prefetcher}) was killed by SIGKILL")
    assert session.remains(killed=True) == []


def test_a_killed_launcher_takes_both_with_it_in_order(launcher: tuple[Session, Process]) -> None:
    session, local = launcher
    log = session.run_dir / "prefetcher.log"
    local.signal(signal.SIGKILL)
    local.reap()
    session.until_alone(END_TIMEOUT_S)
    assert "stopped in order" in log.read_text()
    assert session.remains() == []
    assert session.manifest().train_steps > 0
