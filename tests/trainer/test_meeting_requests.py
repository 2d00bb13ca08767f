"""What ranks ask of their store while they meet and agree, counted. Time passes only while all of them wait.

    python -m tests.trainer.test_meeting_requests 2 8 64

prints the table of docs/ranks.md.
"""

import heapq
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import PeerLost
from rowcast.trainer.run import meeting, rank_group
from rowcast.trainer.run.launch import Launch
from rowcast.trainer.run.meeting import Meeting, new_greeting
from rowcast.trainer.run.rank_group import RankGroup, never

Call = Callable[[], object]


class CountedStore:
    """The methods of torch's stores that a meeting uses, for the threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.requests["compare_set"] += 1
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = value.encode()
        return self.values[key]


class Turns:
    """One thread runs at a time: the one that has waited until the earliest time. Stands for the module `time`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._waiting: list[tuple[float, int, threading.Event]] = []  # a heap
        self._count = 0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        own = self.wait_from(self._now_s + seconds)
        self.next()
        own.wait()

    def wait_from(self, at_s: float) -> threading.Event:
        turn = threading.Event()
        self._count += 1
        heapq.heappush(self._waiting, (at_s, self._count, turn))
        return turn

    def next(self) -> None:
        if self._waiting:
            self._now_s, _, turn = heapq.heappop(self._waiting)
            turn.set()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return turns_of(monkeypatch)


def turns_of(patch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    for module in (meeting, rank_group):
        patch.setattr(module, "time", turns, raising=False)
    return turns


def outcomes(turns: Turns, calls: list[Call], within_s: float) -> list[object]:
    """What each call returned or raised. They begin one after the other, evenly."""
    found: list[object] = [None] * len(calls)
    gap_s = within_s / max(1, len(calls) - 1)

    def run(number: int, turn: threading.Event) -> None:
        turn.wait()
        try:
            found[number] = calls[number]()
        except PeerLost as error:
            found[number] = error
        turns.next()

    threads = [threading.Thread(target=run, args=(at, turns.wait_from(at * gap_s))) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    turns.next()
    for thread in threads:
        thread.join()
    return found


def hold(store: Any, rank: int, count: int) -> Call:
    return Meeting(store, new_greeting(Launch(rank=rank, world_size=count), "digest", "train"), 60.0, never).hold


@pytest.mark.parametrize(("count", "most"), [(8, 200), (64, 2_000)])
@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 comes first", "rank 0 comes last"])
def test_a_meeting_asks_in_proportion_to_its_ranks(first: int, count: int, most: int, turns: Turns) -> None:
    store = CountedStore()
    order = [*range(first, count), *range(first)]
    met = outcomes(turns, [hold(store, rank, count) for rank in order], within_s=1.0)
    assert isinstance(met[0], str)
    assert met == met[:1] * count
    assert store.requests.total() <= most, store.requests


def agree(store: Any, given: Sequence[bytes], timeout_s: float, without: Collection[int] = ()) -> list[Call]:
    ranks = [Rank(number=number, count=len(given), parts=len(given)) for number in range(len(given))]
    return [
        partial(RankGroup(store, rank, 60.0).agree, given[rank.number], timeout_s, never)
        for rank in ranks
        if rank.number not in without
    ]


def test_ranks_agree_with_few_requests_each(turns: Turns) -> None:
    store, given = CountedStore(), [f"{rank}".encode() * 600 for rank in range(64)]
    assert outcomes(turns, agree(store, given, 60.0), within_s=0.0) == [given] * 64
    assert store.requests.total() <= 400, store.requests


def test_a_value_that_all_ranks_have_left_is_published_once(turns: Turns) -> None:
    store, given = CountedStore(), [b"x" * 10_000] * 64
    assert outcomes(turns, agree(store, given, 60.0), within_s=0.0) == [given] * 64
    assert max(map(len, store.values.values())) < 11_000


def test_who_is_missing_is_asked_for_once(turns: Turns) -> None:
    """And for halves of the ranks, not for each."""
    store = CountedStore()
    said = outcomes(turns, agree(store, [b""] * 64, 1.0, without={7, 41}), within_s=0.0)
    assert {str(one) for one in said} == {
        "rank 0 of 64 waited 1 s for ranks 7, 41; their logs say what they do, or why they ended"
    }
    assert store.requests.total() <= 62 * 12, store.requests


@pytest.mark.parametrize("failed", [0, 2])
def test_a_rank_that_has_failed_ends_the_wait_of_the_others_before_all_are_here(failed: int, turns: Turns) -> None:
    store = CountedStore()
    waiting = agree(store, [b"waits"] * 4, 60.0, without={failed, 3})
    ended = agree(store, [b"has failed"] * 4, 0.0, without={0, 1, 2, 3} - {failed})
    assert outcomes(turns, waiting + ended, within_s=1.0)[:2] == [[b"has failed"]] * 2
    assert turns.monotonic() < 2


def table_line(count: int) -> str:
    """Of the meeting, the more of both orders of arrival."""
    given = [b"%d" % rank for rank in range(count)]
    orders = [[*range(first, count), *range(first)] for first in (0, 1)]
    meetings = [counted(lambda store, own=order: [hold(store, rank, count) for rank in own], 1.0) for order in orders]
    return f"| {count} | {max(meetings):,} | {counted(lambda store: agree(store, given, 60.0), 0.0):,} |\n"


def counted(make_calls: Callable[..., list[Call]], within_s: float) -> int:
    store = CountedStore()
    with pytest.MonkeyPatch.context() as patch:
        outcomes(turns_of(patch), make_calls(store), within_s)
    return store.requests.total()


if __name__ == "__main__":
    sys.stdout.writelines(table_line(int(count)) for count in sys.argv[1:])
