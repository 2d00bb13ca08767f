"""Rows, ring bytes and slots, counted where they move, step by step, are those that the planner says must move."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import pytest
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import (
    ARRAY_ALIGNMENT,
    BarrierPlan,
    Piece,
    StepPlan,
    barrier_stamp,
    cut,
    plan_stamp,
    step_block,
)
from rowcast.protocol.transport.ring import RingWriter
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.system.counting import Traffic, count_traffic

SMALL_RING = 24 * 1024  # plans take several pieces
MOST_PIECES = 8


@dataclass(frozen=True)
class Alone:
    """What the planner says without anything around it."""

    batches: list[ScheduledBatch]
    plans: list[StepPlan]
    barrier: BarrierPlan
    groups: tuple[GroupSpec, ...]

    def bytes_to_device(self, plan: StepPlan) -> int:
        return sum(
            len(group.fetch_keys) * spec.record_bytes for group, spec in zip(plan.groups, self.groups, strict=True)
        )

    def bytes_from_device(self, plan: StepPlan) -> int:
        return sum(group.num_dirty * spec.record_bytes for group, spec in zip(plan.groups, self.groups, strict=True))


def plan_alone(job: Job, batches: Sequence[ScheduledBatch], slots: tuple[int, ...]) -> Alone:
    groups = group_specs(job)
    planner = job_planner(job, groups, [slots], batches[:MEASURED_BATCHES])
    plans = list[StepPlan]()
    for batch in batches:
        planner.add(batch)
        while planner.ready():
            plans.extend(planner.plan().steps)
    planner.end()
    while planner.ready():
        plans.extend(planner.plan().steps)
    return Alone(list(batches), plans, planner.barrier("end of data", finished=True), groups)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return count_traffic(monkeypatch)


@functools.cache
def workload(depth: int) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job("adagrad", "multi", depth=depth, horizon=6)
    return job, small_batches(job, "multi", num_steps=14, eval_at=(3, 4, 9))


def assert_moved_as_planned(traffic: Traffic, alone: Alone) -> None:
    fetch, back = traffic.rings
    gaps = len(alone.groups) * MOST_PIECES * ARRAY_ALIGNMENT  # after a group's victims, up to the next aligned byte
    assert not fetch.waiting, "rows were read that no piece carried"
    assert not back.waiting, "victims were copied that no piece carried"
    for batch, plan in zip(alone.batches, alone.plans, strict=True):
        stamp = plan_stamp(plan.step, 0) >> 20
        assert sorted(fetch.keys[stamp]) == sorted(key for group in plan.groups for key in group.fetch_keys.tolist())
        assert fetch.row_bytes[stamp] == alone.bytes_to_device(plan)
        assert fetch.all_bytes[stamp] == sum(
            piece.nbytes for piece in pieces_of(batch, plan, alone.groups, traffic.writers[0])
        )
        assert 0 <= back.row_bytes[stamp] - alone.bytes_from_device(plan) <= gaps
    barrier = barrier_stamp(alone.barrier.barrier, 0) >> 20
    flushed = sum(len(move) * spec.record_bytes for move, spec in zip(alone.barrier.dirty, alone.groups, strict=True))
    assert 0 <= back.row_bytes[barrier] - flushed <= gaps
    assert fetch.row_bytes[barrier] == 0
    assert sum(fetch.row_bytes.values()) == sum(map(alone.bytes_to_device, alone.plans)), (
        "a piece of no plan carried rows"
    )
    assert traffic.gathered_bytes == sum(map(alone.bytes_from_device, alone.plans)) + flushed


def pieces_of(batch: ScheduledBatch, plan: StepPlan, groups: tuple[GroupSpec, ...], ring: RingWriter) -> list[Piece]:
    block = step_block(batch.batch, plan, 0)
    return cut(
        block.nbytes,
        [len(group.fetch_keys) for group in plan.groups],
        [spec.record_bytes for spec in groups],
        ring.max_payload,
    )


def slots_moved(moves: Sequence[tuple[int, list[int]]], records: Tensor) -> list[int]:
    return [slot for address, slots in moves if address == records.data_ptr() for slot in slots]


def assert_slots_copied_as_planned(run: InProcessRun, traffic: Traffic, alone: Alone) -> None:
    """Slots in the order in which they were copied: each step's moves in the order of the steps, then the barrier's."""
    for index, records in enumerate(run.records):
        plans = [plan.groups[index] for plan in alone.plans]
        victims = [slot for plan in plans for slot in plan.fetch_slots[: plan.num_dirty].tolist()]
        assert slots_moved(traffic.gathered, records) == victims + alone.barrier.dirty[index].slots.tolist()
        assert slots_moved(traffic.scattered, records) == [slot for plan in plans for slot in plan.fetch_slots.tolist()]
    assert sum(len(slots) for _, slots in traffic.scattered) == sum(
        len(group.fetch_keys) for plan in alone.plans for group in plan.groups
    )


def assert_stored_as_planned(traffic: Traffic, alone: Alone, *, late: bool) -> None:
    """Plan after plan; within one in any order. A `late` store finishes its writes in any order."""
    expected = [
        [key for group in plan.groups for key in group.evict_keys[: group.num_dirty].tolist()] for plan in alone.plans
    ]
    expected[-1] += [key for move in alone.barrier.dirty for key in move.keys.tolist()]
    if late:
        assert sorted(traffic.stored) == sorted(chain(*expected))
        return
    stored = iter(traffic.stored)
    for keys in expected:
        assert sorted(islice(stored, len(keys))) == sorted(keys)
    assert list(stored) == []


@pytest.mark.parametrize("capacity", ["one batch", "more", "everything"])
@pytest.mark.parametrize(
    ("depth", "seed", "ring_bytes"),
    [(1, 0, 2**20), (4, 0, 2**20), (1, 1, SMALL_RING), (4, 1, SMALL_RING), (2, 2, SMALL_RING)],
)
def test_every_step_moves_what_the_planner_alone_gives(
    depth: int, capacity: str, seed: int, ring_bytes: int, traffic: Traffic
) -> None:
    job, batches = workload(depth)
    slots = slots_for(group_specs(job), batches, capacity)
    alone = plan_alone(job, batches, slots)
    how = Settings(slots=slots, ring_bytes=ring_bytes, seed=seed, late_store=seed % 2 == 1, seeded_streams=seed > 0)
    run = InProcessRun(job, batches, how).run()
    assert_moved_as_planned(traffic, alone)
    assert_slots_copied_as_planned(run, traffic, alone)
    assert_stored_as_planned(traffic, alone, late=how.late_store)
    if capacity != "everything":
        assert any(len(group.evict_keys) > group.num_dirty > 0 for plan in alone.plans for group in plan.groups), (
            "no clean victim beside dirty"
        )


@pytest.mark.parametrize("depth", [1, 4])
def test_both_processes_count_what_moved(depth: int, traffic: Traffic) -> None:
    job, batches = workload(depth)
    slots = slots_for(group_specs(job), batches, "one batch")
    run = InProcessRun(job, batches, Settings(slots=slots, seed=depth)).run()
    fetch, _ = traffic.rings
    for counters in (run.prefetcher.counters, run.trainer.counters):
        assert counters.total("row_bytes_to_device") == sum(fetch.row_bytes.values())
        assert counters.total("row_bytes_from_device") == traffic.gathered_bytes
        assert counters.total("rows_fetched") == sum(map(len, fetch.keys.values()))
        assert counters.total("rows_written_back") == len(traffic.stored)
        assert counters.total("rows_evicted") == sum(
            len(group.evict_keys) for plan in run.plans for group in plan.groups
        )


def touched(job: Job, batches: Sequence[ScheduledBatch], kind: str) -> set[int]:
    keys: set[int] = set()
    by_feature = [table for table in job.tables for _ in table.features]
    for scheduled in batches:
        batch = scheduled.batch
        assert batch.offsets is not None
        bounds = batch.offsets[:: batch.size]
        for feature, table in enumerate(by_feature):
            ids = batch.ids[bounds[feature] : bounds[feature + 1]]
            keys |= set(make_keys(job.tables.index(table), ids).tolist()) if scheduled.kind == kind else set()
    return keys


@pytest.mark.parametrize("capacity", ["one batch", "everything"])
def test_a_row_that_only_evaluations_touch_is_never_stored(capacity: str, traffic: Traffic) -> None:
    job, batches = workload(2)
    InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, capacity))).run()
    trained, evaluated = touched(job, batches, "train"), touched(job, batches, "eval")
    assert len(evaluated - trained) > 50, "every evaluated row is trained too"
    assert set(traffic.stored) == trained
