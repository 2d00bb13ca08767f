"""The MTrainS example: figures of each table, by hand and against the moves of a simulation."""

from collections import Counter

import numpy as np
import pytest

from examples.mtrains import table_traffic
from rowcast.analysis.scan import scan
from rowcast.analysis.simulate.moves import planned_moves
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import measure, slots_of
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from tests.support import jobs


def test_tables_ask_of_each_tier_what_their_look_ups_do() -> None:
    tables = [
        jobs.table("t", 2000, 4, "cat_0", "cat_1"),
        jobs.table("bf16", 3000, 4, "cat_2", dtype="bf16"),
        jobs.table("u", 50, 4, "cat_3"),
    ]
    data = {"batch_size": 64, "eval_fraction": 0.1, "synthetic": {"samples": 64 * 60}}
    job = jobs.job(tables=tables, data=data, cache={"capacity": "6KiB"}, lookahead={"horizon": 8, "bundle": 1})
    groups, batches = group_specs(job), list(schedule(job, open_reader(job)))
    first = batches[:32]
    slots = slots_of(job, groups, measure(groups, first))
    levels = [slots, tuple(int(1.4 * n) for n in slots)]
    found = table_traffic(job, first, batches[32:], levels, 20.0)
    assert [table.table for table in found] == ["t", "bf16", "u"]
    for table, (start, end) in zip(found, ((0, 2), (2, 3), (3, 4)), strict=True):
        used, distances, lookups, num_used = dict[int, int](), list[int](), Counter[int](), 0
        for step, batch in enumerate(scheduled.batch for scheduled in batches):
            ids = batch.ids[start * batch.size : end * batch.size].tolist()
            lookups.update(ids)
            for row in set(ids):
                distances += [step - used[row]] if row in used else []
                used[row], num_used = step, num_used + 1
        most = [count for _, count in lookups.most_common()]
        assert table.lookups == sum(most)
        assert table.distinct_rows == len(most)
        assert table.hottest == [sum(most[: -(-len(most) // part)]) / sum(most) for part in (100, 10)]
        assert table.reuse_steps == [sorted(distances)[-(-len(distances) * p // 100) - 1] for p in (50, 90, 99)]
        seconds = len(batches) * 0.02
        assert table.bytes_per_second["device"] == pytest.approx(num_used * table.record_bytes / seconds)
    moves = planned_moves(scan(groups, batches, lambda: None), job_planner(job, groups, levels, first), lambda: None)
    assert moves.tier is not None
    record_bytes = np.array([group.record_bytes for group in groups])
    for tier, rows in (("memory", moves.fetched), ("cold", moves.tier.from_cold)):
        moved = float(rows.sum(axis=0) @ record_bytes)
        assert moved > 0
        assert sum(table.bytes_per_second[tier] for table in found) * seconds == pytest.approx(moved)
