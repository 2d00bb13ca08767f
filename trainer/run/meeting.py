"""Brings a run's trainers together before each attempt, over a key-value store served by torchrun or rank 0.

The store outlives an attempt, so it also holds values of dead trainers. Therefore rank 0 gives each meeting a unique
name, and a meeting ends only when rank 0 has published who is present:

    rank 0                                                rank r
    "leader" = N, a new name        ->                    reads N, adds its greeting to "N/r"
    reads "N/0", "N/1", ...
    "N/present" = the greetings     ->                    among them? then all are here; if not, N is an old meeting

Only rank 0 asks for the keys of all ranks, with one request. The others look at what it has published.

Values are JSON, never unpickled: any process that reaches the store can write there.

Joins torch.distributed's group so that no rank hangs.

The join runs in a thread, because torch waits in it without looking at signals. Meanwhile this thread looks at errors,
stop requests, the clock, and what the first rank that ended has published. A process that gives up must leave
at once: the thread still waits (`is_joining`).
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rowcast.protocol.attempts import VERBS
from rowcast.protocol.messages import PROTOCOL_VERSION, Mode
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, Mismatch, PeerLost, RowcastError, cleaned
from rowcast.runtime.machine import interface_toward
from rowcast.trainer.models.exchanges import first_sentence
from rowcast.trainer.run.launch import Launch

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.025, 0.2  # between two looks at the store
CONNECT_S = 2.0  # for one try to reach the store
SETTLE_S = 0.3  # for a second process of a rank to be seen
ROLL_CALL_S = 2.0  # for live processes to answer, if a rank has greeted twice
MOST_GREETINGS = 16  # that are kept of one rank in one meeting: its process and earlier ones that died
INTRUDER = (
    "another program writes to the meeting point of the ranks, or the hosts run different versions of rowcast; start "
    "torchrun again or give it another --master-port, and install the same rowcast on all hosts"
)

GivenUp = Callable[[], bool]
Value = TypeVar("Value")


class RankGreeting(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the process, random
    rank: int
    world_size: int
    process: str  # for people: process id and host
    version: int
    digest: str  # the job file's
    mode: Mode


class Greetings(msgspec.Struct, frozen=True, kw_only=True):
    """The greetings of all processes that claim to be one rank."""

    greetings: Annotated[tuple[RankGreeting, ...], msgspec.Meta(min_length=1, max_length=MOST_GREETINGS)]


class MeetingNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's announcement of a meeting."""

    name: str
    world_size: int
    calls_roll: bool = False  # each process that has greeted answers


class Present(msgspec.Struct, frozen=True, kw_only=True):
    greetings: tuple[RankGreeting, ...]  # by rank
    refused: str = ""  # a sentence, if not every rank is one process


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """The first one published holds for all ranks."""

    values: dict[str, list[int]] = {}  # each value with the ranks that left it; empty if a rank gave up
    lost: str = ""  # the sentence of a rank that ended


NOBODY = Present(greetings=())  # this rank gave up, or did not greet


def new_greeting(launch: Launch, digest: str, mode: Mode) -> RankGreeting:
    return RankGreeting(
        name=secrets.token_hex(8),
        rank=launch.rank,
        world_size=launch.world_size,
        process=f"process {os.getpid()} on {socket.gethostname()}",
        version=PROTOCOL_VERSION,
        digest=digest,
        mode=mode,
    )


def open_store(launch: Launch, timeout_s: float, given_up: GivenUp) -> Store | None:
    """Connects to the store; None if given up. Raises PeerLost if it is not served."""
    serves = launch.rank == 0 and not launch.has_agent
    if not look_until(lambda: serves or given_up() or answers(launch) or None, timeout_s):
        raise PeerLost(
            f"rank {launch.rank} found no meeting point at {launch.address}:{launch.port} within {timeout_s:g} s; "
            "torchrun serves it on the first host, or else rank 0"
        )
    if given_up():
        return None
    try:
        return TCPStore(
            launch.address,
            launch.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise PeerLost(
            f"rank {launch.rank} cannot use the meeting point at {launch.address}:{launch.port} "
            f"({first_sentence(error)}); start torchrun again or give it another --master-port"
        ) from None


def lost_store(rank: int, error: RuntimeError) -> PeerLost:
    return PeerLost(
        f"rank {rank} lost the meeting point of the ranks ({first_sentence(error)}); it ended with torchrun or rank 0, "
        "whose log says why"
    )


def answers(launch: Launch) -> bool:
    try:
        socket.create_connection((launch.address, launch.port), CONNECT_S).close()
    except OSError:
        return False
    return True


def look_until(look: Callable[[], Value | None], timeout_s: float) -> Value | None:
    """Returns the result of `look`, which is called a last time after `timeout_s`."""
    deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while (seen := look()) is None and time.monotonic() <= deadline_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return seen


class Room:
    """Where each rank leaves a value. Rank 0 waits for all and publishes one value; the others look at that one."""

    def __init__(self, store: Store, name: str, count: int) -> None:
        self.ranks = range(count)
        self.keys = [f"{name}/{rank}" for rank in self.ranks]
        self._store, self._published = store, f"{name}/present"

    def missing(self, ranks: range) -> str:
        """Returns the ranks without a value. Asks by halves, which mostly takes far fewer requests than one a rank."""
        if self._store.check([self.keys[rank] for rank in ranks]):
            return ""
        half = len(ranks) // 2
        return ", ".join(filter(None, map(self.missing, (ranks[:half], ranks[half:])))) if half else str(ranks[0])

    def publish(self, value: object) -> None:
        """Only the first value is published."""
        self._store.compare_set(self._published, "", encoded(value))

    def published(self) -> bytes | None:
        return self._store.get(self._published) if self._store.check([self._published]) else None

    def agree(self, rank: int, content: bytes, timeout_s: float, given_up: GivenUp) -> list[bytes] | None:
        """See `RankGroup`."""

        def look() -> bytes | None:
            if given_up():
                self.publish(Word())
            elif rank == 0 and self._store.check(self.keys):
                values: dict[str, list[int]] = {}
                for number, key in enumerate(self.keys):
                    values.setdefault(parsed(self._store.get(key), str), []).append(number)
                self.publish(Word(values=values))
            return self.published()

        value = content.decode()
        self._store.set(self.keys[rank], encoded(value))
        while (first := look_until(look, timeout_s)) is None:
            missing = self.missing(self.ranks) or "0"
            lost = f"rank {rank} of {len(self.ranks)} waited {timeout_s:g} s for ranks {missing}; their logs say what "
            self.publish(Word(lost=lost + "they do, or why they ended") if timeout_s else Word(values={value: [rank]}))
        return told(first)


class Meeting:
    """One rank's way into a meeting."""

    def __init__(self, store: Store, greeting: RankGreeting, timeout_s: float, given_up: GivenUp) -> None:
        self._store, self._own, self._timeout_s, self._given_up = store, greeting, timeout_s, given_up
        self._named = MeetingNotice(name="", world_size=greeting.world_size)  # as it was last seen
        self._room = Room(store, "", 0)  # the one in which this rank has greeted

    def hold(self) -> str | None:
        """Returns the meeting's name once all ranks are here; None if given up.

        Raises PeerLost if some did not arrive, Mismatch or ConfigError if they do not belong together, with the same
        sentence on every rank."""
        try:
            if self._own.rank == 0:
                self._named = msgspec.structs.replace(self._named, name=secrets.token_hex(8))
                self._store.set("leader", encoded(self._named))
                self._greet()
            present = look_until(self._look, self._timeout_s)
            if present is None:
                raise PeerLost(self._waited())
        except RuntimeError as error:  # raised by the store
            raise lost_store(self._own.rank, error) from None
        return None if present is NOBODY else checked(present, self._named.name, self._own.world_size)

    def _look(self) -> Present | None:
        if self._given_up():
            return NOBODY
        if self._own.rank > 0:
            self._follow()
        elif self._store.check(self._room.keys):
            time.sleep(SETTLE_S)
            self._room.publish(self._present())
        content = self._room.published()
        present = NOBODY if content is None else decoded(content, Present)
        is_among = self._own.name in [greeting.name for greeting in present.greetings]
        return present if present.refused or is_among else None

    def _follow(self) -> None:
        if not self._named.name and not self._store.check(["leader"]):
            return
        before, self._named = self._named, decoded(self._store.get("leader"), MeetingNotice)
        if self._named.world_size != self._own.world_size:
            raise ConfigError(
                f"rank 0 was started with WORLD_SIZE = {self._named.world_size}, rank {self._own.rank} with "
                f"{self._own.world_size}; give torchrun the same --nnodes and --nproc-per-node on each host"
            )
        if self._named.name != before.name:
            self._greet()
        if self._named.calls_roll and self._named != before:
            self._store.set(self._answer_of(self._own), "")

    def _greet(self) -> None:
        """Adds this process's greeting to those of other processes that claim to be this rank."""
        self._room = Room(self._store, self._named.name, self._own.world_size)
        key, before, greetings = self._room.keys[self._own.rank], "", encoded(Greetings(greetings=(self._own,)))
        while (written := self._store.compare_set(key, before, greetings)) != greetings.encode():
            others = decoded(written, Greetings).greetings
            before, greetings = (
                written.decode(),
                encoded(Greetings(greetings=(*others[1 - MOST_GREETINGS :], self._own))),
            )

    def _present(self) -> Present:
        """Chooses one process per rank. Of several, some may have died and been restarted."""
        came = [decoded(content, Greetings).greetings for content in map(self._store.get, self._room.keys)]
        if all(len(greetings) == 1 for greetings in came):
            return Present(greetings=tuple(greetings[0] for greetings in came))
        calling = encoded(msgspec.structs.replace(self._named, calls_roll=True))
        self._store.compare_set("leader", encoded(self._named), calling)  # unless a new process leads
        self._store.set(self._answer_of(self._own), "")
        time.sleep(ROLL_CALL_S)
        chosen = []
        for rank, greetings in enumerate(came):
            here = [one for one in greetings if self._store.check([self._answer_of(one)])]
            if len(here) > 1:
                both = " and ".join(one.process for one in here)
                refused = f"{both} were both started as rank {rank} of {self._own.world_size}; start each rank once"
                return Present(greetings=(), refused=refused)
            chosen.append((here or greetings)[-1])
        return Present(greetings=tuple(chosen))

    def _answer_of(self, greeting: RankGreeting) -> str:
        return f"{self._named.name}/here/{greeting.name}"

    def _waited(self) -> str:
        waited = f"rank {self._own.rank} of {self._own.world_size} waited {self._timeout_s:g} s for the others; "
        missing = self._room.missing(self._room.ranks) if self._named.name else "0"
        if not missing:
            return waited + "they met without it: another process took its place, or they have ended since"
        return f"{waited}missing are ranks {missing}; start them with the same job file, or raise ranks.timeout"


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def told(content: bytes) -> list[bytes] | None:
    """Returns a word's values by rank, whose texts the decoder must clean. Raises PeerLost."""
    word = parsed(content, Word)
    if word.lost:
        raise PeerLost(cleaned(word.lost))
    by_rank = sorted((rank, value) for value, ranks in word.values.items() for rank in ranks)
    return [value.encode() for _, value in by_rank] or None


def decoded(content: bytes, kind: type[Value]) -> Value:
    """Decodes a value from a different rank and cleans its texts. Raises PeerLost if no rank can have written it."""
    return msgspec.convert(with_clean_texts(msgspec.to_builtins(parsed(content, kind))), kind)


def parsed(content: bytes, kind: type[Value]) -> Value:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # of JSON, UTF-8, or a value of another type
        raise PeerLost(f"{INTRUDER} ({kind.__name__}: {cleaned(str(error))})") from None


def with_clean_texts(value: Any) -> Any:
    """`value`: builtins, as JSON holds them."""
    match value:
        case str():
            return cleaned(value)
        case list():
            return [with_clean_texts(item) for item in value]
        case dict():
            return {cleaned(key): with_clean_texts(item) for key, item in value.items()}
    return value


def checked(present: Present, name: str, world_size: int) -> str:
    """Returns `name`. Raises Mismatch with the same sentence on every rank if they do not belong together."""
    if present.refused:
        raise Mismatch(present.refused)
    if [greeting.rank for greeting in present.greetings] != list(range(world_size)):
        raise PeerLost(INTRUDER)
    first = present.greetings[0]
    for other in present.greetings[1:]:
        which = f"rank 0 ({first.process}) and rank {other.rank} ({other.process})"
        if other.version != first.version:
            raise Mismatch(
                f"{which} speak protocol versions {first.version} and {other.version}; install the same rowcast on "
                "all hosts"
            )
        if other.digest != first.digest:
            raise Mismatch(
                f"{which} were started with different job files: digests {first.digest} and {other.digest}; give all "
                "ranks the same file and the same --set overrides"
            )
        if other.mode != first.mode:
            raise Mismatch(
                f"{which} were started to {VERBS[first.mode]} and to {VERBS[other.mode]}; give torchrun the same "
                "command on each host"
            )
    return name


GLOO_NETWORK, NCCL_NETWORK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ADVICE = f"look for one that has ended, or name the network in {GLOO_NETWORK} or {NCCL_NETWORK}"
JOINING = "join ranks"  # the name of the thread
LOOPBACK = "lo"


def choose_network(address: str, port: int, *, is_only_host: bool) -> None:
    """Makes gloo use the network that reaches the meeting point, unless the user names one. By default gloo uses the
    address of the host's name, which many systems set to loopback."""
    name = interface_toward(address, port)
    if name is not None and (is_only_host or name != LOOPBACK):
        os.environ.setdefault(GLOO_NETWORK, name)


def join_group(
    device: torch.device, store: Store, rank: Rank, timeout_s: float, check: Callable[[], object], given_up: GivenUp
) -> bool:
    """Returns once all ranks have joined, with NCCL on a GPU and else with gloo, or False if one was stopped before.

    `store`: only this attempt's. Raises the errors of `check`, and PeerLost, with the sentence of the first rank that
    ended."""
    failed: list[RuntimeError] = []
    is_cuda = device.type == "cuda"
    # while one call waits for a key, all others of its client wait for the call
    client = store.clone()  # type: ignore[attr-defined]

    def join() -> None:
        try:
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=PrefixStore("group", client),
                rank=rank.number,
                world_size=rank.count,
                timeout=timedelta(seconds=2 * timeout_s),  # later than our time-out, which reports more
                # then NCCL connects here and not in its first exchange
                device_id=torch.device("cuda", device.index or 0) if is_cuda else None,
            )
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=join, name=JOINING, daemon=True)
    thread.start()
    room = Room(store, "joining", rank.count)

    def look() -> bytes | None:
        check()
        if given_up():
            room.publish(Word())
        otherwise = None if thread.is_alive() else b""  # checked first: the rank that ends the join has published why
        return room.published() or otherwise

    try:
        first = look_until(look, timeout_s)
        if first is None:
            raise PeerLost(
                f"rank {rank.number} of {rank.count} waited {timeout_s:g} s for the other ranks to connect; {ADVICE}"
            )
        if failed and not first:
            raise PeerLost(
                f"rank {rank.number} of {rank.count} found no way to the other ranks ({first_sentence(failed[0])}); "
                f"{ADVICE}"
            )
    except RowcastError as error:
        with suppress(RuntimeError):  # of a store that is gone
            room.publish(Word(lost=str(error)))
        raise
    return not first or told(first) is not None


def is_joining() -> bool:
    return any(thread.name == JOINING for thread in threading.enumerate())
