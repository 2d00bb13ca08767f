"""torchrun as this project starts it: where it listens, what it passes on, and what it ends with."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Process, Session, proc_text

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as in /proc/net/tcp and tcp6
LISTENS = "0A"
WORKER = """
import os, signal, socket, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
print("rank", rank, "attempt", attempt, "port", os.environ["MASTER_PORT"], "on", os.environ["GLOO_SOCKET_IFNAME"],
      os.environ["NCCL_SOCKET_IFNAME"], flush=True)
if rank == "1" and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "fails" and rank == "1":
    sys.exit(5)
while not stops:
    time.sleep(0.02)
time.sleep(0.5)
print("rank", rank, "attempt", attempt, "stops", len(stops), flush=True)
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as session:
        yield session


def started(session: Session, mode: str) -> Process:
    worker = session.folder / "worker.py"
    worker.write_text(WORKER)
    return session.start_module("rowcast.deploy.torchrun", "--nproc-per-node=2", "--max-restarts=1", str(worker), mode)


def listening(pid: int) -> list[str]:
    """The addresses, in hexadecimal, on which a process listens."""
    sockets = {f.readlink().name for f in Path(f"/proc/{pid}/fd").iterdir() if str(f.readlink()).startswith("socket:")}
    rows = [row.split() for name in ("net/tcp", "net/tcp6") for row in proc_text(pid, name).splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets]


def test_a_killed_trainer_comes_back_at_the_same_port_and_a_stop_is_passed_on_once(session: Session) -> None:
    torchrun = started(session, "waits")
    torchrun.until(lambda: torchrun.stdout.count("attempt 1") == 2, "second attempt of both")
    assert [address for address in listening(torchrun.pid) if address not in LOOPBACK] == []
    assert len(listening(torchrun.pid)) == 1
    met = re.findall(r"rank (\d) attempt (\d) port (\d+) on lo lo", torchrun.stdout)
    assert sorted(found[:2] for found in met)[-1] == ("1", "1")
    assert len({port for _, _, port in met}) == 1
    torchrun.signal(signal.SIGTERM)
    ended = torchrun.ended()
    assert ended.code == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d) attempt 1 stops (\d)", ended.stdout)) == [("0", "1"), ("1", "1")]
    assert session.remains() == []


def test_it_ends_with_the_code_of_the_trainer_that_failed_first(session: Session) -> None:
    ended = started(session, "fails").ended()
    assert ended.code == 5, ended.stderr
    assert session.remains() == []
