"""The tightest cases: plans larger than half a ring, a cache of one batch, a stop at any time, a batch too large."""

import copy
import dataclasses
import functools
import random
import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.file import parse_job
from rowcast.job.schema import MIN_RING_BYTES, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.stores.store import finish
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import PlanReady, StopRequest
from rowcast.runtime.errors import ConfigError
from tests.support.batches import NUM_DENSE, distinct_rows, make_batch, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.planner_integrity import check_planner

LARGE_BATCH = 5_000
LARGE_TABLES = (("narrow", 24_000, 8, ["f0", "f1"]), ("wide", 12_000, 24, ["f2"]))
DEPTH = 4
SMALL_RING = 24 * 1024


@functools.cache
def large_workload() -> tuple[Job, list[ScheduledBatch], list[float], dict[str, Tensor]]:
    """Weighted bags of up to three look-ups: the arrays of a plan alone take several pieces, and so do its rows."""
    tables = [
        {"name": name, "num_embeddings": rows, "embedding_dim": dim, "features": features, "init": "normal:0.1"}
        for name, rows, dim, features in LARGE_TABLES
    ]
    job = parse_job(msgspec.to_builtins(small_job("adagrad", "weighted", depth=DEPTH, horizon=2)) | {"tables": tables})
    rng = np.random.default_rng(8)
    kinds = ["train", "train", "eval", "train", "train", "train", "train"]
    batches = [
        ScheduledBatch.at(
            step=step,
            kind="eval" if kind == "eval" else "train",
            train_step=kinds[:step].count("train"),
            epoch=0,
            batch=make_batch(job, "weighted", LARGE_BATCH, rng),
        )
        for step, kind in enumerate(kinds)
    ]
    return job, batches, *run_plain_loop(job, start_state(job, NUM_DENSE), batches)


class Pieces:
    """What each plan's pieces carried."""

    def __init__(self, run: InProcessRun) -> None:
        self.with_arrays: dict[int, int] = {}
        self.with_rows: dict[int, int] = {}
        self.payload_bytes: dict[int, int] = {}
        self._cache = run.trainer.cache
        run.trainer.conversation.listen({PlanReady: self._accept})

    def _accept(self, message: PlanReady) -> None:
        assert message.payload is not None
        for counts, carried in ((self.with_arrays, message.arrays is not None), (self.with_rows, bool(message.rows))):
            counts[message.plan] = counts.get(message.plan, 0) + carried
        self.payload_bytes[message.plan] = self.payload_bytes.get(message.plan, 0) + message.payload.nbytes
        self._cache.accept(message)


@pytest.mark.parametrize(("seed", "seeded_streams"), [(0, False), (1, True), (2, True), (3, True)])
def test_plans_larger_than_the_ring_pass_a_cache_of_one_batch_with_a_late_store(
    seed: int, seeded_streams: bool
) -> None:
    job, batches, losses, end = large_workload()
    slots = slots_for(group_specs(job), batches, "one batch")
    how = Settings(slots=slots, ring_bytes=MIN_RING_BYTES, seed=seed, late_store=True, seeded_streams=seeded_streams)
    run = InProcessRun(job, batches, how)
    pieces = Pieces(run)
    run.run()
    assert_equal_bits(run, losses, end)
    assert sum(group.num_dirty for plan in run.plans for group in plan.groups) > 0, "no dirty row was evicted"
    assert any(after is not None for after in run.after_plans), "no evicted row was fetched again under after_plan"
    assert min(pieces.with_arrays.values()) >= 2, "a plan's arrays fit one piece"
    assert min(pieces.with_rows.values()) >= 2, "a plan's rows fit one piece"
    assert max(pieces.payload_bytes.values()) > MIN_RING_BYTES, "every plan fits the ring"


# a stop at any moment


@functools.cache
def small_workload(depth: int) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job("rowwise_adagrad", "multi", depth=depth, horizon=5)
    return job, small_batches(job, "multi", num_steps=16, eval_at=(3, 4, 11))


@functools.cache
def plain_after(depth: int, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The plain loop over the first steps only."""
    job, batches = small_workload(depth)
    return run_plain_loop(job, start_state(job, NUM_DENSE), batches[:num_steps])


def assert_slots_hold_the_stores_rows(run: InProcessRun) -> None:
    """Every row that is resident after the last plan's moves has the same bytes in its slot and in the store."""
    for index, (records, store) in enumerate(zip(run.records, run.tables, strict=True)):
        resident: dict[int, int] = {}
        for plan in run.plans:
            group = plan.groups[index]
            resident |= dict(zip(group.fetch_slots.tolist(), group.fetch_keys.tolist(), strict=True))
        slots = np.array(sorted(resident, key=lambda slot: resident[slot]), np.int64)
        keys = np.array(sorted(resident.values()), np.int64)
        home = np.empty((len(keys), run.groups[index].record_bytes), np.uint8)
        finish(store.read(keys, home))
        for part in run.groups[index].parts:
            assert records.numpy().view(np.uint8)[slots, part.bytes].tobytes() == home[:, part.bytes].tobytes()


def stop(run: InProcessRun, by: str) -> None:
    if by == "prefetcher":
        run.prefetcher.stop("a test")
    else:
        run.trainer.conversation.send(StopRequest(reason="a test"))


@pytest.mark.parametrize("by", ["prefetcher", "trainer"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_at_any_moment_brings_home_exactly_the_steps_that_were_planned(depth: int, by: str) -> None:
    job, batches = small_workload(depth)
    slots = slots_for(group_specs(job), batches, "one batch")
    lengths = set()
    for seed in range(12):
        settings = Settings(slots=slots, ring_bytes=(SMALL_RING, 2**20)[seed % 2], seed=seed, late_store=seed % 3 == 0)
        run = InProcessRun(job, batches, settings)
        advances = iter(range(random.Random(seed).choice((0, 20, 300, 1500, 4000))))
        run.advance_until(lambda: next(advances, None) is None)  # noqa: B023 - called within this turn
        stop(run, by)
        run.run()
        assert [plan.step for plan in run.plans] == list(range(len(run.plans)))
        assert_equal_bits(run, *plain_after(depth, len(run.plans)))
        assert_slots_hold_the_stores_rows(run)
        lengths.add(len(run.plans))
    assert len(lengths) > 3, f"stops came only after {lengths} steps"
    assert min(lengths) < len(batches), "no run was stopped early"


# E5: all or nothing


def with_a_large_batch(job: Job, batches: Sequence[ScheduledBatch], at: int) -> list[ScheduledBatch]:
    large = make_batch(job, "multi", 400, np.random.default_rng(1))
    return [dataclasses.replace(b, batch=large) if b.step == at else b for b in batches]


@pytest.mark.parametrize("at", [0, 1, 9])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_batch_that_does_not_fit_is_refused_before_anything_changes(depth: int, at: int) -> None:
    job, batches = small_workload(depth)
    groups = group_specs(job)
    slots = slots_for(groups, batches, "one batch")
    batches = with_a_large_batch(job, batches, at)
    run = InProcessRun(job, batches, Settings(slots=slots, seed=at))
    with pytest.raises(ConfigError) as refusal:
        run.run()
    needed = [distinct_rows(group, batches[at].batch) for group in groups]
    refused = next(index for index, rows in enumerate(needed) if rows > slots[index])
    numbers = [int(number) for number in re.findall(r"\d+", str(refusal.value))]
    assert {at, needed[refused], slots[refused], needed[refused] * groups[refused].record_bytes} <= set(numbers), (
        refusal.value
    )
    planner = run.prefetcher.planner
    before = (planner.occupancy, copy.copy(planner.counters))
    check_planner(planner)
    with pytest.raises(ConfigError, match=re.escape(str(refusal.value))):
        planner.plan()
    assert (planner.occupancy, planner.counters) == before
    check_planner(planner)
    assert len(run.plans) == at
    assert run.prefetcher.planning.due.planned_through == (at - 1 if at else None)
