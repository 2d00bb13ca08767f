"""E1 for plans of several steps: whatever `lookahead.bundle` is, a run has the bits and the checkpoints of one without.

Every run has evaluations, which end a plan, and slots for three steps of a plan and as many again."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from tests.support.batches import (
    BAGS,
    BATCH_SIZE,
    NUM_DENSE,
    OPTIMIZERS,
    Bags,
    batches_of_sizes,
    slots_for,
    small_job,
)
from tests.support.broken_source import Where, broken
from tests.support.comparisons import assert_equal_bits, assert_tested_what_it_claims
from tests.support.driver import InProcessRun, Past, Settings, start_state
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("collected", "one_thread")
EVALUATIONS = (7, 8, 9, 20, 31)
BUNDLES = (2, 3, 8)


@functools.cache
def batches(optimizer: str, bags: Bags) -> list[ScheduledBatch]:
    sizes = [BATCH_SIZE // 3] * 34 + [BATCH_SIZE // 4]
    return batches_of_sizes(small_job(optimizer, bags), bags, sizes, eval_at=EVALUATIONS, seed=3)


@functools.cache
def plain(optimizer: str, bags: Bags, parts: int, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    job = small_job(optimizer, bags)
    return run_plain_loop(job, start_state(job, NUM_DENSE), batches(optimizer, bags)[:num_steps], parts)


def settings(
    job: Job, bags: Bags, optimizer: str = "adagrad", seed: int = 0, capacity: str = "nine batches"
) -> Settings:
    return Settings(slots=slots_for(group_specs(job), batches(optimizer, bags), capacity), seed=seed)


@pytest.mark.parametrize("bundle", BUNDLES)
@pytest.mark.parametrize("bags", BAGS)
def test_plans_of_several_steps_train_as_the_plain_loop(bags: Bags, bundle: int) -> None:
    for seed in range(count(2, 20)):
        optimizer = OPTIMIZERS[(seed + bundle) % len(OPTIMIZERS)]
        job = small_job(optimizer, bags, depth=1 + seed % 3, horizon=16, bundle=bundle)
        run = InProcessRun(job, batches(optimizer, bags), settings(job, bags, optimizer, seed)).run()
        assert_equal_bits(run, *plain(optimizer, bags, 1, 35))
        assert len(run.results.evaluations) == 3
        assert len(run.after_plans) < 35 / min(2, bundle - 0.5), "few plans serve several steps"
        assert sum(group.num_dirty for plan in run.plans for group in plan.groups) > 0, "no dirty row was evicted"


def test_a_cache_of_all_rows_has_plans_of_all_steps() -> None:
    job = small_job("adagrad", bundle=8, horizon=16)
    run = InProcessRun(job, batches("adagrad", "single"), settings(job, "single", capacity="everything")).run()
    assert_equal_bits(run, *plain("adagrad", "single", 1, 35))
    # train steps end a plan at multiples of 8, evaluations begin and end one
    assert len(run.after_plans) == len([7, 3, 1, 8, 1, 1, 7, 3, 1, 3])


def test_a_cache_of_one_batch_has_plans_of_one_step() -> None:
    job = small_job("adagrad", bundle=8)
    run = InProcessRun(job, batches("adagrad", "single"), settings(job, "single", capacity="one batch")).run()
    assert_equal_bits(run, *plain("adagrad", "single", 1, 35))
    assert_tested_what_it_claims(run, job)
    assert len(run.after_plans) == 35


@pytest.mark.parametrize("bundle", BUNDLES)
def test_checkpoints_are_made_where_they_are_without_bundles(bundle: int, tmp_path: Path) -> None:
    found = []
    for own in (1, bundle):
        job = small_job("adagrad", bundle=own, horizon=16, checkpoint={"every": 5, "keep": 9})
        (tmp_path / str(own)).mkdir()
        checkpoints = Checkpoints(tmp_path / str(own), Disk())
        past = Past(checkpoints=checkpoints, newest=None)
        run = InProcessRun(job, batches("adagrad", "single"), settings(job, "single"), past).run()
        assert_equal_bits(run, *plain("adagrad", "single", 1, 35))
        found.append(sorted(folder.name for folder in checkpoints.root.iterdir()))
    assert found[0] == found[1]
    assert len(found[0]) > 5


@pytest.mark.parametrize(("before", "after"), [(3, 8), (8, 1), (1, 8)])
def test_a_stopped_run_goes_on_with_any_bundle(before: int, after: int, tmp_path: Path) -> None:
    own = batches("adagrad", "single")
    for seed in range(count(4, 30)):
        (tmp_path / str(seed)).mkdir()
        checkpoints = Checkpoints(tmp_path / str(seed), Disk())
        job = small_job("adagrad", bundle=before, horizon=16)
        first = InProcessRun(job, own, settings(job, "single", seed=seed), Past(checkpoints=checkpoints, newest=None))
        last = random.Random(seed).randrange(30)
        first.prefetcher.planning.on_plan = lambda plan, run=first, last=last: (  # type: ignore[misc]
            run.prefetcher.stop("test") if plan.steps[-1].step >= last else None
        )
        first.run()
        assert first.writer is not None
        newest = first.writer.newest
        assert newest is not None
        assert last < newest.position.step <= last + before
        job = small_job("adagrad", bundle=after, horizon=16)
        rest = InProcessRun(
            job, own, settings(job, "single", seed=seed), Past(checkpoints=checkpoints, newest=newest)
        ).run()
        losses, _ = plain("adagrad", "single", 1, 35)
        assert np.array_equal(rest.results.losses, np.array(losses, np.float32))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["ids", "dense"])
@pytest.mark.parametrize("step", [1, 6, 8, 13, 34])
def test_a_plan_ends_before_a_fault(step: int, where: Where, ranks: int, tmp_path: Path) -> None:
    job, own = small_job("adagrad", bundle=8, horizon=16), batches("adagrad", "single")
    pasts = [Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=None) for _ in range(ranks)]
    run = RankedRun(job, own, settings(job, "single"), ranks=ranks, parts=ranks, pasts=pasts)
    for pair in run.pairs:
        broken(pair, own, step, where)
    with pytest.raises(DataError, match="row 7 is bad"):
        run.run()
    newest = [pair.writer.newest for pair in run.pairs if pair.writer is not None and pair.writer.newest is not None]
    assert newest, "no rank has made its checkpoint durable before it ended"
    assert newest[0].position.step == step


def test_signals_at_random_instants_stop_all_ranks_after_the_same_step() -> None:
    """Their shards differ in size, and so do their plans."""
    apart = 0
    for seed in range(count(1, 60)):
        chance, bundle = random.Random(seed), BUNDLES[seed % 3]
        job = small_job("adagrad", "multi", depth=1 + seed % 2, horizon=4, bundle=bundle)
        how = settings(job, "multi", seed=seed, capacity="two batches")
        run = RankedRun(job, batches("adagrad", "multi"), how, ranks=3, parts=3)
        pair, begun = chance.choice(run.pairs), chance.randrange(-1, 20)
        ask = (
            functools.partial(pair.stop.ask, "SIGTERM")
            if seed % 2
            else functools.partial(pair.prefetcher.stop, "SIGTERM")
        )
        run.when(
            lambda loop=pair.trainer.loop, begun=begun, chance=chance: (  # type: ignore[misc]
                begun <= (-1 if loop.step_begun is None else loop.step_begun) and chance.random() < 0.001
            ),
            ask,
        )
        run.run()
        [last] = {own.trainer.loop.step_done for own in run.pairs}
        assert last is not None
        assert_equal_bits(run, *plain("adagrad", "multi", 3, last + 1))
        apart += len({len(own.after_plans) for own in run.pairs}) > 1
    assert apart, "all ranks have had the same plans"
