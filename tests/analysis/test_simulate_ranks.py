"""Simulated ranks exchange and move, step by step, what ranks of a run do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.analysis.scan.shares import Sharing, measured_keys, part_groupings
from rowcast.analysis.simulate.command import SimulateOptions, ranks_jobs, run_simulate
from rowcast.analysis.simulate.grid import Grid, with_values
from rowcast.analysis.simulate.ranks import owners_slots, simulate_ranks
from rowcast.analysis.simulate.ranks_results import RanksSimulation, step_exchange, travelled
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, group_specs
from rowcast.prefetcher.planner.capacity import job_slots, measure
from rowcast.prefetcher.planner.exchange import SharedRows, ShareOfBatch
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.pin_files import save_pins
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank, parts_of
from rowcast.protocol.shards import Shards
from rowcast.runtime.errors import ConfigError
from tests.support.batches import BAGS, Bags, distinct_rows, small_batches, small_job
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
    slots = job_slots(job, group_specs(job), batches, Rank(number=0, count=count, parts=parts))
    assert_equal_counts(job, batches, Settings(slots=slots, seed=way))


@pytest.mark.usefixtures("one_thread")
def test_each_rank_pins_the_rows_of_its_shard(tmp_path: Path) -> None:
    job, batches = workload("single", 2, 2)
    groups = group_specs(job)
    keys = tuple(np.unique(np.concatenate(own))[::5] for own in measured_keys(groupers_of(groups), batches))
    of_tables = {
        table.name: own[own >> KEY_SHIFT == table.index] & ROW_MASK
        for group, own in zip(groups, keys, strict=True)
        for table in group.tables
    }
    save_pins(tmp_path / "pins", of_tables, {})
    rows = {name: f"{int(rows.split()[0]) + 130} rows" for name, rows in job.cache.groups.items()}  # type: ignore[union-attr]
    job = with_values(job, {"cache": {"pin": str(tmp_path / "pins"), "groups": rows}})
    slots = job_slots(job, groups, batches, Rank(number=0, count=2, parts=2))
    assert max(map(len, keys)) > 100
    assert_equal_counts(job, batches, Settings(slots=slots, pinned=keys))


def assert_equal_counts(job: Job, batches: Sequence[ScheduledBatch], settings: Settings) -> None:
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


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1, 6), (2, 2), (2, 8), (3, 6), (8, 8), (70, 70)])
@pytest.mark.parametrize("bags", BAGS)
def test_the_shares_of_all_ranks_are_those_that_each_prefetcher_works_out_alone(
    bags: Bags, count: int, parts: int
) -> None:
    """A bound of bytes decides how far an automatic horizon grows, so bytes must be the same too."""
    job = small_job("adagrad", bags)
    groups = group_specs(job)
    groupers = groupers_of(groups)
    for scheduled in small_batches(job, bags, num_steps=2, eval_at=()):
        groupings = part_groupings(groupers, cut := parts_of(scheduled.batch, parts, ()))
        for group, own in zip(groups, groupings, strict=True):
            shares = Sharing(group, count, parts).of(own, scheduled.batch.size)
            if parts == 1:
                assert shares.owned[0].nbytes == own[0].nbytes
                continue
            for number in range(count):
                alone = ShareOfBatch(groups, JointGrouper(groups), Rank(number=number, count=count, parts=parts))
                expected, found = alone.group(cut)[group.index], shares.owned[number]
                assert isinstance(expected, SharedRows)
                assert np.array_equal(found.keys, expected.keys)
                assert (found.num_lookups, found.nbytes) == (expected.num_lookups, expected.nbytes)
                assert tuple(shares.exchanged[:, number]) == expected.exchange.send_counts
                assert tuple(shares.exchanged[number]) == expected.exchange.receive_counts
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
    expected = [job_slots(job, groups, batches, Rank(number=number, count=4, parts=4)) for number in range(4)]
    assert owners_slots(job, groups, keys, batches) == expected
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


def test_rows_that_a_rank_owns_do_not_travel() -> None:
    exchanged = np.arange(16).reshape(4, 4)  # [who looks up, who owns]
    sent, received = travelled(exchanged)
    assert sent.tolist() == [24, 23, 22, 21]
    assert received.tolist() == [6, 17, 28, 39]


def test_gradients_go_back_where_rows_came_from() -> None:
    job, batches = workload("multi", 3, 3)
    groups = group_specs(job)
    groupings = part_groupings(groupers_of(groups), parts_of(batches[0].batch, 3, ()))
    shares = [Sharing(group, 3, 3).of(own, batches[0].batch.size) for group, own in zip(groups, groupings, strict=True)]
    found = step_exchange(groups, batches[0], shares)
    for rank in range(3):
        received = [own.exchanged[rank].sum() - own.exchanged[rank, rank] for own in shares]
        sent = sum(rows * group.embedding_dim * 4 for rows, group in zip(received, groups, strict=True))
        assert found.gradient_bytes[0, rank] == found.row_bytes[1, rank] == sent
    assert found.gradient_bytes[0].tolist() != found.gradient_bytes[1].tolist()


def test_other_ways_to_divide_the_tables_send_a_pooled_row_a_sample_and_feature() -> None:
    job, batches = workload("multi", 4, 4)
    train = [own for own in batches if own.kind == "train"]
    found = simulated(job, batches)
    assert found.parallelisms is not None
    assert found.row_bytes is not None
    widths = sum(table.embedding_dim * len(table.features) for table in job.tables)
    samples = np.mean([own.batch.size for own in train])
    expected = samples * widths * 4 * 2 * 3 / 4 / 4
    assert found.parallelisms.by_table.mean == pytest.approx(expected)
    assert found.parallelisms.by_column.mean == pytest.approx(expected)
    # four tables, the widest of two features: one rank holds 10 of 31 columns, and cut up each holds about as many
    assert found.parallelisms.by_table.most == pytest.approx(samples * (10 * 3 + 31 - 10 + 0) / 4 * 4, rel=0.2)
    by_column = found.parallelisms.by_column.most
    assert by_column < found.parallelisms.by_table.most
    rows = found.parallelisms.rows
    assert rows.mean < rows.most < 2 * rows.mean


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
    with pytest.raises(ConfigError, match="--plot: `simulate --ranks` has none"):
        run_simulate(job, SimulateOptions(ranks=[2], plot=Path("a.png")))
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
