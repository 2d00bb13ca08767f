"""How a rank waits for a collective, with stand-ins for torch.distributed; real processes are in tests/system."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.trainer.device.streams import PlainStream
from rowcast.trainer.models.torch_collectives import TorchCollectives
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
    return lambda: collectives.all_to_all_single(output, output, [1], [1], async_op=True)


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


def test_an_error_of_this_process_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise ConfigError("the mail thread has failed")

    with pytest.raises(ConfigError, match="the mail thread has failed"):
        exchange(monkeypatch, OneWork(float("inf")), torch.zeros(1), check=check)().wait()
