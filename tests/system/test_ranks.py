"""However many ranks share the parts of each batch, training has the bits of the plain loop in parts.

Pairs of prefetcher and trainer run in one thread, with the collectives of `tests/support/collectives.py`, which copy at
any time that the waits between streams leave open.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job, Optimizer
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.device.streams import RankWait
from tests.support import jobs
from tests.support.batches import (
    BAGS,
    NUM_DENSE,
    OPTIMIZERS,
    PLACED,
    SEVERAL_LABELS,
    Bags,
    batches_of_sizes,
    placed,
    slots_for,
    small_batches,
    small_job,
)
from tests.support.comparisons import Plain, assert_equal_bits, differing
from tests.support.driver import Settings, StuckError, start_state
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("one_thread", "collected")
ODD = "tests.system.odd_models:"
CLIPPED = {
    "sparse": {"kind": "adagrad", "lr": 0.05, "clip_rows": 1e-3},
    "dense": {"kind": "adam", "lr": 0.01, "clip_norm": 0.05, "weight_decay": 0.1},
}
MIXED = {"dtypes": ("fp32", "bf16", "fp16", "bf16")}
DECAYING = {  # a weight without a gradient stays as it is
    "sparse": {"kind": "adagrad", "lr": 0.05},
    "dense": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "rounded rows": MIXED,
    "master rows": {**MIXED, "master": True},
    "clipped": {"settings": CLIPPED},
    "bf16": {"model": {"precision": "bf16"}},
    "dropout": {"model": {"kind": f"{ODD}dropout_model"}},
    "tables that the model ignores": {"model": {"kind": f"{ODD}dense_only_model"}},
    "weights that few parts use": {"model": {"kind": f"{ODD}choosy_model"}, "settings": DECAYING},
    "two towers, whose batch is a part": {
        "model": {
            **{"kind": "two-tower", "item_features": ["f2", "f3"], "user_mlp": [6, 5], "item_mlp": [5]},
            **{"log_frequency": 1},
        }
    },
    "attention over histories": {
        "tables": [
            jobs.table("item", 400, 5, "item", "bought", pooling="none"),
            jobs.table("user", 300, 8),
        ],
        "model": {
            **{"kind": "din", "targets": {"bought": "item"}, "activation": "prelu", "history": 2},
            **{"attention_mlp": [4], "top_mlp": [6, 1]},
        },
    },
    "a loss of its own": {"model": {"kind": f"{ODD}hinge_model"}},
}


def assert_same(run: RankedRun, plain: Plain) -> None:
    assert_equal_bits(run, *plain)
    run.assert_each_row_stays_with_its_owner()


@functools.cache
def workload(optimizer: str, bags: Bags) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job(optimizer, bags)
    return job, small_batches(job, bags, num_steps=8, eval_at=(3, 6))


@functools.cache
def plain(optimizer: str, bags: Bags, parts: int) -> Plain:
    job, batches = workload(optimizer, bags)
    return run_plain_loop(job, start_state(job, NUM_DENSE), batches, parts)


def ranked(
    job: Job, batches: list[ScheduledBatch], ranks: int, parts: int, capacity: str = "one batch", **more: Any
) -> RankedRun:
    settings = Settings(slots=slots_for(group_specs(job), batches, capacity), **more)
    return RankedRun(job, batches, settings, ranks=ranks, parts=parts).run()


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_ranks_gives_the_bits_of_the_plain_loop_in_eight_parts(optimizer: str, bags: Bags) -> None:
    job, batches = workload(optimizer, bags)
    turn = OPTIMIZERS.index(optimizer) + BAGS.index(bags)
    for ranks in (1, 2, 4, 8)[turn % (step := count(4, 1)) :: step]:
        run = ranked(job, batches, ranks, 8, late_store=turn % 3 == 0, seed=turn)
        assert_same(run, plain(optimizer, bags, 8))
        assert len(run.pairs[0].results.evaluations) == 2


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 3), (3, 3), (3, 6), (3, 12), (5, 5), (7, 7)])
def test_numbers_that_are_no_powers_of_two_have_the_bits_of_as_many_parts(ranks: int, parts: int) -> None:
    job, batches = workload("adagrad", "mean")
    assert_same(ranked(job, batches, ranks, parts, seed=ranks), plain("adagrad", "mean", parts))


def test_other_parts_have_other_bits() -> None:
    """So that equal bits say something: two ranks of one part each are not two of four."""
    ends = [plain("adagrad", "mean", parts)[1] for parts in (1, 2, 3, 8)]
    for some, others in itertools.combinations(ends, 2):
        assert differing(some, others)


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_the_bits_of_the_plain_loop_with_the_same_setting(case: str) -> None:
    sections = dict(CASES[case])
    settings = sections.pop("settings", None)
    job = small_job("adagrad", "multi", **sections)
    if settings is not None:
        job = msgspec.structs.replace(job, optimizer=msgspec.convert(settings, Optimizer))
    batches = small_batches(job, "multi", num_steps=5, eval_at=(2,))
    expected = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 4)
    for ranks in (1, 4):
        assert_same(ranked(job, batches, ranks, 4, seed=ranks), expected)


def test_batches_smaller_than_the_ranks_leave_some_without_samples() -> None:
    job = small_job("adam", "empty")
    batches = batches_of_sizes(job, "empty", (64, 5, 3, 1, 13), eval_at=(2,), seed=4)
    expected = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 8)
    for ranks in (2, 8):
        run = ranked(job, batches, ranks, 8, "everything")
        assert_same(run, expected)


def test_several_labels_have_the_same_bits_and_evaluations_on_any_number_of_ranks() -> None:
    """The first evaluation knows no label `buy`, the fourth train batch none at all."""
    job = small_job("adagrad", "multi", **SEVERAL_LABELS)
    batches = small_batches(job, "multi", num_steps=6, eval_at=(2, 5, 7))
    batches[2].batch.labels[:, 1] = batches[4].batch.labels[:] = np.nan
    expected, results = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 4), []
    for ranks in (1, 4):
        run = ranked(job, batches, ranks, 4, "everything", seed=ranks)
        assert_same(run, expected)
        results.append(run.pairs[-1].results.evaluations)
    assert results[0] == results[1]
    assert [task.label for task in results[0][0].tasks] == job.data.columns.labels
    assert results[0][0].tasks[1].auc is None, "no label of the first evaluation is known"
    assert all(task.auc is not None for evaluation in results[0][1:] for task in evaluation.tasks)


# the waits


@functools.cache
def small_steps() -> tuple[Job, list[ScheduledBatch], Plain]:
    """With tables by rows and tables that one rank pools, so that every wait is needed."""
    job = placed(small_job("adagrad", "multi", depth=2, horizon=4), PLACED, 3, 6)
    batches = small_batches(job, "multi", num_steps=4, eval_at=(2, 5, 6))  # a stop after step 5 is in an evaluation
    return job, batches, run_plain_loop(job, start_state(job, NUM_DENSE), batches, 6)


def run_in_three(seed: int, without: RankWait | None = None) -> int:
    """Raises where the result has other bits than the plain loop's, or the run breaks."""
    job, batches, expected = small_steps()
    slots = slots_for(group_specs(job), batches, ("one batch", "two batches")[seed % 2])
    run = RankedRun(job, batches, Settings(slots=slots, seed=seed, without=without), ranks=3, parts=6)
    for pair in run.pairs:
        pair.prefetcher.planning.due.stop(StopRequest(reason="within the evaluation", after_step=5))
    assert_same(run.run(), expected)
    for pair in run.pairs[1:]:
        assert pair.saved == run.pairs[0].saved, "ranks would save other states"
    return run.most_apart


def test_every_order_that_the_waits_allow_gives_the_same_bits() -> None:
    assert max(run_in_three(seed) for seed in range(count(8, 60))) > 0, "the ranks went in step"


@pytest.mark.parametrize("wait", get_args(RankWait))
def test_without_any_one_wait_some_order_gives_wrong_bits(wait: RankWait) -> None:
    for seed in range(20):
        try:
            run_in_three(seed, without=wait)
        except StuckError:
            raise  # leaving out a wait must not block a run
        except (AssertionError, RowcastError, IndexError, RuntimeError):
            return
    pytest.fail(f"20 seeds without the wait {wait!r} gave the right bits: it is not needed, or this test cannot see it")


# what is refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_has_a_gradient_in_some_batches_only_is_refused_by_name(ranks: int) -> None:
    """The first batch has no part that uses it, the second one has; and the other way round."""
    job = small_job("adagrad", "multi", model={"kind": f"{ODD}moody_model"})
    without, using, *rest = small_batches(job, "multi", num_steps=5, eval_at=(2,))
    swapped = [replace(without, batch=using.batch), replace(using, batch=without.batch), *rest]
    for batches, given in (([without, using, *rest], "a gradient"), (swapped, "no gradient")):
        with pytest.raises(ConfigError, match=facts("train step 1", f"sometimes {given}", "several parts or ranks")):
            ranked(job, batches, ranks, 4, "everything")


def test_a_model_with_running_statistics_is_refused() -> None:
    job = small_job("sgd", model={"kind": "tests.system.odd_models:normalized_model"})
    batches = small_batches(job, "single", num_steps=2, eval_at=())
    with pytest.raises(ConfigError, match=r"buffer norm\.\w+"):
        ranked(job, batches, 2, 2, "everything")
