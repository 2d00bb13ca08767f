"""Ranks tell each other the rows of their coming batches; here they are threads."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Timer, get_ident

import msgspec
import numpy as np
import pytest
import zmq

from rowcast.protocol.parts import Rank
from rowcast.trainer.adopt import coming_rows
from rowcast.trainer.adopt.coming_rows import MOST_LISTS, ComingRows

Pair = tuple[ComingRows, ComingRows]


def joined() -> Pair:
    barrier, passed = Barrier(2), [b"", b""]

    def gather_of(number: int) -> Callable[[bytes], list[bytes]]:
        def gather(content: bytes) -> list[bytes]:
            passed[number] = content
            barrier.wait(10)
            return [*passed]

        return gather

    with ThreadPoolExecutor(2) as pool:
        ranks = [Rank(number=number, count=2, parts=2) for number in range(2)]
        first, second = pool.map(lambda rank: ComingRows(rank, gather_of(rank.number)), ranks)
    for each in (first, second):
        each.tables.add("item")
    return first, second


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield joined()
    coming_rows.JOINED.clear()


def rows_of(ranks: ComingRows, ahead: int) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in ranks.told(ahead)}


def until(ranks: ComingRows, ahead: int) -> dict[str, list[int]]:
    """What has come of a batch, once it has."""
    end_s = time.monotonic() + 10
    while not (rows := rows_of(ranks, ahead)) and time.monotonic() < end_s:
        time.sleep(0.001)
    return rows


def test_a_batch_gets_the_rows_of_the_batch_that_another_rank_trains_with_it(pair: Pair) -> None:
    first, second = pair
    for ahead in range(3):
        second.tell(ahead, {"item": np.array([ahead, 10 + ahead]), "other": np.array([1])})
    assert until(first, 2) == {"item": [2, 12]}
    assert [rows_of(first, ahead) for ahead in (0, 1, 3)] == [{"item": [0, 10]}, {"item": [1, 11]}, {}]
    assert rows_of(second, 0) == {}
    first.num_begun, second.num_begun = 5, 1  # the first rank has begun four batches by itself, such as of a warm-up
    first.compare([5, 1])
    second.compare([5, 1])
    assert [rows_of(first, ahead) for ahead in (0, 1, 2)] == [{"item": [1, 11]}, {"item": [2, 12]}, {}]
    first.tell(0, {"item": np.array([7])})
    second.tell(2, {"item": np.array([8])})
    assert (until(second, 0), until(first, 2)) == ({"item": [7]}, {"item": [8]})


def test_a_rank_that_does_not_listen_keeps_nobody_waiting_and_lists_are_few(pair: Pair) -> None:
    first, second = pair
    for ahead in range(20 * MOST_LISTS):
        second.tell(ahead, {"item": np.arange(1000)})
    assert until(first, 0)
    assert len(first._lists) <= MOST_LISTS
    first.compare([0, MOST_LISTS // 2])
    assert len(first._lists) <= MOST_LISTS // 2


def test_a_rank_waits_for_the_others_when_a_loop_begins_but_not_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    monkeypatch.setattr(coming_rows, "WAIT_S", 10)
    later = Timer(0.05, second.tell, (2, {"item": np.array([2])}))
    later.start()
    first.await_lists(2)
    assert rows_of(first, 2) == {"item": [2]}
    later.join()
    monkeypatch.setattr(coming_rows, "WAIT_S", 0.01)
    first.await_lists(3)
    assert rows_of(first, 3) == {}


def test_what_is_no_list_is_dropped(pair: Pair) -> None:
    first, second = pair
    for content in (b"", b"\xc1", b"\x80", bytes(100)):
        second._ways[0].send(content)
    second._ways[0].send(msgspec.msgpack.encode({"rank": 7, "number": 0, "rows": {"item": bytes(8)}}))
    second._ways[0].send(msgspec.msgpack.encode({"rank": 1, "number": 0, "rows": {"item": bytes(12)}}))
    second.tell(1, {"item": np.array([3])})
    assert until(first, 1) == {"item": [3]}
    assert rows_of(first, 0) == {"item": [0]}  # whole numbers alone
    assert {rank for rank, _ in first._lists} == {1}


def test_a_rank_of_another_host_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coming_rows, "boot_id", lambda: str(get_ident()))
    _, second = joined()
    second.tell(0, {"item": np.array([3])})
    with pytest.raises(zmq.Again):  # not even queued
        second._ways[0].send(b"", zmq.NOBLOCK)
    coming_rows.JOINED.clear()
