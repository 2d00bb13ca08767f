"""Simulated ranks exchange and move, step by step, what ranks of a run do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.analysis.scan import Sharing, measured_keys, owners_touched
from rowcast.analysis.simulate.command import SimulateOptions, ranks_jobs, run_simulate
from rowcast.analysis.simulate.ranks import RanksSimulation, simulate_ranks, step_exchange
from rowcast.analysis.simulate.simulate import Grid, simulate
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.exchange import ExchangedRows, ShareOfBatch
from rowcast.prefetcher.planner.first_batches import measure, slots_of
from rowcast.prefetcher.planner.grouping import Grouper, Grouping, JointGrouper
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Lookups, ScheduledBatch
from rowcast.protocol.parts import Rank, Shards, parts_of
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.batches import BAGS, PLACED, Bags, distinct_rows, placed, small_batches, small_job
from tests.support.driver import Settings
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun

WAYS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (2, 8, {"lookahead": {"horizon": "auto", "id_bytes": "90KB"}}),
    (3, 3, {"checkpoint": {"every": 3}, "cache": {"policy": "lru"}}),
    (3, 12, {"lookahead": {"depth": 1, "horizon": 0}}),
    (1, 4, {}),
]


def part_groupings(groupers: Sequence[Grouper], parts: Sequence[Lookups]) -> list[tuple[Grouping, ...]]:
    """Of each group, the look-ups of each part of a batch."""
    return [tuple(grouper.group(grouper.lookups(part)) for part in parts) for grouper in groupers]


def workload(bags: Bags, count: int, parts: int, **sections: Any) -> tuple[Job, list[ScheduledBatch]]:
    """Every rank has the same slots: just enough for the largest batch of any."""
    job = small_job("adagrad", bags)
    batches = small_batches(job, bags, num_steps=16, eval_at=(3, 4, 11))
    groups = group_specs(job)
    largest = np.max(
        [measure(groups, batches, Rank(number=n, count=count, parts=parts)).largest_batch_rows for n in range(count)],
        axis=0,
    )
    rows = {group.name: f"{n + 3} rows" for group, n in zip(groups, largest, strict=True)}
    cache = {"capacity": "1GiB", "groups": rows, **sections.pop("cache", {})}
    ranks = {"count": count, "parts": parts}
    return with_values(job, {"cache": cache, "ranks": ranks, **sections}), batches


def simulated(job: Job, batches: Sequence[ScheduledBatch]) -> RanksSimulation:
    [result] = simulate_ranks([job], lambda _: batches, per_step=True)
    assert result.skipped is None, result.skipped
    return result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("bags", ["single", "multi", "apart"])
def test_each_step_exchanges_and_moves_what_a_run_of_as_many_ranks_does(bags: Bags, way: int) -> None:
    count, parts, sections = WAYS[way]
    job, batches = workload(bags, count, parts, **dict(sections))
    slots = slots_of(
        job, group_specs(job), measure(group_specs(job), batches, Rank(number=0, count=count, parts=parts))
    )
    assert_equal_counts(job, batches, Settings(slots=slots, seed=way))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("bags", ["multi", "weighted apart"])
@pytest.mark.parametrize(("count", "parts", "id_bytes"), [(2, 8, "90KB"), (3, 3, "64MiB")])
def test_ranks_that_own_whole_tables_move_what_those_of_a_run_do(
    bags: Bags, count: int, parts: int, id_bytes: str
) -> None:
    job = small_job("adagrad", bags, lookahead={"horizon": "auto", "id_bytes": id_bytes})
    job = placed(job, PLACED, count, parts)
    batches = small_batches(job, bags, num_steps=16, eval_at=(3, 4, 11))
    keys = measured_keys(groupers_of(group_specs(job)), batches)
    touched = owners_touched(group_specs(job), keys, batches, count)
    slots = tuple(3 + max(own) for own in zip(*(rank.largest_batch_rows for rank in touched), strict=True))
    groups = {group.name: f"{n} rows" for group, n in zip(group_specs(job), slots, strict=True)}
    job = with_values(job, {"cache": {"groups": groups}})
    run = assert_equal_counts(job, batches, Settings(slots=slots, seed=5))
    found, steps = simulated(job, batches), len(batches)
    assert found.vector_bytes is not None
    assert found.vector_gradient_bytes is not None
    assert found.row_bytes is not None
    assert found.gradient_bytes is not None
    assert found.steps is not None
    forward, back = (found.row_bytes + found.vector_bytes), (found.gradient_bytes + found.vector_gradient_bytes)
    counted = [pair.trainer.counters for pair in run.pairs]
    assert sum(own.total("bytes_received") for own in counted) == pytest.approx(
        count * (forward * steps + back * found.steps)
    )
    assert sum(own.total("vector_bytes_received") for own in counted) > 0


def assert_equal_counts(job: Job, batches: Sequence[ScheduledBatch], settings: Settings) -> RankedRun:
    count, parts = job.ranks.count, job.ranks.num_parts
    run = RankedRun(job, batches, settings, ranks=count, parts=parts).run()
    found = simulated(job, batches).per_step
    assert found is not None
    assert len(found.step) == len(batches)
    for number, pair in enumerate(run.pairs):
        assert [plan.step for plan in pair.plans] == found.step
        for position, plan in enumerate(pair.plans):
            shares = [group.share.header for group in plan.groups if group.share is not None]
            assert len(shares) == 2
            assert found.owner_rows[position][number] == sum(own.num_own for own in shares)
            for counts, name in ((found.rows_sent, "send_counts"), (found.rows_received, "receive_counts")):
                others = [n for own in shares for r, n in enumerate(getattr(own, name)) if r != number]
                assert counts[position][number] == sum(others)
            assert found.rows_fetched[position][number] == sum(len(group.fetch_keys) for group in plan.groups)
            assert found.rows_written_back[position][number] == sum(group.num_dirty for group in plan.groups)
    assert any(map(sum, found.rows_written_back))
    return run


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1, 6), (2, 2), (2, 8), (3, 6), (8, 8), (70, 70)])
@pytest.mark.parametrize("bags", BAGS)
def test_the_shares_of_all_ranks_are_those_that_each_prefetcher_works_out_alone(
    bags: Bags, count: int, parts: int
) -> None:
    """A bound of bytes decides how far an automatic horizon grows, so bytes must be the same too."""
    job = placed(small_job("adagrad", bags), PLACED, count, parts)
    groups = group_specs(job)
    groupers = groupers_of(groups)
    for scheduled in small_batches(job, bags, num_steps=2, eval_at=()):
        groupings = part_groupings(groupers, cut := parts_of(scheduled.batch, parts, ()))
        found_shares = Sharing(groups, count, parts).of(scheduled.batch)
        for group, own, shares in zip(groups, groupings, found_shares, strict=True):
            if parts == 1:
                assert shares.owned[0].nbytes == own[0].nbytes
                continue
            for number in range(count):
                alone = ShareOfBatch(groups, JointGrouper(groups), Rank(number=number, count=count, parts=parts))
                expected, found = alone.group(cut)[group.index], shares.owned[number]
                assert isinstance(expected, ExchangedRows)
                assert np.array_equal(found.keys, expected.keys)
                assert (found.num_lookups, found.nbytes) == (expected.num_lookups, expected.nbytes)
                assert tuple(shares.exchanged[:, number]) == expected.send_counts
                assert tuple(shares.exchanged[number]) == tuple(map(len, expected.own.wanted))
            assert shares.part_rows.tolist() == [len(part.keys) for part in own]


def test_rows_are_late_if_a_rank_used_them_in_the_step_before() -> None:
    job, batches = workload("multi", 3, 3)
    found = simulated(job, batches).per_step
    assert found is not None
    groups = group_specs(job)
    groupers = groupers_of(groups)
    before: set[int] = set()
    for position, scheduled in enumerate(batches):
        groupings = part_groupings(groupers, parts_of(scheduled.batch, 3, ()))
        for rank in range(3):
            wanted = {
                key
                for group, own in zip(groups, groupings, strict=True)
                for key, owner in zip(own[rank].keys, Shards(group.tables, 3).owners(own[rank].keys), strict=True)
                if owner != rank
            }
            assert found.rows_received[position][rank] == len(wanted)
            assert found.rows_late[position][rank] == len(wanted & before)
        before = {key for own in groupings for part in own for key in part.keys}


def test_one_rank_of_one_part_moves_what_the_simulation_without_ranks_moves() -> None:
    job, batches = workload("multi", 1, 1)
    result = simulated(job, batches)
    [alone] = simulate(job, Grid(), lambda _: batches, per_step=True)
    assert result.per_step is not None
    assert alone.per_step is not None
    assert [rows for [rows] in result.per_step.rows_fetched] == alone.per_step.rows_fetched
    assert [rows for [rows] in result.per_step.rows_written_back] == alone.per_step.rows_written_back
    names = ("bytes_fetched", "bytes_written_back", "rows_flushed", "lookups", "steps", "eval_steps", "capacity_rows")
    assert [getattr(result, name) for name in names] == [getattr(alone, name) for name in names]
    assert result.rows_received is not None
    assert result.rows_received.most == 0


def test_the_slots_of_each_rank_are_those_of_a_run() -> None:
    job = small_job("adagrad", "multi", cache={"capacity": "20KB"}, ranks={"count": 4})
    groups, batches = group_specs(job), small_batches(job, "multi")
    keys = measured_keys(groupers_of(groups), batches)
    expected = [
        slots_of(job, groups, measure(groups, batches, Rank(number=number, count=4, parts=4))) for number in range(4)
    ]
    assert [slots_of(job, groups, own) for own in owners_touched(groups, keys, batches, 4)] == expected
    assert len(set(expected)) > 1


def test_a_setting_that_does_not_fit_says_why_and_the_others_are_simulated() -> None:
    job, batches = small_job("adagrad", "multi"), small_batches(small_job("adagrad", "multi"), "multi")
    capacity = sum(
        group.record_bytes * max(distinct_rows(group, own.batch) for own in batches) for group in group_specs(job)
    )
    options = SimulateOptions(ranks=[1, 4], capacities=[f"{capacity * 6 // 10}"])
    one, four = simulate_ranks(ranks_jobs(job, options), lambda _: batches)
    assert one.skipped is not None
    assert "too small" in one.skipped
    assert four.skipped is None


@pytest.mark.parametrize(("gradients", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_gradients_go_back_where_rows_came_from(gradients: str, nbytes: int) -> None:
    job, batches = workload("multi", 3, 3)
    job = with_values(job, {"ranks": {"gradients": gradients}})
    groups = group_specs(job)
    shares = Sharing(groups, 3, 3).of(batches[0].batch)
    found = step_exchange(groups, batches[0], shares)
    for rank in range(3):
        received = [own.exchanged[rank].sum() - own.exchanged[rank, rank] for own in shares]
        sent = sum(rows * group.embedding_dim * 4 for rows, group in zip(received, groups, strict=True))
        assert found.gradient_bytes[0, rank] * 4 == found.row_bytes[1, rank] * nbytes == sent * nbytes
    assert found.gradient_bytes[0].tolist() != found.gradient_bytes[1].tolist()


def test_other_placements_send_a_pooled_row_a_sample_and_feature() -> None:
    job, batches = workload("multi", 4, 4)
    train = [own for own in batches if own.kind == "train"]
    found = simulated(job, batches)
    assert found.ways is not None
    assert found.row_bytes is not None
    widths = [table.embedding_dim * len(table.features) for table in job.tables]
    samples = np.mean([own.batch.size for own in train])
    expected = samples * sum(widths) * 4 * 2 * 3 / 4 / 4
    assert found.ways.table.mean == pytest.approx(expected, rel=1e-3)
    # each rank owns a table; that of the widest, of two features, sends 10 columns of 31 to three others and gets as
    # many back
    assert found.ways.table.most == pytest.approx(samples / 4 * 10 * 3 * 4 * 2, rel=0.01)
    assert found.ways.columns == found.ways.table, "no table is wide enough to be cut"
    rows = found.ways.rows
    assert rows.mean < rows.most < 2 * rows.mean
    narrow = simulated(with_values(job, {"ranks": {"gradients": "bf16"}}), batches).ways
    assert narrow is not None
    assert narrow.table.mean == pytest.approx(found.ways.table.mean / 2), "vectors and their gradients"
    assert narrow.rows.mean == pytest.approx(rows.mean * 3 / 4), "only gradients"
    assert [own.table for own in found.ways.tables] == [table.name for table in job.tables]
    assert sum(own.rows for own in found.ways.tables) == pytest.approx(rows.mean)
    assert sum(own.vectors for own in found.ways.tables) == pytest.approx(expected)
    assert found.ways.auto.most <= rows.most


def test_parts_are_the_jobs_where_the_ranks_can_share_them() -> None:
    job = small_job("adagrad", ranks={"count": 2, "parts": 8})
    jobs = ranks_jobs(job, SimulateOptions(ranks=[1, 3, 8, 16], samples_per_rank=[10]))
    assert [(own.ranks.count, own.ranks.num_parts, own.data.batch_size) for own in jobs] == [
        (1, 8, 10),
        (3, 3, 30),
        (8, 8, 80),
        (16, 16, 160),
    ]


def test_what_cannot_be_simulated_is_a_sentence() -> None:
    job = small_job("adagrad")
    with pytest.raises(ConfigError, match=facts("--ranks", "lookahead, lru, lfu", "belady", "--policy")):
        ranks_jobs(job, SimulateOptions(ranks=[2], policies=["belady"]))
    with pytest.raises(ConfigError, match="--store-memory: `simulate --ranks` has none"):
        run_simulate(job, SimulateOptions(ranks=[2], memories=["1MiB"]))
    with pytest.raises(ConfigError, match="--samples-per-rank needs --ranks"):
        run_simulate(job, SimulateOptions(samples_per_rank=[8]))


def test_the_command_prints_json_and_tables(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    job = small_job(
        "adagrad",
        data={"format": "synthetic", "synthetic": {"samples": 512}},
        job={"run_dir": str(tmp_path / "run")},
    )
    options = SimulateOptions(ranks=[1, 4], max_steps=4, json=True, per_step=True)
    run_simulate(job, options)
    one, four = msgspec.json.decode(capfdbinary.readouterr().out)["results"]
    assert (one["ranks"], four["ranks"], four["parts"]) == (1, 4, 4)
    assert sum(four["per_step"]["owner_rows"][0]) == sum(one["per_step"]["owner_rows"][0])
    run_simulate(job, SimulateOptions(ranks=[1, 4], max_steps=4))
    text = capfdbinary.readouterr().out.decode()
    assert "max over" in text
    assert "MB by" in text


@pytest.mark.parametrize("capacities", [["2000 rows", "1MiB"], ["1MiB", "2000 rows"]])
def test_auto_cuts_tables_for_a_capacity_in_bytes_and_none_for_one_in_rows(capacities: list[str]) -> None:
    """Single look-ups of rows that seldom come twice send less as bf16 vectors."""
    tables = [jobs.table("t", 10**6, 64, "cat_0", placement="auto")]
    own = {"tables": tables, "data": {"format": "synthetic", "batch_size": 200, "synthetic": {"zipf": 0}}}
    job = jobs.job(**own, ranks={"count": 2, "gradients": "bf16"})
    each = [with_values(job, {"cache": {"capacity": capacity}}) for capacity in capacities]
    found = simulate_ranks(each, lambda own: schedule(own, open_reader(own), 3))
    placed = {own.capacity: own.ways.tables[0].placement for own in found if own.ways is not None}
    assert placed == {"1MiB": "columns:2", "2000 rows": "rows"}
