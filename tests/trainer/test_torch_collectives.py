"""How a rank waits for a collective, with stand-ins for torch.distributed; real processes are in tests/system."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.trainer.device.streams import PlainStream
from rowcast.trainer.models import exchanges
from rowcast.trainer.models.exchanges import TorchCollectives
from tests.support.facts import facts

RANK = Rank(number=1, count=4, parts=4)


class OneWork:
    """Implements `Work`: is complete when it is asked for the `polls`-th time."""

    def __init__(self, polls: float, error: str | None = None) -> None:
        self.polls, self.error = polls, error
        self.asked = 0
        self.waited = False

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked >= self.polls

    def wait(self) -> bool:
        self.waited = True
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def exchange(
    monkeypatch: pytest.MonkeyPatch, work: OneWork, output: Any, *, timeout_s: float = 60, check: Any = lambda: None
) -> Callable[[], Any]:
    monkeypatch.setattr(dist, "all_to_all_single", lambda *arguments, async_op: work)
    collectives = TorchCollectives(RANK, timeout_s, check)
    collectives.doing = "the rows of step 12"
    return lambda: collectives.all_to_all(output, output, [1], [1])


def test_on_the_host_a_stream_goes_on_once_the_collective_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    work = OneWork(polls=50)
    PlainStream().communicate(exchange(monkeypatch, work, torch.zeros(1)))
    assert work.asked == 50
    assert work.waited, "torch's own wait hands over the error of a collective"


def test_on_a_device_the_host_asks_nothing_and_the_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    work = OneWork(polls=float("inf"))
    PlainStream().communicate(exchange(monkeypatch, work, SimpleNamespace(is_cuda=True)))
    assert work.asked == 0
    assert work.waited


@pytest.mark.parametrize("on_device", [False, True])
def test_a_broken_exchange_names_rank_and_exchange(monkeypatch: pytest.MonkeyPatch, *, on_device: bool) -> None:
    def refuse(*arguments: object, async_op: bool) -> OneWork:
        raise RuntimeError("[/torch/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242. Advice.\nmore")

    start = exchange(monkeypatch, OneWork(1), SimpleNamespace(is_cuda=on_device))
    monkeypatch.setattr(dist, "all_to_all_single", refuse)
    with pytest.raises(PeerLost, match=facts("rank 1 of 4", "step 12", "Connection closed by peer")):
        start()


def test_an_exchange_that_breaks_under_way_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    start = exchange(monkeypatch, OneWork(3, "Connection reset"), torch.zeros(1))
    with pytest.raises(PeerLost, match="the rows of step 12"):
        start().wait()


def test_an_exchange_that_is_not_complete_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start = exchange(monkeypatch, OneWork(float("inf")), torch.zeros(1), timeout_s=0.01)
    with pytest.raises(PeerLost, match=facts("rank 1 of 4", "step 12", "ranks.timeout")):
        start().wait()


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def on_device(monkeypatch: pytest.MonkeyPatch, *works: OneWork) -> tuple[TorchCollectives, Clock]:
    """Has begun these works at 0 s, one for each step, with a time-out of 60 s."""
    begun, clock = iter(works), Clock()
    monkeypatch.setattr(exchanges, "time", clock)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *arguments, async_op: next(begun))
    collectives, output = TorchCollectives(RANK, 60), cast(Any, SimpleNamespace(is_cuda=True))
    for step in range(len(works)):
        collectives.doing = f"the rows of step {step}"
        collectives.all_to_all(output, output, None, None)
    return collectives, clock


def test_on_a_device_the_oldest_collective_that_is_not_complete_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives, clock = on_device(monkeypatch, OneWork(1), OneWork(float("inf")), OneWork(float("inf")))
    collectives.watch()
    clock.now_s = 60
    collectives.watch()
    clock.now_s = 61
    with pytest.raises(PeerLost, match=facts("rank 1 of 4", "61 s", "step 1", "ranks.timeout")):
        collectives.watch()


def test_on_a_device_the_time_of_a_collective_begins_when_those_before_it_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = OneWork(float("inf")), OneWork(float("inf"))
    collectives, clock = on_device(monkeypatch, first, second)
    clock.now_s, first.polls = 50, 1
    collectives.watch()
    clock.now_s = 100
    collectives.watch()
    second.polls = 1
    collectives.watch()
    clock.now_s = 1000
    collectives.watch()  # none is left


def test_ranks_connect_before_the_first_step_and_the_host_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    works, calls = [OneWork(3), OneWork(2)], list[tuple[Any, ...]]()

    def start(*arguments: Any, async_op: bool) -> OneWork:
        calls.append(arguments)
        return works[len(calls) - 1]

    monkeypatch.setattr(dist, "all_to_all_single", start)
    monkeypatch.setattr(exchanges, "all_gather", start)
    TorchCollectives(RANK, 60).open(torch.device("cpu"))
    assert [(len(output), len(given)) for output, given, *_ in calls] == [(4, 4), (4, 1)]
    assert [work.waited for work in works] == [True, True]


def test_an_error_of_this_process_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise ConfigError("the mail thread has failed")

    with pytest.raises(ConfigError, match="the mail thread has failed"):
        exchange(monkeypatch, OneWork(float("inf")), torch.zeros(1), check=check)().wait()
