"""E1: whatever the horizon, depth, capacity, ring or store, training gives the plain loop's bits."""

import functools
import itertools

import pytest
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import EVICTION_POLICIES, Policy
from rowcast.job.tables import group_specs
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.protocol.batch import ScheduledBatch
from tests.support.batches import BAGS, NUM_DENSE, OPTIMIZERS, Bags, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, assert_tested_what_it_claims
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.repeats import count
from tests.support.tiers import check_tier

pytestmark = pytest.mark.usefixtures("collected")
CAPACITIES = ("one batch", "more", "everything")


@functools.cache
def reference(optimizer: str, bags: Bags) -> tuple[list[float], dict[str, Tensor], list[ScheduledBatch]]:
    job = small_job(optimizer, bags)
    batches = small_batches(job, bags)
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    return losses, end, batches


Way = tuple[int, str, bool, int]  # horizon, capacity, late store, ring bytes


def some_ways(share: int) -> list[tuple[int, Way]]:
    """With their numbers: a fifth of all, in turn, so that each is tried with a fifth of the optimizers, bags and
    depths. `make soak` has all, `make quick` a ninth."""
    ways = list(enumerate(itertools.product((1, 8, 64), CAPACITIES, (False, True), (2**20, 2**24))))
    step = count(5, 1, quick=9)
    return ways[share % step :: step]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_way_to_train_gives_the_bits_of_the_plain_loop(optimizer: str, bags: Bags, depth: int) -> None:
    losses, end, batches = reference(optimizer, bags)
    share = OPTIMIZERS.index(optimizer) + BAGS.index(bags) + depth.bit_length()
    for seed, (horizon, capacity, late_store, ring_bytes) in some_ways(share):
        job = small_job(optimizer, bags, depth=depth, horizon=horizon)
        slots = slots_for(group_specs(job), batches, capacity)
        run = InProcessRun(
            job, batches, Settings(slots=slots, ring_bytes=ring_bytes, seed=seed, late_store=late_store)
        ).run()
        assert_equal_bits(run, losses, end)
        assert len(run.results.evaluations) == 2
        if capacity != "everything":
            assert_tested_what_it_claims(run, job)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("bags", ["single apart", "weighted apart"])
def test_unpooled_look_ups_one_each_or_weighted_give_the_bits_of_the_plain_loop(optimizer: str, bags: Bags) -> None:
    losses, end, batches = reference(optimizer, bags)
    for seed, (depth, capacity) in enumerate(itertools.product((1, 4), CAPACITIES)):
        job = small_job(optimizer, bags, depth=depth)
        slots = slots_for(group_specs(job), batches, capacity)
        run = InProcessRun(
            job, batches, Settings(slots=slots, ring_bytes=2**20, seed=seed, late_store=bool(seed % 2))
        ).run()
        assert_equal_bits(run, losses, end)
        if capacity != "everything":
            assert_tested_what_it_claims(run, job)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("optimizer", "bags"), [("adagrad", "multi"), ("adam", "empty"), ("sgd", "weighted apart")])
def test_rows_that_come_and_go_between_memory_and_a_cold_tier_give_the_bits_of_the_plain_loop(
    optimizer: str, bags: Bags, depth: int
) -> None:
    losses, end, batches = reference(optimizer, bags)
    for seed, (spare, reserve, horizon) in enumerate([(0, 0, 1), (0, 500, 8), (100, 50, 64), (20, 2000, 8)]):
        job = small_job(optimizer, bags, depth=depth, horizon=horizon)
        slots = slots_for(group_specs(job), batches, "more")
        tier_slots = tuple(n + spare for n in slots)
        run = InProcessRun(
            job,
            batches,
            Settings(
                slots=slots,
                tier_slots=tier_slots,
                tier_reserve=reserve,
                seed=seed,
                late_store=bool(seed % 2),
            ),
        ).run()
        stores = [store for store in run.plain_stores if isinstance(store, TieredStore)]
        assert len(stores) == 2
        for store in stores:
            check_tier(store)
            assert store.counts().spilled > 0, "no row has left the memory"
            assert store.counts().loaded > 0, "no row has come back to it"
        assert_equal_bits(run, losses, end)
        assert_tested_what_it_claims(run, job)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_gives_the_bits_of_the_plain_loop(policy: Policy) -> None:
    losses, end, batches = reference("adagrad", "multi")
    for seed, (horizon, depth) in enumerate([(1, 1), (8, 4), ("auto", 2)]):
        job = small_job("adagrad", "multi", depth=depth, cache={"policy": policy}, lookahead={"horizon": horizon})
        groups = group_specs(job)
        slots = slots_for(groups, batches, "one batch")
        run = InProcessRun(job, batches, Settings(slots=slots, seed=seed)).run()
        assert_equal_bits(run, losses, end)
        assert_tested_what_it_claims(run, job)
