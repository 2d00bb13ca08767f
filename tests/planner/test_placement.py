"""What tables send between ranks by each placement, and the choice of it."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rowcast.analysis.estimate.estimate import host_rates
from rowcast.job.embedding_tables import Placement
from rowcast.job.schema import Job
from rowcast.job.tables import ITEM_BYTES, KEY_SHIFT, group_specs, possible_groups, with_placements
from rowcast.prefetcher.planner.first_batches import Traffic, chosen, counted, short_of_memory
from rowcast.prefetcher.run.sizing import placed as settled
from rowcast.protocol.batch import Batch, Lookups, ScheduledBatch
from rowcast.protocol.parts import Shards, owner_of, part_bounds
from rowcast.runtime.checkpoint_manifest import MANIFEST_VERSION, Manifest, Position, RowLayer, ShardLayers
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes
from tests.support import jobs
from tests.support.batches import BAGS, Bags, small_batches, small_job
from tests.support.facts import facts
from tests.support.planner_runs import schedule


def bytes_of_ranks(job: Job, batch: Lookups) -> dict[str, list[list[int]]]:
    """Bytes that each rank sends and receives in a train step, forward and backward, counted row by row."""
    count = job.ranks.count
    found = {way: [[0] * count, [0] * count] for way in ("forward", "back")}

    def move(owner: int, rank: int, forward: int, back: int) -> None:
        for way, nbytes, (source, target) in (("forward", forward, (owner, rank)), ("back", back, (rank, owner))):
            if source != target:
                found[way][0][source] += nbytes
                found[way][1][target] += nbytes

    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    for group in group_specs(job):
        shards = Shards(group.tables, count)
        for table in group.tables:
            width, row_bytes = table.embedding_dim, table.embedding_dim * ITEM_BYTES[table.dtype]
            value_bytes = {"fp32": 4, "bf16": 2}[job.ranks.gradients]
            for rank, (first, end) in enumerate(pairwise(part_bounds(batch.size, count))):
                if (owner := owner_of(table, count)) is not None:
                    nbytes = (end - first) * len(table.features) * width * value_bytes
                    move(owner, rank, nbytes, nbytes)
                    continue
                bags = [job.features.index(name) * batch.size for name in table.features]
                ids = [batch.ids[offsets[bag + first] : offsets[bag + end]] for bag in bags]
                keys = np.unique(np.concatenate(ids)) | table.index << KEY_SHIFT
                for own in shards.owners(keys).tolist():
                    move(own, rank, row_bytes, width * value_bytes)
    return found


def by_hand(job: Job, placed: Sequence[Placement], batches: Sequence[ScheduledBatch]) -> tuple[float, float]:
    """The mean and the most bytes of a rank and train step."""
    steps = [bytes_of_ranks(with_placements(job, placed), own.batch) for own in batches if own.kind == "train"]
    summed = {way: np.sum([step[way] for step in steps], axis=0) for way in ("forward", "back")}
    most = sum(own.max(axis=0) for own in summed.values()).max()
    return sum(own[1].mean() for own in summed.values()) / len(steps), most / len(steps)


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_counted_bytes_are_those_counted_row_by_row(bags: Bags, count: int) -> None:
    ranks = {"count": count, "parts": 2 * count, "gradients": ("fp32", "bf16")[BAGS.index(bags) % 2]}
    job = small_job("adagrad", bags, dtypes=("bf16", "fp32", "bf16", "fp16"), ranks=ranks)
    batches = small_batches(job, bags)
    traffic = counted(job, batches)
    rows: list[Placement] = ["rows"] * 4
    mixed: list[Placement] = ["rows" if table.pooling == "none" else "table" for table in job.tables]
    for placed in (rows, mixed, mixed[:2] + rows[2:]):
        found = traffic.of(placed)
        assert (found.mean, found.most) == pytest.approx(by_hand(job, placed, batches))


def test_bytes_of_each_table_add_up() -> None:
    job = small_job("sgd", "multi", ranks={"count": 4})
    traffic = counted(job, small_batches(job, "multi"))
    each = traffic.of_each(["table", "rows", "table", "rows"])
    assert [own.owners for own in each] == [(0,), (), (2,), ()]
    assert sum(own.rows for own in each) == pytest.approx(traffic.of(["rows"] * 4).mean)
    assert sum(own.vectors for own in each) == pytest.approx(
        traffic.of(["table"] * 4).mean, rel=1e-3
    )  # owners have not the same samples


def auto_job(tables: int, count: int, *, placement: str = "auto", **more: object) -> Job:
    own = [jobs.table(f"t{i}", 10**6, 16, placement=placement, **more) for i in range(tables)]
    return jobs.job(tables=own, ranks={"count": count}, data={"batch_size": 128})


def bags_of(
    job: Job, lengths: Sequence[int], *, steps: int = 2, size: int = 128, rows: int = 10**6
) -> list[ScheduledBatch]:
    """Batches whose bags hold `lengths` look-ups of each feature, of `rows` rows."""
    rng, per_bag = np.random.default_rng(5), np.repeat(lengths, size)
    batches = [
        Batch(
            dense=np.zeros((size, 1), np.float32),
            labels=np.zeros(size, np.float32),
            ids=rng.integers(0, rows, per_bag.sum()),
            offsets=np.concatenate([[0], np.cumsum(per_bag)]),
        )
        for _ in range(steps)
    ]
    return schedule(batches, ["train"] * steps)


def placements(job: Job, batches: Sequence[ScheduledBatch]) -> tuple[list[Placement], Traffic]:
    traffic = counted(job, batches)
    return chosen(job, traffic), traffic


def placed(job: Job, batches: Sequence[ScheduledBatch]) -> list[Placement]:
    return placements(job, batches)[0]


def wide(**more: object) -> dict[str, object]:
    return jobs.table("wide", 10**6, 64, **{"placement": "auto", **more})


def one_wide(count: int = 4, **sections: object) -> list[Placement]:
    own = {"tables": [wide()], "ranks": {"count": count}, "data": {"batch_size": 128}} | sections
    job = jobs.job(**own)
    return placements(job, bags_of(job, [9]))[0]


def test_a_table_that_sends_more_than_a_rank_does_on_average_is_cut() -> None:
    assert [one_wide(count) for count in (1, 2, 3, 4, 8)] == [
        ["rows"],
        ["columns:2"],
        ["columns:4"],
        ["columns:4"],
        ["columns:4"],  # of 16 columns, although a rank sends less on average
    ]


@pytest.mark.parametrize(
    "whole",
    [
        {"tables": [wide(linear=True)]},
        {"optimizer": {"sparse": {"kind": "rowwise_adagrad", "lr": 0.1}}},
        {"optimizer": {"sparse": {"kind": "sgd", "lr": 0.1, "clip_rows": 1.0}}},
        {"cache": {"capacity": "1000 rows"}},
        {"cache": {"capacity": "10MB", "groups": {"fp32_d64_sgd": "1MB"}}},
    ],
    ids=["linear", "a state for a row", "clip_rows", "a capacity in rows", "capacities of groups"],
)
def test_a_table_is_not_cut_where_rows_are_needed_or_counted_whole(whole: dict[str, Any]) -> None:
    assert one_wide(2) == ["columns:2"]
    assert one_wide(2, **whole)[0] in {"rows", "table"}


def test_possible_groups_are_those_of_every_choice() -> None:
    own = [wide(), jobs.table("t", 10, 48, placement="auto"), jobs.table("u", 10, 8, placement="columns:2")]
    names = [group.name for group in possible_groups(jobs.job(tables=own, ranks={"count": 2}))]
    assert sorted(names) == [f"fp32_d{dim}_sgd" for dim in (16, 24, 32, 48, 4, 64)]


def test_possible_groups_have_a_width_once_for_each_pooling_that_a_choice_gives_it() -> None:
    tables = [wide(pooling="mean"), jobs.table("t", 10, 32, placement="auto")]
    groups = possible_groups(jobs.job(tables=tables, ranks={"count": 2}))
    poolings = [{table.pooling for table in group.tables} for group in groups if group.embedding_dim == 32]
    assert poolings == [{"sum"}, {"mean"}]


def test_long_bags_are_pooled_and_short_ones_are_not() -> None:
    job = auto_job(8, 2)
    assert placed(job, bags_of(job, [9, 1, 9, 1, 1, 9, 9, 1])) == [
        "table" if length == 9 else "rows" for length in (9, 1, 9, 1, 1, 9, 9, 1)
    ]


def test_equal_tables_are_pooled_although_the_first_ones_alone_make_their_owners_busier() -> None:
    job = auto_job(48, 8)
    batches = bags_of(job, [4] * 48)
    found, traffic = placements(job, batches)
    rows: list[Placement] = ["rows"] * 47
    assert traffic.busiest(["table", *rows]) > traffic.busiest(["rows", *rows])
    assert found.count("table") == 48


def memory_of_ranks(job: Job, placed: Sequence[Placement]) -> list[int]:
    """Bytes of all rows of each rank, piece by piece."""
    count = job.ranks.count
    held = [0] * count
    for group in group_specs(with_placements(job, placed)):
        for table in group.tables:
            nbytes = table.num_embeddings * group.record_bytes
            owner = owner_of(table, count)
            for rank in range(count) if owner is None else [owner]:
                held[rank] += -(-nbytes // count) if owner is None else nbytes
    return held


@pytest.mark.parametrize("seed", range(12))
def test_auto_places_tables_within_the_memory_of_a_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, rows = int(rng.choice([2, 3, 4])), 10 ** rng.integers(3, 7, 6)
    tables = [
        jobs.table(f"t{i}", int(n), int(rng.choice([16, 32, 64])), placement="rows" if i == seed else "auto")
        for i, n in enumerate(rows)
    ]
    job = jobs.job(tables=tables, ranks={"count": count}, data={"batch_size": 32})
    batches = bags_of(job, rng.integers(1, 12, 6).tolist(), size=32, rows=int(rows.min()))
    free, traffic = placements(job, batches)
    by_rows = memory_of_ranks(job, ["rows"] * 6)
    for share in (0.5, 1.0, 1.1, 1.5, 4.0):
        memory = int(share * max(by_rows))
        limited = jobs.job(tables=tables, ranks={"count": count, "memory": memory}, data={"batch_size": 32})
        found, counts = placements(limited, batches)
        held = memory_of_ranks(limited, found)
        assert counts.row_memory(found).tolist() == held
        said = short_of_memory(limited, with_placements(limited, found), partial(counted, limited, batches))
        assert max(held) <= max(memory, max(by_rows)), "no rank has more than by rows, unless there is room"
        if max(held) > memory:
            numbers = "ranks.memory", memory, f"rank {held.index(max(held))}", human_bytes(max(held))
            assert re.search(facts(*numbers), said)
        elif max(memory_of_ranks(job, free)) <= memory:
            assert (found, said) == (free, "")
        else:
            assert traffic.busiest(found) <= traffic.busiest(["rows"] * 6)
            left = [f"t{i}" for i, way in enumerate(found) if way == "rows" != free[i]]
            most = human_bytes(max(memory_of_ranks(job, free)))
            assert re.search(facts("ranks.memory", memory, *left[:3], most), said) if left else said == ""


def test_the_memory_of_a_rank_is_refused_with_a_tier() -> None:
    tier = {"kind": "tiered", "memory": "1GiB"}
    with pytest.raises(ConfigError, match=facts("ranks.memory", "store.memory", "1GiB")):
        jobs.job(ranks={"count": 2, "memory": "2GiB"}, store=tier)


def test_a_table_that_makes_its_owner_the_busiest_rank_stays_rows() -> None:
    job = auto_job(1, 8)
    batches = bags_of(job, [3])
    assert placed(job, batches) == ["rows"]
    assert counted(job, batches).gains()[0] > 0


def test_auto_moves_no_table_that_the_job_places() -> None:
    own = [jobs.table(f"t{i}", 10**6, 16, placement=way) for i, way in enumerate(("rows", "table", "auto", "auto"))]
    job = jobs.job(tables=own, ranks={"count": 2}, data={"batch_size": 128})
    assert placed(job, bags_of(job, [9, 1, 9, 1])) == ["rows", "table", "table", "rows"]


def test_evaluations_count_only_where_nothing_trains() -> None:
    job = auto_job(4, 2)
    train, eval_ = bags_of(job, [1] * 4), bags_of(job, [9] * 4)
    evals = schedule([own.batch for own in eval_], ["eval"] * len(eval_))
    assert placed(job, [*train, *evals]) == ["rows"] * 4
    assert placed(job, evals) == ["table"] * 4


def test_batches_after_the_first_32_change_nothing() -> None:
    job = auto_job(2, 2)
    short, long = bags_of(job, [1, 1], steps=32, size=32), bags_of(job, [9, 9], steps=4, size=32)
    assert placed(job, [*short, *long]) == ["rows", "rows"]


def checkpoint(job: Job, points: tuple[tuple[int, ...], ...], num_shards: int) -> Manifest:
    layers = (RowLayer(kind="base", num_rows=0, files=()),)
    return Manifest(
        version=MANIFEST_VERSION,
        run_id="0123456789ab",
        position=Position(step=4, train_step=4),
        finished=False,
        reason="",
        job=job.content(),
        trained_on=None,
        shards=(ShardLayers(layers=layers),) * num_shards,
        points=points,
        dense=None,
    )


def test_a_run_keeps_what_it_has_chosen_until_ranks_or_the_job_file_change() -> None:
    job = auto_job(2, 2)
    batches = bags_of(job, [9, 1])

    def after(newest: Manifest | None, job: Job = job) -> list[str]:
        return [table.placement for table in settled(job, newest, partial(counted, job, batches)).tables]

    assert after(None) == ["table", "rows"]
    assert after(checkpoint(job, ((), (7,)), 2)) == ["rows", "table"]
    assert after(checkpoint(job, (), 2)) == ["rows", "rows"]
    assert after(checkpoint(job, ((), (7,)), 4)) == ["table", "rows"]
    assert after(checkpoint(auto_job(2, 2, placement="rows"), (), 2)) == ["table", "rows"]
    assert after(None, auto_job(2, 1)) == ["rows", "rows"], "a trainer gets no placement that is left to choose"
    limited = jobs.job(tables=job.content()["tables"], ranks={"count": 2, "memory": 10**12}, data={"batch_size": 128})
    assert after(checkpoint(job, ((), (7,)), 2), limited) == ["table", "rows"], "another memory chooses again"
    fixed = with_placements(job, ["rows", "table"])
    assert after(checkpoint(job, ((7,), ()), 2), fixed) == ["rows", "table"]


def test_pieces_are_kept_until_the_cache_is_set_so_that_none_are_made() -> None:
    tables = [wide()]
    job = jobs.job(tables=tables, ranks={"count": 2}, data={"batch_size": 128})
    newest, batches = checkpoint(job, ((7, 8),), 2), bags_of(job, [9])
    assert settled(job, newest, partial(counted, job, batches)).tables[0].placement == "columns:2"
    for cache in ({"capacity": "1000 rows"}, {"capacity": "10MB", "groups": {"fp32_d64_sgd": "1MB"}}):
        changed = jobs.job(tables=tables, ranks={"count": 2}, data={"batch_size": 128}, cache=cache)
        assert settled(changed, newest, partial(counted, changed, batches)).tables[0].placement in {"rows", "table"}


def test_rates_of_a_host_cover_the_groups_that_auto_makes() -> None:
    job = jobs.job(tables=[wide()], ranks={"count": 2}, data={"batch_size": 128})
    cut = settled(job, None, partial(counted, job, bags_of(job, [9])))
    assert cut.tables[0].placement == "columns:2"
    assert {f"read {group.name}" for group in group_specs(cut)} <= host_rates(job).keys()
