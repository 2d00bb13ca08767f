"""What a plan needs is in memory in time, however late rows come home, while most rows are cold."""

from collections import deque
from functools import partial

import numpy as np
import pytest

from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.run.sizing import job_levels, sizes, tier_rows
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.protocol.plan import StepPlan
from tests.support import jobs
from tests.support.tiers import check_tier, tiered

BATCH_SIZE, NUM_STEPS, DEVICE_ROWS = 64, 120, 800
RECORD_BYTES = 16


def trained(memory_rows: int, *, with_reserve: bool) -> TieredStore:
    """Carries out the plans of a job like the demo, two epochs. Rows come home as late as the pipeline allows."""
    data = {"batch_size": BATCH_SIZE, "epochs": 2, "synthetic": {"preset": "criteo-kaggle", "scale": 0.02}}
    job = jobs.job(
        data=data | {"synthetic": data["synthetic"] | {"samples": BATCH_SIZE * NUM_STEPS // 2}},  # type: ignore[operator]
        tables=None,
        tables_from={"embedding_dim": 4},
        cache={"capacity": f"{DEVICE_ROWS} rows"},
        store={"kind": "tiered", "memory": f"{memory_rows} rows"},
    )
    groups, depth = group_specs(job), job.lookahead.depth
    batches = list(schedule(job, open_reader(job), None))
    measured = batches[:MEASURED_BATCHES]
    touched = measure(groups, measured)
    slots = slots_of(job, groups, touched)
    levels = job_levels(job, groups, touched, slots, partial(sizes, job, groups, measured, depth))
    assert levels == (slots, (memory_rows,))
    planner = job_planner(job, groups, levels, measured)
    [num_rows] = tier_rows(job, groups, touched, levels[1]) if with_reserve else levels[1]
    store = tiered(groups[0], num_rows)
    plans: deque[StepPlan] = deque()
    while planner.wants_batch or planner.ready():
        if planner.wants_batch:
            planner.add(batches.pop(0)) if batches else planner.end()
            continue
        plans.extend(planner.plan().steps)
        store.stage(plans[-1].step, plans[-1].groups[0])
        if len(plans) > 3 * depth + 3:
            write_back(store, plans.popleft())
        while store.advance(plans[0].step - 1 if plans[0].step else None):
            pass
        if len(plans) > depth + 1:
            fetch(store, plans[-depth - 2])
    check_tier(store)
    return store


def fetch(store: TieredStore, plan: StepPlan) -> None:
    [moves] = plan.groups
    finish(store.read(moves.fetch_keys, np.empty((len(moves.fetch_keys), RECORD_BYTES), np.uint8)))


def write_back(store: TieredStore, plan: StepPlan) -> None:
    keys = plan.groups[0].evict_keys[: plan.groups[0].num_dirty]
    finish(store.write(keys, np.ones((len(keys), RECORD_BYTES), np.uint8)))


@pytest.mark.parametrize("memory_rows", [DEVICE_ROWS, 1200])
def test_no_row_is_late_with_a_memory_of_less_than_a_tenth(memory_rows: int) -> None:
    store = trained(memory_rows, with_reserve=True)
    counts = store.counts()
    assert memory_rows < 0.1 * store.numbers.count
    assert counts.loaded > 2 * memory_rows, "rows did not come back from the cold tier"
    assert counts.spilled > 2 * memory_rows
    assert (counts.late, counts.cold_reads) == (0, 0)


def test_without_room_for_rows_that_wait_to_leave_some_are_late() -> None:
    """So the test above would notice."""
    assert trained(DEVICE_ROWS, with_reserve=False).counts().late > 0
