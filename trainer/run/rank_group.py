"""Connects the ranks of a run for one attempt: to gather bytes from each rank, and to exchange tensors.

    join      all ranks are here and belong together             `meeting.py`
    gather    a few bytes of each rank, over that meeting's store
    connect   torch.distributed's process group, under that meeting's name
    close

A single trainer is a group of itself. Before training, `all_start` compares where all ranks' prefetchers begin,
and sends every rank's error to all.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rowcast.job.schema import Job
from rowcast.job.units import parse_seconds
from rowcast.protocol.messages import Mode, Welcome
from rowcast.protocol.parts import Rank, rank_of
from rowcast.runtime.errors import (
    ERRORS_BY_EXIT_CODE,
    ConfigError,
    Mismatch,
    PeerLost,
    RanksDiffer,
    RowcastError,
    listed,
)
from rowcast.runtime.machine import UNRECORDED, Machine, differences
from rowcast.runtime.run_directory import Completion, RunDirectory
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.exchanges import Collectives, LocalCollectives, TorchCollectives
from rowcast.trainer.report.report_json import Report, report_of_all
from rowcast.trainer.run.launch import Launch, check_launch
from rowcast.trainer.run.meeting import (
    GivenUp,
    Meeting,
    Room,
    choose_network,
    decoded,
    join_group,
    look_until,
    lost_store,
    new_greeting,
    open_store,
)

Idle = Callable[[], object]
CLOSING_S = 10.0  # for ranks that have nothing else left to do


def never() -> bool:
    return False


class Party:
    """The trainers of a run. Each attempt has a group of them."""

    def __init__(self, job: Job, launch: Launch, mode: Mode) -> None:
        """Raises ConfigError if torchrun started one trainer and the job file has more."""
        self._ranks, self._launch = job.ranks, launch
        self._timeout_s = parse_seconds(job.ranks.timeout)
        self._store: Store | None = None  # the same for all attempts
        if launch.world_size == 1:
            check_launch(launch, job.ranks)
            self.rank = rank_of(job.ranks, 0)
            return
        size = launch.world_size
        # with a wrong number of ranks, they meet to compare job files, and end
        self.rank = Rank(number=launch.rank, count=size, parts=job.ranks.num_parts if size == job.ranks.count else size)
        self._greeting = new_greeting(launch, job.session_digest(), mode)

    def join(self, given_up: GivenUp) -> "RankGroup | None":
        """Waits until all are here. None if `given_up`. Raises PeerLost, Mismatch or ConfigError."""
        if self._launch.world_size == 1:
            return RankGroup(None, self.rank, self._timeout_s)
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
    """The ranks of one attempt. All ranks make the same calls in the same order."""

    def __init__(self, store: Store | None, rank: Rank, timeout_s: float) -> None:
        """`store`: only this attempt's; None for a trainer that computes all parts of every batch. `timeout_s`: how
        long ranks wait for each other."""
        self.rank = rank
        self._store, self._timeout_s = store, timeout_s
        self._num_calls = 0
        self._connected = False

    def gather(self, content: bytes) -> list[bytes]:
        """Returns what each rank passed to the same call, by rank. `content` is UTF-8. Raises PeerLost if a rank does
        not call it within `ranks.timeout`."""
        gathered = self.agree(content, self._timeout_s, never)
        assert gathered is not None, "nobody gives up"
        return gathered

    def agree(self, content: bytes, timeout_s: float, given_up: GivenUp) -> list[bytes] | None:
        """As `gather`, within `timeout_s`; or None on every rank, if any was `given_up` before all were here.
        With a `timeout_s` of 0 it does not wait, and the others get `content` alone.

        It calls `given_up` while it waits; errors of `given_up` end the wait."""
        if self._store is None:
            return [content]
        room, self._num_calls = Room(self._store, str(self._num_calls), self.rank.count), self._num_calls + 1
        try:
            return room.agree(self.rank.number, content, timeout_s, given_up)
        except RuntimeError as error:  # raised by the store
            raise lost_store(self.rank.number, error) from None

    def connect(self, device: torch.device, check: Idle, given_up: GivenUp) -> Collectives | None:
        """Call at most once; None if a rank was stopped before all had joined. It calls `check` while it waits, as does
        a collective; errors of `check` end the wait. Raises PeerLost."""
        if self._store is None:
            return LocalCollectives()
        try:
            self._connected = join_group(device, self._store, self.rank, self._timeout_s, check, given_up)
        except RuntimeError as error:  # raised by the store
            raise lost_store(self.rank.number, error) from None
        if not self._connected:
            return None
        collectives = TorchCollectives(self.rank, self._timeout_s, check)
        collectives.open(device)
        return collectives

    def abandon(self, device: torch.device) -> None:
        """Call it after an error, before anything waits for the device: it may wait for a rank that is lost."""
        if self._store is not None and device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        """Call it after the last successful exchange: all ranks close together, since some may still exchange. A
        process that lost a rank must leave at once instead."""
        if not self._connected:
            return
        with suppress(PeerLost):  # nothing is left to lose
            self.agree(b"closes", min(self._timeout_s, CLOSING_S), never)
        dist.destroy_process_group()


def await_complete(job: Job, check: Idle) -> None:
    """Waits for the first rank to end, so that the others are still running if it has to restart. Calls `check`.

    Raises PeerLost if the run is not complete within ranks.timeout."""
    directory = RunDirectory(job.run_dir, "trainer")

    def completion() -> Completion | None:
        check()
        return directory.completion()

    if look_until(completion, parse_seconds(job.ranks.timeout)) is None:
        raise PeerLost(
            f"rank 0 has not completed the run within {job.ranks.timeout} (ranks.timeout) after its last step; its log "
            "says why"
        )


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's starting point, or why it cannot start."""

    run_id: str = ""
    checkpoint: str = ""  # the checksum of its manifest
    train_steps: int = 0
    data_checksums: tuple[tuple[str, str], ...] = ()  # see `Welcome`
    first_batches: tuple[tuple[str, str], ...] = ()
    placements: tuple[str, ...] = ()
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
        data_checksums=welcome.data_checksums,
        first_batches=welcome.first_batches,
        placements=welcome.placements,
        machine=machine,
    )


def all_start(group: RankGroup, begins: Start, timeout_s: float, given_up: GivenUp) -> bool:
    """Waits for all ranks. Returns False if any of them leaves.

    Raises the error of a rank that failed, the same on every rank, RanksDiffer if they begin at different checkpoints,
    and Mismatch if their data or first batches differ."""
    gathered = group.agree(msgspec.json.encode(begins), timeout_s, given_up)
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
        if start.data_checksums != first.data_checksums:
            raise other_data(f"rank {rank} reads other data", dict(first.data_checksums), dict(start.data_checksums))
        if start.first_batches != first.first_batches:
            batches = dict(first.first_batches), dict(start.first_batches)
            raise other_data(f"rank {rank} has read other batches", *batches)
        if start.placements != first.placements:
            read = [", ".join(one.placements) for one in (first, start)]
            raise ConfigError(
                f"the prefetcher of rank 0 places tables as {read[0]}, that of rank {rank} as {read[1]} ([[tables]] "
                "placement); start all with one job file"
            )
        here, others = start.machine, first.machine
        if here.threads != others.threads:
            raise ConfigError(
                f"rank {rank} computes with {here.threads} threads and rank 0 with {others.threads}, so the bits "
                "depend on which of them computes a part; give all trainers the same trainer.threads"
            )
        if differing := differences(others, here):
            get_logger().warning(f"rank {rank} may round differently than rank 0: {'; '.join(differing)}")
    return True


def meet_together(
    group: RankGroup, meet: Callable[[], tuple[Welcome | None, Machine]], job: Job, given_up: GivenUp, idle: Idle
) -> Welcome | None:
    """Returns what `meet` does, once all ranks have met their prefetchers, or None if any of them leaves.

    `meet`: returns the prefetcher's Welcome, and this machine as it will compute. Calls `idle` while it waits for other
    ranks. Raises as `meet` and `all_start` do; a rank's error ends the others."""
    timeout_s = sum(map(parse_seconds, (job.transport.connect_timeout, job.ranks.timeout)))

    def leaves() -> bool:
        idle()
        return given_up()

    try:
        welcome, machine = meet()
    except RowcastError as error:
        if not given_up():
            with suppress(RowcastError):
                all_start(group, Start(failure=(error.exit_code, str(error))), 0.0, never)
        raise
    return welcome if all_start(group, start_of(welcome, machine), timeout_s, leaves) else None


def same_states(group: RankGroup, tried: Callable[[], dict[str, str]]) -> None:
    """Calls `tried` on all ranks, before the first step. Raises ConfigError, the same on every rank, for the first
    error, and for the first state that another rank does not begin with."""
    try:
        states = tried()
    except RowcastError as error:
        states = {"": str(error)}
    first, *others = [decoded(content, dict[str, str]) for content in group.gather(msgspec.json.encode(states))]
    for rank, theirs in enumerate([first, *others]):
        if "" in theirs:
            raise ConfigError(theirs[""])
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"{name} begins with another state on rank {rank} than on rank 0; let it depend on the job and "
                    "on torch's random numbers, which are seeded, and on nothing of a process or host"
                )


def gathered_report(group: RankGroup, report: Report) -> Report:
    """Returns the report of all ranks, the same on each. Raises PeerLost."""
    # without what grows with the run: a store limits the size of a value
    brief = msgspec.structs.replace(report, evaluations=())
    of_all = report_of_all([decoded(content, Report) for content in group.gather(msgspec.json.encode(brief))])
    return msgspec.structs.replace(of_all, evaluations=report.evaluations)


def other_data(what: str, first: Mapping[str, str], others: Mapping[str, str]) -> Mismatch:
    differing = [name for name in {**first, **others} if first.get(name) != others.get(name)]
    differing.sort(key=lambda name: name in first and name in others)  # a missing rank may change all other figures
    return Mismatch(
        f"{what} than rank 0: {listed(differing, 1)} {'differs' if len(differing) == 1 else 'differ'}; "
        "give every host the same data files, and a data set of your own the same order on every rank"
    )
