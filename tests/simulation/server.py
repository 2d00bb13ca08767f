"""A Redis server whose rows outlive prefetchers, and which fails as a seed has planned.

It stands in for redis-py's client: the code of ours above it, `Servers` and `RedisRows`, runs as it is.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.exceptions import OutOfMemoryError

from rowcast.runtime.errors import RowcastError, StoreLost

ServerFailure = Literal["killed", "silent", "started again", "evicts", "replaced", "full"]
SERVER_FAULTS: tuple[ServerFailure, ...] = ("killed", "silent", "started again", "evicts", "replaced", "full")
FOREIGN = {b"other": {b"a": b"1"}, b"rowcast:{00}": {b"b": b"2"}, b"rowcast:{00}ffffffffffff": {b"c": b"3"}}
LATE_WITHIN = 20  # calls of the next incarnation, after which what was sent to a silent server is carried out

Command = tuple[bytes, ...]
Hashes = dict[bytes, dict[bytes, bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFault:
    kind: ServerFailure
    at: int  # calls of a client before it
    share: float  # share of the call's commands carried out, of the keys evicted, or of the calls a replica has

    def __str__(self) -> str:
        return f"the server is {self.kind} at call {self.at}"


class SimulatedServer:
    """Every client of it is a connection as well."""

    def __init__(self, chance: random.Random) -> None:
        self.failed: ServerFailure | None = None  # since `plan`
        self.calls: Counter[bytes] = Counter()  # calls of each command
        self._chance = chance
        self.hashes: Hashes = {}
        self._run_id = self._evicted = 0
        self._restart()
        self._late: list[Command] = []  # sent to a silent server
        self._came_late: set[bytes] = set()  # keys
        self._is_cut_off = False
        self.repair()

    def repair(self) -> None:
        """Whoever runs the server sees to it, before a prefetcher opens its stores."""
        if self.failed == "killed":
            self._restart()
        self.failed = None
        self._late_at = self._chance.randrange(LATE_WITHIN)
        self.plan(None)

    def plan(self, fault: ServerFault | None) -> None:
        """Counts calls from now on."""
        self._fault, self._number = fault, 0
        self._older: Hashes | None = None

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing reaches it, as when the process that asks is killed."""
        self._is_cut_off = True
        yield
        self._is_cut_off = False

    def explains(self, error: Exception) -> bool:
        """Whether this is how a prefetcher must end at what the server did."""
        kind = RowcastError if self.failed == "full" else StoreLost
        return self.failed is not None and type(error) is kind and "(store.url)" in str(error)

    def check_keys(self) -> None:
        """At the end of a run: those of others are as they were, and none of the run is left."""
        found = {name: fields for name, fields in self.hashes.items() if name not in self._came_late}
        assert found == FOREIGN, f"the server has the keys {found}, expected {FOREIGN}"

    # redis.Redis

    @property
    def connection_pool(self) -> "SimulatedServer":
        return self

    def get_connection(self) -> "SimulatedConnection":
        return SimulatedConnection(self)

    def release(self, connection: "SimulatedConnection") -> None:
        """It keeps none."""

    def close(self) -> None:
        """It has none."""

    def info(self) -> dict[str, Any]:
        if self.failed in ("killed", "silent"):
            raise self._no_answer()
        return {"run_id": self._run_id, "evicted_keys": self._evicted, "maxmemory_policy": "noeviction"}

    def carry_out(self, commands: Sequence[Command]) -> list[Any]:
        """Raises what redis-py raises; answers may be errors too."""
        self._number += 1
        if self._is_cut_off:
            raise self._no_answer()
        if self._number > self._late_at and self.failed is None:
            self._came_late |= {command[1] for command in self._late}
            while self._late:
                self._answer(self._late.pop())
        fault = self._fault
        if fault is not None and self.failed is None:
            if fault.kind == "replaced" and self._number >= fault.at * fault.share and self._older is None:
                self._older = {name: dict(fields) for name, fields in self.hashes.items()}
            if self._number > fault.at:
                self.failed = fault.kind
                self._fail(fault, commands)
        if self.failed in ("killed", "silent"):
            raise self._no_answer()
        return [self._answer(command) for command in commands]

    def _fail(self, fault: ServerFault, commands: Sequence[Command]) -> None:
        count = round(fault.share * len(commands))
        match fault.kind:
            case "killed":
                for command in commands[:count]:
                    self._answer(command)
            case "silent":
                self._late = list(commands[:count])
            case "started again":
                self._restart()
            case "evicts":
                names = [name for name in self.hashes if name not in FOREIGN]
                for name in self._chance.sample(names, round(fault.share * len(names))):
                    del self.hashes[name]
                    self._evicted += 1
            case "replaced":
                older = self._older or {}
                self._came_late |= older.keys() - self.hashes.keys()  # deleted since: an older server has them again
                self.hashes = older
                if count % 2:  # else nothing tells, as behind some proxies
                    self._run_id += 1

    def _restart(self) -> None:
        self.hashes = {name: dict(fields) for name, fields in FOREIGN.items()}
        self._run_id, self._evicted = self._chance.randrange(2**40), 0

    def _no_answer(self) -> Exception:
        if self.failed == "silent":
            return redis.TimeoutError("Timeout reading from socket")
        return redis.ConnectionError("Connection closed by server.")

    def _answer(self, command: Command) -> Any:
        name, key, *arguments = command
        self.calls[name] += 1
        if name == b"UNLINK":
            return int(self.hashes.pop(key, None) is not None)
        if name == b"HSET":
            if self.failed == "full":
                return OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
            fields = self.hashes.setdefault(key, {})
            fields.update(zip(arguments[::2], arguments[1::2], strict=True))
            return len(arguments) // 2
        held = self.hashes.get(key, {})
        if name == b"HMGET":
            return [held.get(field) for field in arguments]
        assert name == b"HDEL", f"{name!r} is no command that the page names"
        found = [held.pop(field, None) for field in arguments]
        if not held:
            self.hashes.pop(key, None)
        return sum(value is not None for value in found)


class SimulatedConnection:
    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._commands: list[Command] = []
        self._answers: list[Any] | None = None

    def pack_commands(self, commands: Sequence[Command]) -> list[Command]:
        return list(commands)

    def send_packed_command(self, commands: list[Command]) -> None:
        self._commands = commands

    def read_response(self) -> Any:
        if self._answers is None:
            self._answers = self._server.carry_out(self._commands)[::-1]
        answer = self._answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def disconnect(self) -> None:
        """Answers that were not read are lost."""
