"""Connects the ranks of a run for one attempt: to gather bytes from each rank, and to exchange tensors.

    join      all ranks are here and belong together             `meeting.py`
    gather    a few bytes of each rank, over that meeting's store
    connect   torch.distributed's process group, under that meeting's name
    close

A single trainer also has a group, of itself. Before training, `all_start` compares where all ranks' prefetchers begin,
and sends every rank's error to all.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rowcast.job.schema import Job
from rowcast.job.units import parse_seconds
from rowcast.protocol.messages import Mode, Welcome
from rowcast.protocol.parts import Rank, rank_of
from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, ConfigError, Mismatch, PeerLost, RanksDiffer, RowcastError
from rowcast.runtime.machine import UNRECORDED, Machine, differences
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.exchanges import Collectives, LocalCollectives
from rowcast.trainer.models.torch_collectives import TorchCollectives
from rowcast.trainer.run.joining import choose_network, join_group
from rowcast.trainer.run.launch import Launch, check_launch
from rowcast.trainer.run.meeting import POLL_S, GivenUp, Meeting, decoded, lost_store, new_greeting, open_store

Idle = Callable[[], object]
GO, LEAVE = b"go", b"leave"


def never() -> bool:
    return False


class Group(Protocol):
    @property
    def rank(self) -> Rank: ...

    def gather(self, content: bytes) -> list[bytes]:
        """Returns what each rank passed to the same call, by rank. `content` is UTF-8. All ranks make the same calls in
        the same order. Raises PeerLost if a rank does not within `ranks.timeout`."""

    def agree(self, content: bytes, timeout_s: float, given_up: GivenUp) -> list[bytes] | None:
        """As `gather`, within `timeout_s`; or None on every rank, if any was `given_up` before all were here.

        It calls `given_up` while it waits; errors of `given_up` end the wait."""

    def connect(self, device: torch.device, check: Idle, given_up: GivenUp) -> Collectives | None:
        """Call at most once; None if a rank was stopped before all had joined. It calls `check` while it waits, as does
        a collective; errors of `check` end the wait. Raises PeerLost."""

    def close(self) -> None:
        """Call it after the last successful exchange. A process that lost a rank must leave at once instead."""


class Party(Protocol):
    """The trainers of a run; each attempt has a group of them."""

    @property
    def rank(self) -> Rank: ...

    def join(self, given_up: GivenUp) -> Group | None:
        """Waits until all are here. None if `given_up`. Raises PeerLost, Mismatch or ConfigError."""


class OnlyRank:
    """A trainer that computes all parts of every batch. Implements `Party` and `Group`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def join(self, given_up: GivenUp) -> Group | None:
        return self

    def gather(self, content: bytes) -> list[bytes]:
        return [content]

    def agree(self, content: bytes, timeout_s: float, given_up: GivenUp) -> list[bytes] | None:
        return [content]

    def connect(self, device: torch.device, check: Idle, given_up: GivenUp) -> Collectives | None:
        return LocalCollectives()

    def close(self) -> None:
        pass


def party_of(job: Job, launch: Launch, mode: Mode) -> Party:
    """Raises ConfigError if torchrun started one trainer and the job file has more."""
    if launch.world_size == 1:
        check_launch(launch, job.ranks)
        return OnlyRank(rank_of(job.ranks, 0))
    return RankParty(job, launch, mode)


class RankParty:
    """Several trainers, started by torchrun. Implements `Party`."""

    def __init__(self, job: Job, launch: Launch, mode: Mode) -> None:
        size = launch.world_size
        # with a wrong number of ranks, they meet to compare their job files, and end
        self.rank = Rank(number=launch.rank, count=size, parts=job.ranks.num_parts if size == job.ranks.count else size)
        self._ranks, self._launch = job.ranks, launch
        self._greeting = new_greeting(launch, job.session_digest(), mode)
        self._timeout_s = parse_seconds(job.ranks.timeout)
        self._store: Store | None = None  # the same for all attempts

    def join(self, given_up: GivenUp) -> Group | None:
        self._store = self._store or open_store(self._launch, self._timeout_s, given_up)
        if self._store is None:
            return None
        choose_network(
            self._launch.address,
            self._launch.port,
            is_only_host=self._launch.local_world_size == self._launch.world_size,
        )
        name = Meeting(self._store, self._greeting, self._timeout_s, given_up).hold()
        check_launch(self._launch, self._ranks)  # not before, so that ranks with different job files report those first
        return None if name is None else RankGroup(PrefixStore(name, self._store), self.rank, self._timeout_s)


class RankGroup:
    """Implements `Group` for one of several ranks."""

    def __init__(self, store: Store, rank: Rank, timeout_s: float) -> None:
        """`store`: only this attempt's. `timeout_s`: how long ranks wait for each other."""
        self.rank = rank
        self._store, self._timeout_s = store, timeout_s
        self._num_gathered = 0
        self._connected = False

    def gather(self, content: bytes) -> list[bytes]:
        gathered = self.agree(content, self._timeout_s, never)
        assert gathered is not None, "nobody gives up"
        return gathered

    def agree(self, content: bytes, timeout_s: float, given_up: GivenUp) -> list[bytes] | None:
        call, number = self._num_gathered, self.rank.number
        self._num_gathered += 1
        keys = [f"{call}/{rank}" for rank in range(self.rank.count)]
        deadline_s = time.monotonic() + timeout_s
        try:
            self._store.set(keys[number], content.decode())
            while not self._store.check(keys):
                # the first statement of any rank holds for all: that it leaves, or that all are here
                if given_up() and self._decided(call, LEAVE) == LEAVE:
                    return None
                if self._store.check([f"{call}/decided"]) and self._decided(call, LEAVE) == LEAVE:
                    return None
                if time.monotonic() > deadline_s:
                    missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                    raise PeerLost(
                        f"rank {number} of {self.rank.count} waited {timeout_s:g} s for ranks {missing}; their logs "
                        "say what they do, or why they ended"
                    )
                time.sleep(POLL_S)
            return None if self._decided(call, GO) == LEAVE else [self._store.get(key) for key in keys]
        except RuntimeError as error:  # raised by the store
            raise lost_store(self.rank.number, error) from None

    def _decided(self, call: int, proposal: bytes) -> bytes:
        decided: bytes = self._store.compare_set(f"{call}/decided", "", proposal.decode())
        return decided

    def connect(self, device: torch.device, check: Idle, given_up: GivenUp) -> Collectives | None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            self._connected = join_group(backend, self._store, self.rank, self._timeout_s, check, given_up)
        except RuntimeError as error:  # raised by the store
            raise lost_store(self.rank.number, error) from None
        return TorchCollectives(self.rank, self._timeout_s, lambda: ignore(check())) if self._connected else None

    def close(self) -> None:
        if self._connected:
            dist.destroy_process_group()


def ignore(result: object) -> None:
    pass


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's starting point, or why it cannot start."""

    run_id: str = ""
    checkpoint: str = ""  # the checksum of its manifest
    train_steps: int = 0
    first_batches: tuple[tuple[str, str], ...] = ()  # see `Welcome`
    machine: Machine = UNRECORDED  # that will compute its parts
    leaves: bool = False  # it or its prefetcher was stopped
    failure: tuple[int, str] | None = None  # exit code and sentence


def start_of(welcome: Welcome | None, machine: Machine) -> Start:
    if welcome is None:
        return Start(leaves=True)
    return Start(
        run_id=welcome.run_id,
        checkpoint=welcome.checkpoint,
        train_steps=welcome.first_train_step,
        first_batches=welcome.first_batches,
        machine=machine,
    )


def failed_start(error: RowcastError) -> Start:
    return Start(failure=(error.exit_code, str(error)))


def all_start(group: Group, own: Start, timeout_s: float, given_up: GivenUp) -> bool:
    """Waits for all ranks. Returns False if any of them leaves.

    Raises the error of a rank that failed, the same on every rank, RanksDiffer if they begin at different checkpoints,
    and Mismatch if they have read different batches."""
    gathered = group.agree(msgspec.json.encode(own), timeout_s, given_up)
    if gathered is None:
        return False
    starts = [decoded(content, Start) for content in gathered]
    for start in starts:
        if start.failure is not None:
            code, sentence = start.failure
            raise ERRORS_BY_EXIT_CODE.get(code, RowcastError)(sentence)
    if any(start.leaves for start in starts):
        return False
    first = starts[0]
    for rank, start in enumerate(starts):
        if (start.run_id, start.checkpoint) != (first.run_id, first.checkpoint):
            raise RanksDiffer(
                f"the prefetcher of rank 0 begins after {first.train_steps} train steps of run {first.run_id}, that of "
                f"rank {rank} after {start.train_steps} of run {start.run_id}; job.run_dir must be one folder that all "
                "hosts share, and all must be started with the same options"
            )
    for rank, start in enumerate(starts):
        if start.first_batches != first.first_batches:
            raise other_batches(rank, dict(first.first_batches), dict(start.first_batches))
        here, others = start.machine, first.machine
        if here.threads != others.threads:
            raise ConfigError(
                f"rank {rank} computes with {here.threads} threads and rank 0 with {others.threads}, so the bits "
                "depend on which of them computes a part; give all trainers the same trainer.threads"
            )
        if found := differences(others, here):
            get_logger().warning(f"rank {rank} may round differently than rank 0: {'; '.join(found)}")
    return True


def other_batches(rank: int, first: Mapping[str, str], others: Mapping[str, str]) -> Mismatch:
    differing = [name for name in {**first, **others} if first.get(name) != others.get(name)]
    more = "" if len(differing) == 1 else f" and {len(differing) - 1} more"
    return Mismatch(
        f"rank {rank} has read other batches than rank 0: {differing[0]}{more} {'differs' if not more else 'differ'}; "
        "give every host the same data files, and a data set of your own the same order on every rank"
    )
