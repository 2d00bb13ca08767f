"""Brings a run's trainers together before each attempt, over a key-value store served by torchrun or rank 0.

The store outlives an attempt, so it also holds values of dead trainers. So rank 0 gives each meeting a unique name, and
a meeting ends only when rank 0 has published who is present:

    rank 0                                                rank r
    "leader" = N, a new name        ->                    reads N, writes its greeting under N
    reads all greetings under N
    "N/present" = the greetings     ->                    among them? then all are here; if not, N is an old meeting

Values are JSON, never unpickled: any process that reaches the store can write there.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rowcast.protocol.attempts import VERBS
from rowcast.protocol.messages import PROTOCOL_VERSION, Mode
from rowcast.runtime.errors import ConfigError, Mismatch, PeerLost, cleaned
from rowcast.trainer.models.torch_collectives import first_sentence
from rowcast.trainer.run.launch import Launch

POLL_S = 0.01
CONNECT_S = 2.0  # for one try to reach the store
SETTLE_S = 0.3  # for a second process of a rank to be seen
ROLL_CALL_S = 2.0  # for live processes to answer, if a rank has greeted twice
MOST_GREETINGS = 16  # of one rank in one meeting: its process and earlier ones that died
INTRUDER = (
    "another program writes to the meeting point of the ranks, or the hosts run different versions of rowcast; give "
    "torchrun another --master-port, and install the same rowcast on all hosts"
)

GivenUp = Callable[[], bool]
Value = TypeVar("Value")


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the process, random
    rank: int
    world_size: int
    process: str  # for people: process id and host
    version: int
    digest: str  # the job file's
    mode: Mode


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's announcement of a meeting."""

    name: str
    world_size: int


class Present(msgspec.Struct, frozen=True, kw_only=True):
    greetings: tuple[Greeting, ...]  # by rank
    refused: str = ""  # a sentence, if not every rank is one process


def new_greeting(launch: Launch, digest: str, mode: Mode) -> Greeting:
    return Greeting(
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
    deadline_s = time.monotonic() + timeout_s
    while not serves and not answers(launch):
        if given_up():
            return None
        if time.monotonic() > deadline_s:
            raise PeerLost(
                f"rank {launch.rank} found no meeting point at {launch.address}:{launch.port} within {timeout_s:g} s; "
                "torchrun serves it on the first host, or else rank 0"
            )
        time.sleep(POLL_S)
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
            f"({first_sentence(error)}); give torchrun another --master-port"
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


class Meeting:
    """One rank's way into a meeting."""

    def __init__(self, store: Store, own: Greeting, timeout_s: float, given_up: GivenUp) -> None:
        self._store, self._own, self._timeout_s, self._given_up = store, own, timeout_s, given_up
        self._greeted = ""  # the meeting
        self._answered = ""  # the meeting whose roll call was answered

    def hold(self) -> str | None:
        """Returns the meeting's name once all ranks are here; None if given up.

        Raises PeerLost if some did not arrive, Mismatch or ConfigError if they do not belong together, with the same
        sentence on every rank."""
        try:
            return self._lead() if self._own.rank == 0 else self._follow()
        except RuntimeError as error:  # raised by the store
            raise lost_store(self._own.rank, error) from None

    def _lead(self) -> str | None:
        own = self._own
        name = secrets.token_hex(8)
        self._store.set("leader", encoded(Named(name=name, world_size=own.world_size)))
        deadline_s = time.monotonic() + self._timeout_s
        self._greet(name)
        while missing := self._missing(name):
            if not self._waits(deadline_s, missing):
                return None
        time.sleep(SETTLE_S)
        present = self._present(name)
        self._store.set(f"{name}/present", encoded(present))
        return checked(present, name, own.world_size)

    def _follow(self) -> str | None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            named = self._read("leader", Named)
            if named is not None:
                self._check_size(named)
                if named.name != self._greeted:
                    self._greet(named.name)
                if self._store.check([f"{named.name}/roll call"]) and self._answered != named.name:
                    self._store.set(f"{named.name}/here/{self._own.name}", "")
                    self._answered = named.name
                present = self._read(f"{named.name}/present", Present)
                if present is not None and (present.refused or any(map(self._is_own, present.greetings))):
                    return checked(present, named.name, self._own.world_size)
            if not self._waits(deadline_s, [0] if named is None else self._missing(named.name)):
                return None

    def _check_size(self, named: Named) -> None:
        if named.world_size != self._own.world_size:
            raise ConfigError(
                f"rank 0 was started with WORLD_SIZE = {named.world_size}, rank {self._own.rank} with "
                f"{self._own.world_size}; give torchrun the same --nnodes and --nproc-per-node on each host"
            )

    def _greet(self, name: str) -> None:
        number = self._store.add(f"{name}/greetings/{self._own.rank}", 1)
        self._store.set(f"{name}/greeting/{self._own.rank}/{number}", encoded(self._own))
        self._greeted = name

    def _greetings(self, name: str, rank: int) -> list[Greeting]:
        """Returns the greetings of all processes that claim to be this rank."""
        count = self._store.add(f"{name}/greetings/{rank}", 0)
        if count > MOST_GREETINGS:
            raise PeerLost(
                f"{count:,} processes say that they are rank {rank}; at most {MOST_GREETINGS} can: {INTRUDER}"
            )
        found = (self._read(f"{name}/greeting/{rank}/{number + 1}", Greeting) for number in range(count))
        return [greeting for greeting in found if greeting is not None]

    def _present(self, name: str) -> Present:
        """Chooses one process per rank. Of several, some may have died and been restarted."""
        came = [self._greetings(name, rank) for rank in range(self._own.world_size)]
        if all(len(greetings) == 1 for greetings in came):
            return Present(greetings=tuple(greetings[0] for greetings in came))
        self._store.set(f"{name}/roll call", "")
        time.sleep(ROLL_CALL_S)
        chosen = []
        for rank, greetings in enumerate(came):
            here = [one for one in greetings if self._is_own(one) or self._store.check([f"{name}/here/{one.name}"])]
            if len(here) > 1:
                both = " and ".join(one.process for one in here)
                refused = f"{both} were both started as rank {rank} of {self._own.world_size}; start each rank once"
                return Present(greetings=(), refused=refused)
            chosen.append((here or greetings)[-1])
        return Present(greetings=tuple(chosen))

    def _is_own(self, greeting: Greeting) -> bool:
        return greeting.name == self._own.name

    def _missing(self, name: str) -> list[int]:
        return [rank for rank in range(self._own.world_size) if not self._greetings(name, rank)]

    def _waits(self, deadline_s: float, missing: Sequence[int]) -> bool:
        if self._given_up():
            return False
        if time.monotonic() > deadline_s:
            waited = f"rank {self._own.rank} of {self._own.world_size} waited {self._timeout_s:g} s for the others; "
            if not missing:
                raise PeerLost(waited + "they met without it: another process took its place, or they have ended since")
            raise PeerLost(
                f"{waited}missing are ranks {', '.join(map(str, missing))}; start them with the same job file, or "
                "raise ranks.timeout"
            )
        time.sleep(POLL_S)
        return True

    def _read(self, key: str, kind: type[Value]) -> Value | None:
        return decoded(self._store.get(key), kind) if self._store.check([key]) else None


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def decoded(content: bytes, kind: type[Value]) -> Value:
    """Decodes a value from a different rank and cleans its texts. Raises PeerLost if no rank can have written it."""
    try:
        return msgspec.convert(with_clean_texts(msgspec.json.decode(content)), kind)
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
