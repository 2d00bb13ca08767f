"""Runs the planners of all ranks of a run together. Each plans the rows of its shard, as its prefetcher would."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowcast.analysis.simulate.ranks.shares import OwnedRows, by_owner
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.capacity import Touched, slots_of, touched_by
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.planner.planner import RowPlanner, StepMoves
from rowcast.prefetcher.readers.pin_files import load_pins
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I64


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerMoves:
    """The rows that a step moves between each rank's device and its tables, [N, G]."""

    step: int
    fetched: I64
    written_back: I64


def owners_slots(
    job: Job, groups: tuple[GroupSpec, ...], keys_of_batches: Sequence[Sequence[I64]], batches: Sequence[ScheduledBatch]
) -> list[Slots]:
    """Slots of every rank of the job. `keys_of_batches`: of each group, the distinct rows of each measured batch.

    Raises ConfigError if one of the batches does not fit the cache of the rank that owns most of it."""
    return [slots_of(job, groups, own) for own in owners_touched(groups, keys_of_batches, batches, job.ranks.count)]


def owners_touched(
    groups: tuple[GroupSpec, ...],
    keys_of_batches: Sequence[Sequence[I64]],
    batches: Sequence[ScheduledBatch],
    count: int,
) -> list[Touched]:
    """Returns the rows that the measured batches touch in the shard of each of `count` ranks."""
    of_ranks: list[list[list[I64]]] = [[[] for _ in groups] for _ in range(count)]
    for index, (group, keys) in enumerate(zip(groups, keys_of_batches, strict=True)):
        shards = Shards(group.tables, count)
        for own in keys:
            for rank, shard in enumerate(by_owner(own, shards.owners(own), count)):
                of_ranks[rank][index].append(shard)
    return [touched_by(groups, own, batches, count) for own in of_ranks]


def measured_keys(groupers: Sequence[Grouper], batches: Sequence[ScheduledBatch]) -> list[list[I64]]:
    return [[grouper.group(grouper.lookups(own.batch)).keys for own in batches] for grouper in groupers]


class Owners:
    """A planner for each rank. Use as a `RowPlanner`: `add` every step of the run, then `end`."""

    def __init__(self, job: Job, groups: tuple[GroupSpec, ...], slots: Sequence[Slots]) -> None:
        count, parts = job.ranks.count, job.ranks.num_parts
        pin = job.cache.pin
        pinned = None if pin is None else load_pins(Path(pin), groups)
        self._planners = [
            job_planner(job, groups, [own], (), pinned=pinned, rank=Rank(number=number, count=count, parts=parts))
            for number, own in enumerate(slots)
        ]
        self._moves: dict[int, dict[int, StepMoves]] = {}  # by step and rank: steps that not all have planned yet
        self.flushed = np.zeros((count, len(groups)), np.int64)  # rows that barriers wrote back

    def add(self, scheduled: ScheduledBatch, shares: Sequence[Sequence[OwnedRows]]) -> Iterator[OwnerMoves]:
        """`shares`: of each group, of each rank. Yields the steps that all ranks have planned by now. Raises
        ConfigError if the batch does not fit."""
        for number, planner in enumerate(self._planners):
            planner.add(scheduled, tuple(group[number] for group in shares))
            self._plan(number, planner)
        yield from self._complete()

    def end(self) -> Iterator[OwnerMoves]:
        for number, planner in enumerate(self._planners):
            planner.end()
            self._plan(number, planner)
            self._barrier(number, planner, "end of data", finished=True)
        yield from self._complete()
        assert not self._moves, f"steps {sorted(self._moves)} were not planned by all ranks"

    def _plan(self, number: int, planner: RowPlanner) -> None:
        while planner.ready():
            if planner.checkpoint_due:
                self._barrier(number, planner, "checkpoint", finished=False)
            moves = planner.move()
            self._moves.setdefault(moves.step, {})[number] = moves

    def _barrier(self, number: int, planner: RowPlanner, reason: str, *, finished: bool) -> None:
        self.flushed[number] += [len(move) for move in planner.barrier(reason, finished).dirty]

    def _complete(self) -> Iterator[OwnerMoves]:
        """Yields the steps that all ranks have planned: an automatic horizon may let one rank plan ahead of others."""
        while self._moves and len(self._moves[step := min(self._moves)]) == len(self._planners):
            by_rank = self._moves.pop(step)
            groups = [by_rank[number].levels[0] for number in range(len(self._planners))]
            yield OwnerMoves(
                step=step,
                fetched=np.array([[len(group.fetch_keys) for group in own] for own in groups]),
                written_back=np.array([[group.num_dirty for group in own] for own in groups]),
            )
