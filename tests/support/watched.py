"""A `PeerWatch` over a link and a clock of the test."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import cast

import pytest

from rowcast.job.schema import Transport
from rowcast.protocol.conversation import Conversation, PeerWatch, ProcessProgress
from rowcast.protocol.session import Session
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import RowcastError
from tests.support.inproc_link import inproc_pair


@dataclass
class FakeLink:
    peer_gone: bool = False
    peer_runs: bool = False
    pending: int = 0
    last_received_s: float | None = None


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


def watch_of(
    link: FakeLink,
    *,
    connected: bool = True,
    makes_progress: bool = False,
    is_starting: Callable[[], bool] = lambda: False,
    failure: Callable[[], RowcastError | None] = lambda: None,
) -> PeerWatch:
    near, _ = inproc_pair()
    conversation, steps = Conversation(Session("trainer"), near), count()

    def progress() -> ProcessProgress:
        return ProcessProgress(
            step_begun=1, step_done=1, work=next(steps) if makes_progress else 0, waiting_for="rows", ended=False
        )

    watched = cast(ZmqLink, link)
    return PeerWatch(
        "prefetcher", conversation, watched, Transport(), progress, lambda: connected, failure, is_starting
    )


def pass_time(clock: Clock, watch: PeerWatch, seconds: float, tick_s: float = 0.05) -> None:
    for _ in range(round(seconds / tick_s)):
        clock.now_s += tick_s
        watch.advance()
