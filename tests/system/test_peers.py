"""A peer with another job or version, one that never comes, leaves, stands still or is slow; or two of them."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from rowcast.protocol.conversation import GONE_GRACE_S, PAUSE_S
from rowcast.runtime import run_directory
from rowcast.runtime.errors import ConfigError, PeerLost, PeerNeverCame, peer_failure
from rowcast.runtime.run_directory import Role, RunDirectory, failure_path, failure_since, write_note
from tests.support.facts import facts
from tests.support.processes import Process, Session, proc_text
from tests.support.watched import Clock, FakeLink, pass_time, watch_of

SIGCONT, SIGKILL, SIGSTOP, SIGTERM = signal.SIGCONT, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
SILENCE_S, STALL_S = 7.0, 300.0  # transport.silence_timeout and stall_timeout by default
NOTICE_LIMIT_S = 10.0  # that the issue allows for noticing that a peer is gone
WENT_AWAY = "went away; its log or output says why. Start again"


def one_sentence(code: int, *processes: Process) -> str:
    """That all the processes end with, and with `code`."""
    sentences = {process.ended().refused(code) for process in processes}
    assert len(sentences) == 1, sentences
    return sentences.pop()


# who may talk to whom


def test_a_peer_with_another_job_file_ends_both(session: Session) -> None:
    prefetcher = session.start("prefetcher")
    trainer = session.start("trainer", "--set=job.seed=2", "--set=trainer.threads=2")
    sentence = one_sentence(5, prefetcher, trainer)
    assert sentence.startswith("the two processes were started with different job files")
    assert session.remains() == []


def test_a_peer_that_never_comes_is_given_up(session: Session, other: Session) -> None:
    processes = {"trainer": session.start("prefetcher", "--set=transport.connect_timeout=500ms")}
    processes["prefetcher"] = other.start("trainer", "--set=transport.connect_timeout=500ms")
    for missing, process in processes.items():
        sentence = process.ended().refused(3)
        assert (
            sentence
            == f"no {missing} came within 0.5 s; start it with the same job file, or raise transport.connect_timeout"
        )
    assert (session.remains(), other.remains()) == ([], [])


def test_a_second_process_of_a_role_is_refused_and_the_first_goes_on(session: Session, other: Session) -> None:
    prefetcher, trainer = session.start("prefetcher"), other.start("trainer")
    prefetcher.until_logged("serving metrics")
    trainer.until_logged("waiting for the prefetcher")
    seconds = session.start("prefetcher"), other.start("trainer")
    for first, second, role in zip((prefetcher, trainer), seconds, ("prefetcher", "trainer"), strict=True):
        assert f"is held by a {role} with process id {first.pid}; " in second.ended().refused(2)
    shutil.rmtree(session.run_dir)  # with the lock in it, but not the socket
    sentence = session.start("prefetcher").ended().refused(2)
    assert sentence.startswith(f"another prefetcher serves run directory {session.run_dir} (pid {prefetcher.pid}); ")
    for first in (prefetcher, trainer):
        first.signal(SIGTERM)
        first.ended().quiet()


# who fails before the two have met


def damage_every_checkpoint(session: Session) -> None:
    folder = session.run_dir / "checkpoints" / "step-000000000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_prefetcher_that_fails_before_the_two_have_met_ends_a_waiting_trainer(session: Session) -> None:
    damage_every_checkpoint(session)
    trainer = session.start("trainer")
    trainer.until_logged("waiting for the prefetcher")
    sentence = session.start("prefetcher").ended().refused(4)
    assert "manifest" in sentence
    assert trainer.ended(NOTICE_LIMIT_S).refused(4) == sentence
    assert session.remains() == []


def test_a_trainer_that_fails_before_the_two_have_met_ends_a_waiting_prefetcher(session: Session) -> None:
    prefetcher = session.start("prefetcher")
    prefetcher.until_logged("serving metrics")
    sentence = session.start("trainer", "--set=trainer.device=cuda:99").ended().refused(2)
    assert prefetcher.ended(NOTICE_LIMIT_S).refused(2) == sentence
    assert session.remains() == []


@pytest.mark.parametrize(
    ("failed", "wrong"), [("prefetcher", "--checkpoint=step-000000000001"), ("trainer", "--set=trainer.devise=cpu")]
)
def test_a_failure_from_before_a_process_was_started_does_not_end_it(
    failed: Role, wrong: str, session: Session
) -> None:
    session.run_dir.mkdir()
    session.start(failed, wrong).ended().refused(2)
    note = failure_path(session.run_dir, failed)
    assert note.exists()
    if failed == "prefetcher":
        trainer = session.start("trainer")
        trainer.until_logged("waiting for the prefetcher")
        prefetcher = session.start("prefetcher", "--max-steps=2")
    else:
        prefetcher = session.start("prefetcher", "--max-steps=2")
        prefetcher.until_logged("serving metrics")
        trainer = session.start("trainer")
    prefetcher.ended().quiet()
    trainer.ended().quiet()
    assert not note.exists()


def test_a_note_of_a_failure_counts_on_this_host_and_after_the_reader_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory(tmp_path, "trainer") as directory:
        began_s = time.monotonic()
        directory.note_failure(ConfigError("no such\ndevice"))
    failure = failure_since(tmp_path, "trainer", began_s)
    assert isinstance(failure, ConfigError)
    assert str(failure) == "no such device"
    assert failure.is_peers
    assert failure_since(tmp_path, "trainer", time.monotonic()) is None
    assert failure_since(tmp_path, "prefetcher", began_s) is None
    monkeypatch.setattr(run_directory, "boot_id", lambda: "another")
    assert failure_since(tmp_path, "trainer", began_s) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"code": 2}'])
def test_what_is_no_note_of_a_failure_is_not_taken_for_one(content: bytes, tmp_path: Path) -> None:
    failure_path(tmp_path, "trainer").write_bytes(content)
    assert failure_since(tmp_path, "trainer", 0.0) is None


def test_a_lock_that_is_a_link_is_refused_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("of somebody")
    (tmp_path / "trainer.lock").symlink_to("notes")
    with pytest.raises(ConfigError, match="cannot be written"), RunDirectory(tmp_path, "trainer"):
        pass
    assert (tmp_path / "notes").read_text() == "of somebody"


def test_a_process_that_was_forked_meanwhile_does_not_hold_the_directory_on(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "trainer") as own:
        assert own._lock is not None
        forked = os.dup(own._lock)  # it shares the lock as a child's does
    with RunDirectory(tmp_path, "trainer"):
        os.close(forked)


@pytest.mark.parametrize("error", [PeerNeverCame("nobody"), peer_failure(2, "of the peer"), KeyboardInterrupt()])
def test_a_failure_that_is_not_a_process_s_own_is_not_noted(error: BaseException, tmp_path: Path) -> None:
    RunDirectory(tmp_path, "trainer").note_failure(error)
    assert list(tmp_path.iterdir()) == []


# who goes away


@pytest.mark.parametrize("killed", ["prefetcher", "trainer"])
def test_a_killed_peer_ends_the_other_and_nothing_is_left(killed: str, session: Session) -> None:
    prefetcher, trainer = session.start_training()
    assert session.rings() == [], "another run may remove what a kill leaves, so they must be gone before it"
    victim, survivor = (prefetcher, trainer) if killed == "prefetcher" else (trainer, prefetcher)
    victim.signal(SIGKILL)
    assert survivor.ended(NOTICE_LIMIT_S).refused(3) == f"the {killed} {WENT_AWAY}"
    assert session.remains(killed=killed == "prefetcher") == []


def test_a_killed_decoding_process_ends_both(session: Session) -> None:
    prefetcher, trainer = session.start_training()
    [decoder] = [pid for pid in session.children() if "spawn_main" in proc_text(pid, "cmdline")]
    session.kill(decoder)
    sentence = one_sentence(1, prefetcher, trainer)
    assert sentence.startswith(f"the decoding process (pid {decoder}, after ")
    assert "was killed by SIGKILL" in sentence
    assert session.remains() == []


def test_a_trainer_that_takes_long_to_build_its_model_is_not_given_up(session: Session) -> None:
    session.write_job(
        model={"kind": "tests.system.odd_parts:slow_model", "options": {"build_s": 4.0}},
        transport={"silence_timeout": "2.5s"},
    )
    # as if the trainer were on another host, so that its heartbeats alone say that it lives
    prefetcher = session.start_patched(
        "prefetcher", "from rowcast.protocol.transport import zmq_link as z; z.ZmqLink.peer_runs = False"
    )
    trainer = session.start("trainer")
    trainer.until_counted("rowcast_train_steps_total", 1)
    trainer.signal(SIGTERM)
    prefetcher.ended().quiet()
    trainer.ended().quiet()


def test_two_processes_without_progress_give_up_and_say_what_they_waited_for(session: Session) -> None:
    reader = {"format": "tests.system.odd_parts:hanging_reader", "options": {"num_batches": 60}}
    session.write_job(data=reader, transport={"stall_timeout": "9s"})
    waits = "the prefetcher waits for batches from the reader, the trainer for rows"
    waits_too = "the trainer waits for rows, the prefetcher for batches from the reader"
    for process in session.start_both():
        sentence = process.ended().refused(3)
        assert re.fullmatch(
            rf"no progress for \d+ s \(transport.stall_timeout\) after step 51: ({waits}|{waits_too})", sentence
        )
    assert session.remains() == []


# the watch alone


def test_silence_while_this_process_was_stopped_is_not_held_against_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    watch = watch_of(FakeLink(last_received_s=clock.now_s))
    watch.advance()
    clock.now_s += 1000.0  # longer than every limit
    pass_time(clock, watch, SILENCE_S - 0.1)
    with pytest.raises(PeerLost, match=r"prefetcher.*7\.\d s.*silence_timeout"):
        pass_time(clock, watch, 0.3)


def test_a_silent_peer_that_runs_has_until_the_stall_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(monkeypatch), FakeLink(peer_runs=True)
    link.last_received_s = clock.now_s
    watch = watch_of(link, makes_progress=True)
    pass_time(clock, watch, STALL_S - 1.0)
    with pytest.raises(PeerLost, match=facts("300 s", "transport.stall_timeout")):
        pass_time(clock, watch, 2.0)


def test_a_silent_peer_that_is_stopped_meanwhile_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(monkeypatch), FakeLink(peer_runs=True)
    link.last_received_s = clock.now_s
    watch = watch_of(link)
    pass_time(clock, watch, 2 * SILENCE_S)
    link.peer_runs = False
    with pytest.raises(PeerLost, match=r"14\.\d s.*transport\.silence_timeout"):
        pass_time(clock, watch, 0.1)


def test_a_peer_that_ticks_slowly_is_still_found_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = watch_of(FakeLink(last_received_s=clock.now_s))
    with pytest.raises(PeerLost, match="silent"):
        pass_time(clock, watch, SILENCE_S + PAUSE_S, tick_s=PAUSE_S - 0.1)


def test_a_peer_that_leaves_before_the_two_have_met_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    link = FakeLink()
    watch = watch_of(link, connected=False)
    pass_time(clock, watch, 30.0)
    link.peer_gone = True
    with pytest.raises(PeerLost, match=f"the prefetcher {WENT_AWAY}"):
        pass_time(clock, watch, GONE_GRACE_S + 0.2)


def test_what_killed_a_peer_is_told_when_it_is_lost_and_ends_no_wait_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, link = Clock(monkeypatch), FakeLink()
    write_note(tmp_path, "prefetcher", 0, "the prefetcher of rank 1 was killed")
    watch = watch_of(link, connected=False, failure=lambda: failure_since(tmp_path, "prefetcher", 0.0))
    pass_time(clock, watch, 30.0)
    link.peer_gone = True
    with pytest.raises(PeerLost, match=facts("the prefetcher of rank 1 was killed")):
        pass_time(clock, watch, GONE_GRACE_S + 0.2)
