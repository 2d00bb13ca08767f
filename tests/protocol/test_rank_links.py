"""Links between the prefetchers of several ranks, over real sockets of one host."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rowcast.protocol.parts import Rank
from rowcast.protocol.transport import rank_links
from rowcast.protocol.transport.rank_links import FROM, LISTENS, Listens, RankLinks, read_listens
from rowcast.protocol.transport.zmq_ends import MOST_STRANGERS
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.runtime.run_directory import pair_folder
from tests.support.facts import facts
from tests.support.repeats import count as times
from tests.support.reset_proxy import ResetProxy

SOON_S = 20.0  # on a busy machine
NUM_RESETS = 10  # in a test


class Ends:
    """The links of the ranks of one attempt, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[RankLinks] = []

    def open(self, number: int, count: int, **other: Any) -> RankLinks:
        settings: dict[str, Any] = {
            "start": "train a run",
            "is_only_host": True,
            "timeout_s": 60.0,
            "may_wait": lambda: True,
            "on_receive": lambda: None,
        }
        links = RankLinks(self.folder, Rank(number=number, count=count, parts=count), **settings | other)
        links.open()
        self.opened.append(links)
        return links


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    for links in made.opened:
        links.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + SOON_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)
    return found


def received(links: RankLinks, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []

    def has_all() -> bool:
        while (arrived := links.receive()) is not None:
            found.append(arrived)
        return len(found) >= count

    until(has_all)
    return found


def test_messages_of_each_rank_arrive_in_order_however_early_they_were_sent(ends: Ends) -> None:
    first = ends.open(0, 3)
    first.send(2, b"before anyone is there")
    others = [ends.open(number, 3) for number in (1, 2)]
    for number in range(200):
        for links in (first, *others):
            for rank in {0, 1, 2} - {ends.opened.index(links)}:
                links.send(rank, b"%d" % number)
    expected = [b"%d" % number for number in range(200)]
    for number, links in enumerate(ends.opened):
        found = received(links, 400 + (number == 2))
        for rank in {0, 1, 2} - {number}:
            own = [message for sender, message in found if sender == rank]
            assert own == [b"before anyone is there"] * ((number, rank) == (2, 0)) + expected


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ResetProxy]]:
    """One in front of each rank that opens its links."""
    with ExitStack() as stack:
        made: list[ResetProxy] = []

        def write(path: Path, content: bytes) -> None:
            listens = msgspec.json.decode(content, type=Listens)
            made.append(stack.enter_context(ResetProxy(listens.port)))
            write_durably(path, msgspec.json.encode(msgspec.structs.replace(listens, port=made[-1].port)))

        monkeypatch.setattr(rank_links, "write_durably", write)
        yield made


@pytest.mark.parametrize("seed", range(times(2, 20)))
def test_every_message_arrives_once_and_in_order_whatever_connections_are_reset(
    seed: int, ends: Ends, proxies: list[ResetProxy]
) -> None:
    chance = random.Random(seed)
    links = [ends.open(number, 2) for number in (0, 1)]
    sent: list[list[bytes]] = [[], []]  # to each rank
    taken: list[list[bytes]] = [[], []]  # by each rank
    for _ in range(NUM_RESETS):
        for number in range(30):
            for rank in (0, 1):
                sent[rank].append(b"%d" % number * chance.choice((1, 500, 5000)))
                links[1 - rank].send(rank, sent[rank][-1])
        for rank in (0, 1):
            most = len(sent[rank]) - len(taken[rank])
            taken[rank] += [message for _, message in received(links[rank], chance.randrange(most))]
        for proxy in chance.sample(proxies, chance.randint(1, 2)):
            proxy.reset()
    for rank in (0, 1):
        taken[rank] += [message for _, message in received(links[rank], len(sent[rank]) - len(taken[rank]))]
    assert taken == sent
    assert sum(proxy.num_reset for proxy in proxies) >= NUM_RESETS


def test_a_link_that_broke_is_told_with_its_rank(
    ends: Ends, proxies: list[ResetProxy], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = ends.open(0, 2), ends.open(1, 2)
    second.send(0, b"x")
    received(first, 1)
    proxies[0].reset()
    until(
        lambda: (
            "a rank's connection broke; what was lost is sent again" in (log := "".join(capfd.readouterr()))
            and "rank=1" in log
        )
    )


@pytest.mark.parametrize("count", [2, 5])
def test_callers_without_a_key_are_limited_and_ranks_beside_them_go_on(
    count: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_links, "HANDSHAKE_MS", 600_000)  # until ZMQ ends them itself
    links = [ends.open(number, count) for number in range(count)]
    for number in range(1, count):
        links[number].send(0, b"x")
    received(links[0], count - 1)
    most = 2 * (count - 1) + MOST_STRANGERS
    listens = read_listens(pair_folder(ends.folder, 0, count) / LISTENS)
    assert listens is not None
    with ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(("127.0.0.1", listens.port))) for _ in range(3 * most)]
        for caller in callers[: 2 * most]:  # the oldest
            with suppress(ConnectionResetError):
                while caller.recv(100):
                    pass  # libzmq's greeting
        for number in range(1, count):
            links[number].send(0, b"y")
        assert {message for _, message in received(links[0], count - 1)} == {b"y"}


def test_a_rank_that_begins_elsewhere_is_left_waiting(ends: Ends) -> None:
    first = ends.open(0, 2)
    late = ends.open(1, 2, start="train an earlier checkpoint")
    first.send(1, b"x")
    time.sleep(0.5)
    assert late.receive() is None
    late.close()
    ends.opened.remove(late)
    assert received(ends.open(1, 2), 1) == [(0, b"x")]


def left_by_a_killed_one(ends: Ends) -> bytes:
    """Returns the file that rank 1 of 2 has left."""
    killed = ends.open(1, 2)
    path = pair_folder(ends.folder, 1, 2) / LISTENS
    content = path.read_bytes()
    killed.close()
    ends.opened.remove(killed)
    path.write_bytes(content)
    return content


def test_what_a_killed_prefetcher_has_left_does_not_matter(ends: Ends) -> None:
    left_by_a_killed_one(ends)
    first = ends.open(0, 2)
    first.send(1, b"x")
    time.sleep(0.3)
    assert received(ends.open(1, 2), 1) == [(0, b"x")]


def test_a_rank_whose_file_is_seen_late_is_admitted_then(ends: Ends) -> None:
    """As on a network folder: it has read the file of the other, which has not seen its own."""
    first = ends.open(0, 2)
    path = pair_folder(ends.folder, 0, 2) / LISTENS
    hidden = path.rename(path.with_name("hidden"))
    second = ends.open(1, 2)
    time.sleep(1.0)
    hidden.rename(path)
    first.send(1, b"x")
    second.send(0, b"y")
    assert received(second, 1) == [(0, b"x")]
    assert received(first, 1) == [(1, b"y")]


def test_a_rank_that_begins_again_ends_the_attempt_of_the_others(ends: Ends) -> None:
    first, second = ends.open(0, 2), ends.open(1, 2)
    second.send(0, b"x")
    assert received(first, 1) == [(1, b"x")]
    second.close()
    ends.opened.remove(second)
    ends.open(1, 2)
    with pytest.raises(PeerLost, match=facts("prefetcher of rank 1", "begun again")):
        until(first.receive)
    first.send(1, b"is dropped")


def test_nothing_waits_for_a_rank_that_is_gone(ends: Ends) -> None:
    first, second = ends.open(0, 2), ends.open(1, 2)
    second.send(0, b"x")
    received(first, 1)
    second.close()
    ends.opened.remove(second)
    for _ in range(1000):
        first.send(1, b"x" * 10_000)
    began_s = time.monotonic()
    first.close()
    ends.opened.remove(first)
    assert time.monotonic() - began_s < SOON_S


def test_who_is_awaited_for_too_long_is_named(ends: Ends) -> None:
    first, second = ends.open(0, 3, timeout_s=0.5), ends.open(1, 3)
    second.send(0, b"x")
    received(first, 1)
    first.awaits([1, 2])
    with pytest.raises(PeerLost, match=facts("rank 0", "0.5 s", "ranks.timeout", "rank 1", "which is connected")):
        until(first.receive)


def test_an_address_that_cannot_be_reached_is_named(ends: Ends) -> None:
    content = left_by_a_killed_one(ends)
    first = ends.open(0, 2, timeout_s=0.5)
    first.awaits([1])
    port = msgspec.json.decode(content)["port"]
    with pytest.raises(PeerLost, match=facts("rank 1", "cannot be reached", f"127.0.0.1:{port}")):
        until(first.receive)


def test_time_counts_only_while_the_others_should_be_there(ends: Ends) -> None:
    first = ends.open(0, 2, timeout_s=0.2, may_wait=lambda: False)
    ends.open(1, 2)
    first.awaits([1])
    time.sleep(1.0)
    assert first.receive() is None


def test_of_several_addresses_one_that_proves_the_key_is_used(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host may have the same private address, and another program the port."""
    monkeypatch.setattr(rank_links, "own_addresses", lambda: {"a": "127.0.0.2", "b": "127.0.0.3", "lo": "127.0.0.1"})
    first, second = ends.open(0, 2, is_only_host=False), ends.open(1, 2, is_only_host=False)
    first.send(1, b"x")
    second.send(0, b"y")
    assert received(second, 1) == [(0, b"x")]
    assert received(first, 1) == [(1, b"y")]


def test_a_stranger_is_not_heard(ends: Ends) -> None:
    first = ends.open(0, 2)
    own = read_listens(pair_folder(ends.folder, 0, 2) / LISTENS)
    assert own is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.curve_serverkey = own.key.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(f"tcp://127.0.0.1:{own.port}")
    plain = context.socket(zmq.PUSH)
    plain.connect(f"tcp://127.0.0.1:{own.port}")
    for caller in (stranger, plain):
        caller.send_multipart([FROM.pack(1, 7, own.attempt, 1, 0)])
        caller.send_multipart([FROM.pack(1, 7, own.attempt, 1, 0), b"a list"])
    time.sleep(1.0)
    assert first.receive() is None
    second = ends.open(1, 2)
    second.send(0, b"x")
    assert received(first, 1) == [(1, b"x")]
    for caller in (stranger, plain):
        caller.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"attempt": 1, "start": "", "addresses": [], "port": 1, "key": "x"}']
)
def test_a_file_that_is_not_ours_is_no_address(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LISTENS).write_bytes(content)
    assert read_listens(tmp_path / LISTENS) is None


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-000").write_text("no folder")
    with pytest.raises(ConfigError, match=facts("rank-000", "cannot be written", "other ranks")):
        Ends(tmp_path).open(0, 2)


def test_the_file_leaves_with_its_attempt(ends: Ends) -> None:
    path = pair_folder(ends.folder, 0, 2) / LISTENS
    first = ends.open(0, 2)
    assert path.exists()
    first.close()
    ends.opened.remove(first)
    assert not path.exists()
    assert "rank links" not in {thread.name for thread in threading.enumerate()}
