"""Ranks join torch's group, or all end soon with the sentence of the first that ended."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rowcast.runtime.machine import interface_toward
from rowcast.trainer.run import meeting as joining
from rowcast.trainer.run.meeting import GLOO_NETWORK, choose_network
from tests.support.two_hosts import on, two_hosts

hosts = pytest.fixture(two_hosts)

ROOT = Path(__file__).parents[2]
RANK = """
import sys, threading
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, TCPStore
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.runtime.stops import leave_at_once
from rowcast.trainer.run.meeting import choose_network, is_joining, join_group

number, count, port, timeout_s = map(int, sys.argv[1:5])
address, fate = sys.argv[5:]
choose_network(address, port, is_only_host=False)
store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
asked = threading.Event()
threading.Timer(0.5, asked.set).start()

def check():
    if fate == "fails" and asked.is_set():
        raise ConfigError("the port is taken")

try:
    rank, cpu = Rank(number=number, count=count, parts=count), torch.device("cpu")
    store = PrefixStore("a", store)
    joined = join_group(cpu, store, rank, timeout_s, check, lambda: fate == "is stopped" and asked.is_set())
    print("joined" if joined else "left")
except (ConfigError, PeerLost) as error:
    print(error)
assert is_joining() == (fate != "joins")
sys.stdout.flush()
leave_at_once(0)
"""


@dataclass
class Meeting:
    address: str
    port: int
    processes: list[Any]

    def start(self, number: int, count: int, timeout_s: int, fate: str, *before: str) -> None:
        arguments = [str(number), str(count), str(self.port), str(timeout_s), self.address, fate]
        self.processes.append(
            subprocess.Popen(
                [*before, sys.executable, "-c", RANK, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != GLOO_NETWORK},
            )
        )

    def said(self) -> list[str]:
        outcomes = [process.communicate(timeout=120) for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(outcomes), outcomes
        return [out.strip() for out, _ in outcomes]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    made = Meeting("127.0.0.1", store.port, [])
    yield made
    for process in made.processes:
        process.kill()


def test_ranks_join(meeting: Meeting) -> None:
    for number in range(2):
        meeting.start(number, 2, 60, "joins")
    # on loopback, and without a word about it, several hosts have no network in common
    assert meeting.said() == ["joined", "joined"]


def test_the_first_rank_that_fails_tells_all_others_why(meeting: Meeting) -> None:
    meeting.start(0, 3, 60, "waits")
    meeting.start(1, 3, 60, "fails")
    assert meeting.said() == ["the port is taken"] * 2


def test_all_leave_once_one_was_stopped(meeting: Meeting) -> None:
    meeting.start(0, 3, 60, "waits")
    meeting.start(1, 3, 60, "is stopped")
    assert meeting.said() == ["left", "left"]


def test_a_rank_that_never_comes_is_waited_for_once(meeting: Meeting) -> None:
    meeting.start(0, 2, 1, "waits")
    (sentence,) = meeting.said()
    assert sentence.startswith("rank 0 of 2 waited 1 s for the other ranks to connect; look for one that has ended")
    assert GLOO_NETWORK in sentence


def test_the_network_is_the_one_that_reaches_the_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_toward("127.0.0.1", 29400) == "lo"
    assert interface_toward("a host that is nowhere.invalid", 29400) is None
    monkeypatch.delenv(GLOO_NETWORK, raising=False)
    choose_network("127.0.0.1", 29400, is_only_host=False)
    assert GLOO_NETWORK not in os.environ, "other hosts do not reach loopback"
    monkeypatch.setattr(joining, "interface_toward", lambda address, port: "eth7")
    monkeypatch.setenv(GLOO_NETWORK, "named")
    choose_network("10.0.0.1", 29400, is_only_host=False)
    assert os.environ[GLOO_NETWORK] == "named"


# two hosts whose names are loopback's


SERVE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("10.77.0.1", 29466, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
print("serves", flush=True)
sys.stdin.read()
"""


def test_two_hosts_whose_names_are_of_loopback_connect(hosts: tuple[str, str]) -> None:
    met = Meeting("10.77.0.1", 29466, [])
    with subprocess.Popen(
        [*on(hosts[0]), sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "serves\n"
            for number, host in enumerate(hosts):
                met.start(number, 2, 30, "joins", *on(host))
            assert met.said() == ["joined", "joined"]
        finally:
            for process in (server, *met.processes):
                process.kill()
