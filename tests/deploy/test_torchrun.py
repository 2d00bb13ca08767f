"""torchrun as this project starts it: where it listens, what it passes on, and what it ends with."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowcast.deploy.torchrun import OneAddress, children, pass_on
from rowcast.runtime.process import Signals
from rowcast.runtime.stops import PASSED_ON
from tests.support.processes import Process, Session, proc_text

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as in /proc/net/tcp and tcp6
LISTENS = "0A"
WAITS_S = 1.0  # without waiting for the other host, trainers would have been started long before
WORKER = """
import os, signal, socket, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
stops = []
from rowcast.runtime.stops import PASSED_ON, release
signal.signal(PASSED_ON, lambda *_: stops.append(1))
release()
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
def say(*words):  # in one write: torchrun makes stdout unbuffered, and two processes share it
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
say("rank", rank, "attempt", attempt, "port", os.environ["MASTER_PORT"],
    "on", os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
if sys.argv[1] == "waits" and rank == "1" and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "loses" and attempt == 0:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
    sys.exit(3)
if sys.argv[1] == "fails" and rank == "1":
    sys.exit(5)
while not stops:
    time.sleep(0.02)
time.sleep(0.5)
if sys.argv[1] == "fails at a stop":
    sys.exit(3)
say("rank", rank, "attempt", attempt, "stops", len(stops))
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as session:
        yield session


def started(session: Session, mode: str, name: str = "worker.py") -> Process:
    worker = session.folder / name
    worker.write_text(WORKER)
    return session.start_module("rowcast.deploy.torchrun", "--nproc-per-node=2", "--max-restarts=1", str(worker), mode)


def listening(pid: int) -> list[str]:
    """The addresses, in hexadecimal, on which a process listens."""
    sockets = {f.readlink().name for f in Path(f"/proc/{pid}/fd").iterdir() if str(f.readlink()).startswith("socket:")}
    rows = [row.split() for name in ("net/tcp", "net/tcp6") for row in proc_text(pid, name).splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets]


def test_a_killed_trainer_comes_back_at_a_new_store_and_a_stop_is_passed_on_once(session: Session) -> None:
    torchrun = started(session, "waits")
    torchrun.until(lambda: len(re.findall("attempt 1 .*\n", torchrun.stdout)) == 2, "second attempt of both")
    assert [address for address in listening(torchrun.pid) if address not in LOOPBACK] == []
    assert len(listening(torchrun.pid)) == 2, "the stores of hosts and of trainers"
    met = re.findall(r"rank (\d) attempt (\d) port (\d+) on lo lo\n", torchrun.stdout)
    assert {("0", "1"), ("1", "1")} <= {found[:2] for found in met}
    ports = {attempt: {port for _, own, port in met if own == attempt} for attempt in "01"}
    assert len(ports["1"]) == 1
    assert ports["0"] != ports["1"], "an old store has addresses of trainers that have ended"
    torchrun.signal(signal.SIGTERM)
    ended = torchrun.ended()
    assert ended.code == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d) attempt 1 stops (\d)", ended.stdout)) == [("0", "1"), ("1", "1")]
    assert session.remains() == []


SCRIPT = """
import os, signal, time
import torch.distributed as dist
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and rank == "0":
    time.sleep(1)  # so long the other has only what the store held before
dist.init_process_group("gloo")
if rank == "1" and not attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
os.write(1, f"met {attempt}\\n".encode())
time.sleep(600)  # as a script that has not come to its loop
"""


def test_a_script_meets_in_a_new_process_group_after_a_kill_and_a_stop_ends_it(session: Session) -> None:
    script = session.folder / "script.py"
    script.write_text(SCRIPT)
    torchrun = session.start_module("rowcast.deploy.torchrun", "--nproc-per-node=2", "--max-restarts=1", str(script))
    torchrun.until(lambda: torchrun.stdout.count("met 1") == 2, "a meeting of both")
    torchrun.signal(signal.SIGTERM)
    assert torchrun.ended().code == 128 + signal.SIGTERM
    assert session.remains() == []


MASK = """#!/usr/bin/env python3
import signal
signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("holds" if signal.SIGRTMIN + 1 in signals else "holds nothing", flush=True)
"""


@pytest.mark.parametrize(("name", "said"), [("trainer", "holds\n"), ("script", "holds nothing\n")])
def test_a_command_called_trainer_holds_stops_from_its_start_and_a_script_does_not(
    name: str, said: str, session: Session
) -> None:
    command = session.folder / name
    command.write_text(MASK)
    command.chmod(0o755)
    ended = session.start_module("rowcast.deploy.torchrun", "--no-python", str(command)).ended()
    assert (ended.code, ended.stdout) == (0, said), ended.stderr


def test_trainers_that_start_after_a_stop_get_it_and_children_of_the_shell_before_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals = Signals()
    monkeypatch.setattr(OneAddress, "signals", signals)
    with subprocess.Popen(["sleep", "60"]) as tee:
        others = children()
        told: set[int] = set()
        signals.stop_reason = "SIGTERM"
        pass_on(others, told)
        with subprocess.Popen(["sleep", "60"]) as trainer:
            pass_on(others, told)
            assert trainer.wait() == -PASSED_ON
        assert tee.poll() is None
        tee.kill()


def test_a_stop_during_imports_starts_no_trainer(session: Session) -> None:
    """As from a parent that is killed: it has blocked the signal until there is a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        torchrun = started(session, "waits")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    torchrun.signal(signal.SIGTERM)
    ended = torchrun.ended()
    assert (ended.code, ended.stdout) == (0, ""), ended.stderr


def test_a_trainer_that_fails_after_a_stop_is_not_started_again(session: Session) -> None:
    torchrun = started(session, "fails at a stop")
    torchrun.until(lambda: len(re.findall("attempt 0", torchrun.stdout)) == 2, "first attempt of both")
    torchrun.signal(signal.SIGTERM)
    ended = torchrun.ended()
    assert ended.code == 128 + signal.SIGTERM
    assert "attempt 1" not in ended.stdout


@pytest.mark.parametrize(("name", "starts"), [("trainer", 1), ("worker.py", 2)])
def test_it_ends_with_the_code_that_came_first_and_starts_no_refused_trainer_again(
    name: str, starts: int, session: Session
) -> None:
    ended = started(session, "fails", name).ended()
    assert (ended.code, ended.stdout.count("rank 1 attempt")) == (5, starts), ended.stderr
    assert ended.stderr.count("started again") == starts - 1
    assert session.remains() == []


def test_a_host_waits_until_one_that_was_lost_is_started_again(session: Session) -> None:
    """Trainers of host 0 end because host 1 was lost."""
    worker = session.folder / "worker.py"
    worker.write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = ["--nnodes=2", f"--master-port={port}", "--nproc-per-node=1", "--max-restarts=1"]

    def host(number: int, *mode: str) -> Process:
        options = [*shared, f"--node-rank={number}", str(worker), *mode]
        return session.start_module("rowcast.deploy.torchrun", *options)

    loss = session.folder / "loss"
    first, lost = host(0, "loses", str(loss)), host(1, "ends")
    for torchrun in (first, lost):
        torchrun.until(lambda torchrun=torchrun: "attempt 0" in torchrun.stdout, "first attempt")  # type: ignore[misc]
    [trainer] = children_of(lost.pid)
    [ends] = children_of(first.pid)
    lost.signal(signal.SIGKILL)
    session.kill(trainer)
    loss.touch()
    first.until(lambda: ends not in children_of(first.pid), "end of its trainer")
    time.sleep(WAITS_S)
    assert "attempt 1" not in first.stdout
    again = host(1, "ends")
    first.until(lambda: "attempt 1" in first.stdout, "second attempt")
    again.until(lambda: "attempt 0" in again.stdout, "first attempt of another")
    for torchrun in (first, again):
        torchrun.signal(signal.SIGTERM)
    for torchrun in (first, again):
        assert torchrun.ended().code == 0, torchrun.stderr
        assert "node_rank" not in torchrun.stderr, "torch's warning of an option that is read"


def children_of(pid: int) -> set[int]:
    return set(map(int, proc_text(pid, f"task/{pid}/children").split()))
