"""The link within one process."""

import time

import pytest

from rowcast.protocol.transport.link import Link, inproc_pair
from rowcast.runtime.errors import LocalProtocolError


def test_frames_arrive_in_order_at_the_other_end_and_ring_its_bell() -> None:
    rung: list[str] = []
    first, second = inproc_pair((lambda: rung.append("first"), lambda: rung.append("second")))
    ends: tuple[Link, Link] = (first, second)
    assert second.last_received_s is None
    for frame in (b"a", b"b"):
        ends[0].send(frame)
    ends[1].send(b"c")
    assert [ends[1].receive() for _ in range(3)] == [(b"a", ()), (b"b", ()), None]
    assert [ends[0].receive() for _ in range(2)] == [(b"c", ()), None]
    assert rung == ["second", "second", "first"]
    assert second.last_received_s is not None
    assert second.last_received_s <= time.monotonic()


def test_a_closed_end_is_gone_for_the_other_which_still_receives_what_was_sent() -> None:
    rung: list[str] = []
    first, second = inproc_pair((lambda: None, lambda: rung.append("second")))
    first.send(b"last words")
    assert not second.peer_gone
    first.close()
    first.close()
    assert second.peer_gone
    assert not first.peer_gone
    assert rung[-1] == "second"
    assert second.receive() == (b"last words", ())
    with pytest.raises(LocalProtocolError, match="closed"):
        first.send(b"too late")
