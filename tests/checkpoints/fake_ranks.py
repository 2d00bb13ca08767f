"""Several ranks without training, whose writers make one checkpoint in one thread; the seed orders their turns."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, points_in, with_placements
from rowcast.prefetcher.checkpoints.folder import carry_out
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.protocol.parts import BLOCK_BITS
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from tests.checkpoints.fake_run import MAX_ADVANCES, TABLES, FakeRun, Rows, UnsyncedDisk


@dataclass
class FakeRanks:
    """Has what `FakeRun` has; with `newest`, the rows of `start` are in the ranks' stores."""

    job: Job
    count: int
    disk: Disk = field(default_factory=UnsyncedDisk)
    keep: int = 2
    newest: Manifest | None = None
    block: int = 7
    start: Rows = field(default_factory=dict)
    seed: int = 0
    run_id: str = "0123456789ab"
    placements: Sequence[str] = ()  # of each table; () divides all by rows
    block_bits: int = BLOCK_BITS
    made: Callable[..., FakeRun] = FakeRun  # of a rank

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        placed = with_placements(replace(self.job, ranks=replace(self.job.ranks, count=self.count)), self.placements)
        points = points_in(group_specs(placed))
        self.ranks = [
            self.made(
                self.job,
                self.disk,
                self.keep,
                self.newest,
                self.block,
                shard=OwnShard(number=number, count=self.count, points=points, block_bits=self.block_bits),
                run_id=self.run_id,
            )
            for number in range(self.count)
        ]
        self.states: dict[int, Rows] = {}
        self.checkpoints = self.ranks[0].checkpoints
        for rank in self.ranks:
            carry_out(rank.checkpoints.withdraw(rank.shard))
            for group, store in zip(rank.groups, rank.stores, strict=True):
                tables = {table.index for table in group.tables}
                keys = np.array([key for key in self.start if key >> 48 in tables], np.int64)
                own = keys[rank.shard.owns(group, keys)].tolist()
                store.rows = {key: self.start[key] for key in own}

    @property
    def step(self) -> int:
        return self.ranks[0].step

    @property
    def durable(self) -> Manifest | None:
        return self.ranks[0].writer.newest

    @property
    def busy(self) -> bool:
        return any(rank.writer.busy for rank in self.ranks)

    def train(self, rows: Mapping[int, list[int]], steps: int = 10) -> None:
        for rank in self.ranks:
            rank.train(rows, steps)

    def train_at_random(self, rng: np.random.Generator, share: float) -> None:
        self.train({i: np.flatnonzero(rng.random(rows) < share).tolist() for i, (_, rows, _) in enumerate(TABLES)})

    def begin(self, *, finished: bool = False) -> None:
        self.states[self.step] = self.rows()
        for rank in self.ranks:
            rank.begin(finished=finished)

    def hand_over(self) -> None:
        for rank in self.ranks:
            rank.hand_over()

    def advance(self) -> None:
        self._chance.choice(self.ranks).writer.advance()

    def complete(self) -> None:
        for _ in range(MAX_ADVANCES):
            if not self.busy:
                break
            self.advance()
        assert not self.busy
        for rank in self.ranks:
            assert rank.writer.newest is not None
            assert self.durable is not None
            assert rank.writer.newest.checksum == self.durable.checksum, "ranks have ended at other checkpoints"
            rank.settle()

    def checkpoint(self, *, finished: bool = False) -> Manifest:
        self.begin(finished=finished)
        self.hand_over()
        self.complete()
        assert self.durable is not None
        return self.durable

    def rows(self) -> Rows:
        return {key: record for rank in self.ranks for key, record in rank.rows().items()}
