"""Trainers of several ranks meet over one store, which outlives them and keeps what dead ones have said."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, DataError, Mismatch, PeerLost, RanksDiffer, RowcastError
from rowcast.trainer.run.launch import Launch
from rowcast.trainer.run.meeting import (
    Greetings,
    Meeting,
    MeetingNotice,
    Present,
    RankGreeting,
    Word,
    encoded,
    new_greeting,
    open_store,
)
from rowcast.trainer.run.rank_group import RankGroup, Start, all_start
from tests.support.facts import facts

NEVER = lambda: False  # noqa: E731


@pytest.fixture
def server() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def client(server: Any) -> Any:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10))


def greeting(rank: int, count: int, **changes: Any) -> RankGreeting:
    greeted = new_greeting(Launch(rank=rank, world_size=count), "digest", "train")
    return msgspec.structs.replace(greeted, process=f"process {rank}", **changes)


def each(*calls: Callable[[], object]) -> list[object]:
    """What each call returned or raised, all at the same time."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except RowcastError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def meet(server: Any, greetings: Sequence[RankGreeting], timeout_s: float = 10.0) -> list[object]:
    return each(*(Meeting(client(server), one, timeout_s, NEVER).hold for one in greetings))


def sentences(outcomes: Sequence[object], kind: type[RowcastError]) -> set[str]:
    assert all(type(outcome) is kind for outcome in outcomes), outcomes
    return {str(outcome) for outcome in outcomes}


def test_ranks_meet_again_and_again_under_names_of_their_own(server: Any) -> None:
    names = []
    for _ in range(3):
        met = meet(server, [greeting(rank, 4) for rank in range(4)])
        assert len(set(met)) == 1
        names.append(met[0])
    assert len(set(names)) == 3


def test_a_rank_that_starts_first_does_not_take_the_dead_for_the_living(server: Any) -> None:
    old = meet(server, [greeting(rank, 2) for rank in range(2)])

    def later() -> object:
        time.sleep(0.3)
        return Meeting(client(server), greeting(0, 2), 10.0, NEVER).hold()

    met = each(later, Meeting(client(server), greeting(1, 2), 10.0, NEVER).hold)
    assert met[0] == met[1] != old[0]


def test_a_rank_that_died_before_all_were_there_is_replaced_by_the_one_that_was_started_again(server: Any) -> None:
    dead = Meeting(client(server), greeting(1, 3), 0.2, NEVER)

    def after_it() -> object:
        time.sleep(0.5)
        return each(*(Meeting(client(server), greeting(rank, 3), 10.0, NEVER).hold for rank in (1, 2)))

    first, ended, others = each(Meeting(client(server), greeting(0, 3), 10.0, NEVER).hold, dead.hold, after_it)
    assert isinstance(ended, PeerLost)
    assert others == [first, first]


def test_two_of_one_rank_are_refused_on_every_rank(server: Any) -> None:
    refused = sentences(meet(server, [greeting(0, 2), greeting(1, 2), greeting(1, 2)]), Mismatch)
    assert refused == {"process 1 and process 1 were both started as rank 1 of 2; start each rank once"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"digest": "other"},
            "rank 0 (process 0) and rank 2 (process 2) were started with different job files: digests",
        ),
        ({"mode": "eval"}, "rank 0 (process 0) and rank 2 (process 2) were started to train and to evaluate"),
        ({"version": 1}, "rank 0 (process 0) and rank 2 (process 2) speak protocol versions"),
    ],
)
def test_ranks_that_do_not_belong_together_say_so_in_one_sentence(
    changes: dict[str, Any], said: str, server: Any
) -> None:
    (sentence,) = sentences(meet(server, [greeting(0, 3), greeting(1, 3), greeting(2, 3, **changes)]), Mismatch)
    assert sentence.startswith(said)


def test_a_second_process_of_a_rank_that_comes_too_late_does_not_disturb_the_others(server: Any) -> None:
    met = meet(server, [greeting(0, 2), greeting(1, 2)])
    with pytest.raises(PeerLost, match=facts("met without it")):
        Meeting(client(server), greeting(1, 2), 0.2, NEVER).hold()
    assert met[0] == met[1]


def test_a_rank_of_another_world_size_is_refused(server: Any) -> None:
    first, second, strange = meet(server, [greeting(0, 2), greeting(1, 2), greeting(2, 3)])
    assert first == second
    assert isinstance(strange, ConfigError)
    assert "rank 0 was started with WORLD_SIZE = 2, rank 2 with 3" in str(strange)


def test_missing_ranks_are_named(server: Any) -> None:
    for outcome in meet(server, [greeting(0, 4), greeting(2, 4)], timeout_s=0.5):
        assert isinstance(outcome, PeerLost)
        assert "missing are ranks 1, 3" in str(outcome)


# whoever reaches the store can write there

ESCAPES = "\x1b[2J\u202e"
CLEAN = " [2J "


def at_a_store_with(server: Any, rank: int, **stored: bytes) -> str:
    """The one sentence with which a rank of two gives up."""
    for key, content in stored.items():
        server.set(key, content)
    with pytest.raises(PeerLost) as caught:
        Meeting(client(server), greeting(rank, 2), 10.0, NEVER).hold()
    return str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"", b"[" * 100_000, b'{"name": "\xff", "world_size": 2}', b'{"name": 1}', b"{}"], ids=repr
)
def test_what_is_no_message_of_a_rank_is_one_sentence(content: bytes, server: Any) -> None:
    assert at_a_store_with(server, 1, leader=content).startswith("another program writes to the meeting point")


def test_a_greeting_that_is_none_ends_the_wait_of_rank_0(server: Any) -> None:
    first = Meeting(client(server), greeting(0, 2), 10.0, NEVER)

    def intrude() -> None:
        name = msgspec.json.decode(server.get("leader"), type=MeetingNotice).name
        server.set(f"{name}/1", "no JSON")

    ended, _ = each(first.hold, intrude)
    assert isinstance(ended, PeerLost)
    assert "another program writes to the meeting point" in str(ended)


@pytest.mark.parametrize("count", [0, 17])
def test_more_greetings_of_a_rank_than_are_kept_are_of_no_rank(count: int, server: Any) -> None:
    first = Meeting(client(server), greeting(0, 2), 10.0, NEVER)

    def intrude() -> None:
        name = msgspec.json.decode(server.get("leader"), type=MeetingNotice).name
        server.set(f"{name}/1", encoded(Greetings(greetings=(greeting(1, 2),) * count)))

    ended, _ = each(first.hold, intrude)
    assert isinstance(ended, PeerLost)
    assert "another program writes to the meeting point" in str(ended)
    assert "Expected `array` of length" in str(ended)


def test_of_many_dead_processes_of_a_rank_the_last_are_kept(server: Any) -> None:
    server.set("leader", encoded(MeetingNotice(name="met", world_size=2)))
    for _ in range(20):
        with pytest.raises(PeerLost, match=facts("missing are ranks 0")):
            Meeting(client(server), greeting(1, 2), 0.0, NEVER).hold()
    met = meet(server, [greeting(rank, 2) for rank in range(2)])
    assert met[0] == met[1]


@pytest.mark.parametrize("ranks", [(1,), (1, 0), (0, 1, 2), (0, 0, 1)], ids=repr)
def test_each_greeting_must_be_that_of_its_place(ranks: tuple[int, ...], server: Any) -> None:
    own = greeting(1, 2)
    present = Present(greetings=tuple(own if rank == 1 else greeting(rank, 2) for rank in ranks))
    server.set("leader", encoded(MeetingNotice(name="met", world_size=2)))
    server.set("met/present", encoded(present))
    with pytest.raises(PeerLost, match=facts("another program", "--master-port")):
        Meeting(client(server), own, 10.0, NEVER).hold()


def test_texts_of_a_peer_are_shown_without_control_characters(server: Any) -> None:
    server.set("leader", encoded(MeetingNotice(name="met", world_size=2)))
    server.set("met/present", encoded(Present(greetings=(), refused=f"no{ESCAPES}")))
    with pytest.raises(Mismatch) as caught:
        Meeting(client(server), greeting(1, 2), 10.0, NEVER).hold()
    assert str(caught.value) == f"no{CLEAN}"


def test_a_store_that_nobody_serves_is_named() -> None:
    with pytest.raises(PeerLost, match=facts("rank 1", "127.0.0.1:1", "0.1 s")):
        open_store(Launch(rank=1, world_size=2, port=1), 0.1, NEVER)


def groups(server: Any, count: int) -> list[RankGroup]:
    return [
        RankGroup(PrefixStore("met", client(server)), Rank(number=rank, count=count, parts=count), 0.5)
        for rank in range(count)
    ]


def test_every_rank_gets_what_each_gave_call_by_call(server: Any) -> None:
    own = groups(server, 3)
    for call in range(3):
        given = [f"{call} of {rank}".encode() for rank in range(3)]
        gathered = each(*(lambda g=group, c=content: g.gather(c) for group, content in zip(own, given, strict=True)))
        assert gathered == [given] * 3


def test_a_rank_that_does_not_come_is_named(server: Any) -> None:
    first, second, _ = groups(server, 3)
    for outcome in each(lambda: first.gather(b""), lambda: second.gather(b"")):
        assert isinstance(outcome, PeerLost)
        assert "waited 0.5 s for ranks 2" in str(outcome)


def closing(server: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[list[RankGroup], list[str]]:
    """Groups as after `connect`, and what happens to them."""
    own, happened = groups(server, count), list[str]()
    for group in own:
        monkeypatch.setattr(group, "_connected", True)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: happened.append("destroyed"))
    return own, happened


def test_no_rank_destroys_its_group_before_all_close(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), happened = closing(server, monkeypatch, 2)

    def still_exchanges() -> None:
        client(server).wait(["met/0/0"], timedelta(seconds=10))  # the first rank is in its close
        happened.append("exchanged")
        second.close()

    each(first.close, still_exchanges)
    assert happened == ["exchanged", "destroyed", "destroyed"]


def test_a_rank_that_never_closes_holds_no_other_up_for_long(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), happened = closing(server, monkeypatch, 2)
    first.close()
    assert happened == ["destroyed"]


def test_when_one_leaves_before_all_are_there_all_leave(server: Any) -> None:
    first, second, third = groups(server, 3)
    asked = iter([False, False, True])
    left = each(lambda: first.agree(b"a", 5.0, lambda: next(asked)), lambda: second.agree(b"b", 5.0, NEVER))
    assert left == [None, None]
    assert third.agree(b"c", 5.0, NEVER) is None  # too late


def starts(server: Any, *own: Start) -> list[object]:
    return each(
        *(
            lambda g=group, s=start: all_start(g, s, 5.0, NEVER)
            for group, start in zip(groups(server, len(own)), own, strict=True)
        )
    )


def test_ranks_begin_only_at_one_checkpoint(server: Any) -> None:
    same = Start(run_id="run", checkpoint="abc", train_steps=100)
    assert starts(server, same, same) == [True, True]


@pytest.mark.parametrize("other", [{"checkpoint": "def", "train_steps": 50}, {"run_id": "another"}], ids=str)
def test_ranks_that_differ_say_where_each_begins(other: dict[str, Any], server: Any) -> None:
    same = Start(run_id="run", checkpoint="abc", train_steps=100)
    (sentence,) = sentences(starts(server, same, same, msgspec.structs.replace(same, **other)), RanksDiffer)
    assert "the prefetcher of rank 0 begins after 100 train steps of run run, that of rank 2 after" in sentence


def test_ranks_that_have_read_other_batches_name_what_differs(server: Any) -> None:
    same = Start(run_id="run", first_batches=(("feature user", "1"), ("feature item", "2"), ("labels", "3")))
    one = msgspec.structs.replace(same, first_batches=(("feature user", "1"), ("feature item", "4"), ("labels", "3")))
    assert sentences(starts(server, same, same, one), Mismatch) == {
        "rank 2 has read other batches than rank 0: feature item differs; give every host the same data files, and a "
        "data set of your own the same order on every rank"
    }


def test_ranks_that_read_other_data_files_name_the_file(server: Any) -> None:
    same = Start(run_id="run", data_checksums=(("the size of data file 1 (a)", "1"), ("data file 1 (a)", "2")))
    one = msgspec.structs.replace(same, data_checksums=(*same.data_checksums[:1], ("data file 1 (a)", "3")))
    assert sentences(starts(server, same, one), Mismatch) == {
        "rank 1 reads other data than rank 0: data file 1 (a) differs; give every host the same data files, and a data "
        "set of your own the same order on every rank"
    }


def test_ranks_that_place_tables_otherwise_say_how(server: Any) -> None:
    same = Start(run_id="run", placements=("rows", "table"))
    other = msgspec.structs.replace(same, placements=("rows", "rows"))
    (sentence,) = sentences(starts(server, same, other), ConfigError)
    assert "rank 0 places tables as rows, table, that of rank 1 as rows, rows" in sentence


def test_tables_that_other_data_has_placed_otherwise_are_no_other_job_file(server: Any) -> None:
    one, other = (Start(run_id="run", placements=(way,), data_checksums=(("a", way),)) for way in ("rows", "table"))
    (sentence,) = sentences(starts(server, one, other), Mismatch)
    assert "rank 1 reads other data than rank 0: a differs" in sentence


def test_a_rank_that_has_read_less_is_named(server: Any) -> None:
    same = Start(run_id="run", first_batches=(("feature user", "1"), ("feature item", "2"), ("labels", "3")))
    fewer = msgspec.structs.replace(same, first_batches=(("feature user", "1"),))
    (sentence,) = sentences(starts(server, same, fewer), Mismatch)
    assert "feature item, labels differ" in sentence


def test_all_end_with_the_error_of_one(server: Any) -> None:
    failed = Start(failure=(4, "a file is damaged"))
    assert sentences(starts(server, Start(), failed, Start()), DataError) == {"a file is damaged"}


def test_a_start_that_is_none_is_one_sentence(server: Any) -> None:
    PrefixStore("met", client(server)).set("0/1", "\x1b no JSON")
    with pytest.raises(PeerLost, match=facts("another program", "--master-port")):
        all_start(groups(server, 2)[0], Start(), 5.0, NEVER)


@pytest.mark.parametrize(
    "content", ["\x1b", "[]", '{"values": ["a"]}', '{"values": {"a": ["0"]}}', '{"lost": 1}', "[" * 100_000], ids=repr
)
def test_what_rank_0_cannot_have_published_is_one_sentence(content: str, server: Any) -> None:
    PrefixStore("met", client(server)).set("0/present", content)
    with pytest.raises(PeerLost, match=facts("another program", "--master-port")):
        groups(server, 2)[1].gather(b"")


def test_a_sentence_of_another_rank_is_shown_without_control_characters(server: Any) -> None:
    PrefixStore("met", client(server)).set("0/present", encoded(Word(lost=f"no{ESCAPES}")))
    with pytest.raises(PeerLost) as caught:
        groups(server, 2)[1].gather(b"")
    assert str(caught.value) == f"no{CLEAN}"


def test_all_leave_if_one_leaves(server: Any) -> None:
    assert starts(server, Start(), Start(leaves=True)) == [False, False]
