"""E1: whatever the horizon, depth, capacity, ring or store, training gives the plain loop's bits."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from protocol.batch import ScheduledBatch
from protocol.job import Job
from protocol.tables import group_specs
from tests.driver import InProcessRun, Settings, start_state
from tests.workloads import BAGS, NUM_DENSE, OPTIMIZERS, Bags, slots_for, small_batches, small_job

CAPACITIES = ("one batch", "more", "everything")


@functools.cache
def reference(optimizer: str, bags: Bags) -> tuple[list[float], dict[str, Tensor], list[ScheduledBatch]]:
    job = small_job(optimizer, bags)
    batches = small_batches(job, bags)
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    return losses, end, batches


def assert_equal_bits(run: InProcessRun, losses: list[float], end: dict[str, Tensor]) -> None:
    assert np.array(run.results.losses, np.float32).tobytes() == np.array(losses, np.float32).tobytes(), "losses differ"
    state = run.state()
    assert state.keys() == end.keys()
    for name, tensor in end.items():
        assert torch.equal(state[name].view(torch.int32), tensor.contiguous().view(torch.int32)), f"{name} differs"


def assert_tested_what_it_claims(run: InProcessRun, job: Job) -> None:
    """Below full capacity, a run that never evicted a dirty row and brought it back under `after_step` shows nothing."""
    assert sum(group.num_dirty for plan in run.plans for group in plan.groups) > 0, "no dirty row was evicted"
    assert any(plan.after_step is not None for plan in run.plans), "no evicted row was fetched again under after_step"
    if job.lookahead.depth > 1:
        assert run.max_in_flight >= 2, "never two plans in flight"


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_way_to_train_gives_the_bits_of_the_plain_loop(optimizer: str, bags: Bags, depth: int) -> None:
    losses, end, batches = reference(optimizer, bags)
    ways = itertools.product((1, 8, 64), CAPACITIES, (False, True), (2**20, 2**24))
    for seed, (horizon, capacity, late_store, ring_bytes) in enumerate(ways):
        job = small_job(optimizer, bags, depth=depth, horizon=horizon)
        slots = slots_for(group_specs(job), batches, capacity)
        run = InProcessRun(job, batches, Settings(slots=slots, ring_bytes=ring_bytes, seed=seed, late_store=late_store)).run()
        assert_equal_bits(run, losses, end)
        assert len(run.results.evaluations) == 2
        if capacity != "everything":
            assert_tested_what_it_claims(run, job)
