"""What several ranks count: each its own share, which is that of brute force, and adds up to the whole batch."""

from dataclasses import dataclass

import numpy as np
import pytest

from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.protocol.batch import Batch, Kind
from rowcast.protocol.counters import GroupCounters
from rowcast.protocol.parts import Shards, part_bounds
from tests.support.batches import distinct_rows, slots_for, small_batches, small_job
from tests.support.driver import Settings
from tests.support.ranked_run import RankedRun

RANKS = 3
JOB = small_job("adagrad", "single")
GROUPS = group_specs(JOB)
BATCHES = small_batches(JOB, "single", num_steps=6, eval_at=(2,))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def run(request: pytest.FixtureRequest) -> RankedRun:
    settings = Settings(slots=slots_for(GROUPS, BATCHES, "one batch"), seed=3)
    job = small_job("adagrad", "single", ranks={"gradients": request.param})
    return RankedRun(job, BATCHES, settings, ranks=RANKS, parts=RANKS).run()


def wanted(group: GroupSpec, batch: Batch, rank: int) -> set[int]:
    """The rows that the samples of a rank look up."""
    bounds, keys = part_bounds(batch.size, RANKS), set()
    for position, table in zip(group.feature_positions, group.feature_tables(), strict=True):
        ids = batch.ids[position * batch.size :][bounds[rank] : bounds[rank + 1]]
        keys |= set(make_keys(table.index, ids).tolist())
    return keys


@dataclass
class Moved:
    """Rows that go from each rank to each, [from, to], over the steps of a kind."""

    rows: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"

    @classmethod
    def of(cls, group: GroupSpec, kind: Kind) -> "Moved":
        shards, moved = Shards(group.tables, RANKS), np.zeros((RANKS, RANKS), np.int64)
        for scheduled in BATCHES:
            for rank in range(RANKS) if scheduled.kind == kind else ():
                keys = np.array(sorted(wanted(group, scheduled.batch, rank)), np.int64)
                moved[:, rank] += np.bincount(shards.owners(keys), minlength=RANKS)
        np.fill_diagonal(moved, 0)
        return cls(moved)

    def sent(self, rank: int) -> int:
        return int(self.rows[rank].sum())

    def received(self, rank: int) -> int:
        return int(self.rows[:, rank].sum())


def counted(run: RankedRun, rank: int, group: GroupSpec) -> GroupCounters:
    """By the trainer. The prefetcher has counted the same."""
    pair = run.pairs[rank]
    trainer, prefetcher = pair.trainer.counters.groups[group.name], pair.prefetcher.counters.groups[group.name]
    assert trainer == prefetcher
    return trainer


def test_a_rank_counts_the_rows_and_bytes_that_brute_force_moves(run: RankedRun) -> None:
    for group in GROUPS:
        trained, evaluated = Moved.of(group, "train"), Moved.of(group, "eval")
        for rank in range(RANKS):
            own = counted(run, rank, group)
            assert own.rows_sent == trained.sent(rank) + evaluated.sent(rank) > 0
            assert own.rows_received == trained.received(rank) + evaluated.received(rank) > 0
            gradient_bytes = {"fp32": 4, "bf16": 2}[run.job.ranks.gradients] * group.embedding_dim
            assert own.bytes_sent == own.rows_sent * own.weight_bytes + trained.received(rank) * gradient_bytes
            assert own.bytes_received == own.rows_received * own.weight_bytes + trained.sent(rank) * gradient_bytes


def test_what_ranks_share_out_adds_up_to_the_batch(run: RankedRun) -> None:
    for group in GROUPS:
        every = [counted(run, rank, group) for rank in range(RANKS)]
        sizes = [scheduled.batch.size for scheduled in BATCHES]
        assert sum(own.unique_rows for own in every) == sum(distinct_rows(group, each.batch) for each in BATCHES)
        assert sum(own.lookups for own in every) == sum(sizes) * group.num_features
        assert sum(own.rows_sent for own in every) == sum(own.rows_received for own in every)
        for own in every:
            assert own.unique_rows == own.hits + own.rows_fetched
    trainers = [pair.trainer.counters for pair in run.pairs]
    trained = sum(scheduled.batch.size for scheduled in BATCHES if scheduled.kind == "train")
    assert sum(own.samples for own in trainers) == trained
    assert {own.shared_samples for own in trainers} == {trained}
    assert {own.train_steps for own in trainers} == {6}
    assert [own.rank for own in trainers] == list(range(RANKS))


def test_every_rank_times_every_phase_and_its_waits_for_the_others(run: RankedRun) -> None:
    for pair in run.pairs:
        phases, stalls = pair.trainer.counters.phases, pair.trainer.counters.stalls
        assert min(phases.values()) > 0, phases
        assert 0 < stalls["ranks"] < phases["exchange"]


def test_every_rank_knows_how_evenly_the_rows_of_each_train_step_are_owned(run: RankedRun) -> None:
    imbalances = []
    for scheduled in BATCHES:
        owned = np.zeros(RANKS, np.int64)
        for group in GROUPS:
            rows = set().union(*(wanted(group, scheduled.batch, rank) for rank in range(RANKS)))
            owners = Shards(group.tables, RANKS).owners(np.array(sorted(rows), np.int64))
            owned += np.bincount(owners, minlength=RANKS)
        if scheduled.kind == "train":
            imbalances.append(owned.max() / owned.mean())
    assert min(imbalances) > 1
    for pair in run.pairs:
        assert pair.trainer.counters.rank_imbalance == pytest.approx(imbalances[-1], rel=1e-6)
        assert pair.trainer.counters.mean_imbalance == pytest.approx(np.mean(imbalances), rel=1e-6)
