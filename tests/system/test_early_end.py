"""`eval.patience` ends a run where it ends the plain loop, and `eval.keep = "best"` keeps the best model."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.disk import Disk
from rowcast.trainer.models.evaluate import Evaluation, end_of_patience, place_of_best
from tests.support.batches import NUM_DENSE, SEVERAL_LABELS, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, differing
from tests.support.driver import InProcessRun, Past, Settings, start_state
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

EVAL_AT = [step for step in range(60) if step % 5 >= 3]  # two batches after each three train steps
Plain = tuple[list[float], dict[str, Tensor]]


def batches_of(job: Job) -> list[ScheduledBatch]:
    return small_batches(job, "multi", num_steps=36, eval_at=EVAL_AT[:24])


def plain(job: Job, batches: Sequence[ScheduledBatch], parts: int = 1) -> Plain:
    return run_plain_loop(job, start_state(job, NUM_DENSE), batches, parts)


def first_steps(batches: Sequence[ScheduledBatch], number: int) -> list[ScheduledBatch]:
    return [own for own in batches if own.kind == "train"][:number]


NAN, INF = math.nan, math.inf
RULES: list[tuple[list[float | None], int, int, bool]] = [
    # losses, patience, the place of the best, whether training ends
    ([], 1, -1, False),
    ([0.5], 1, 0, False),
    ([0.5, 0.6], 0, 0, False),
    ([0.5, 0.6], 1, 0, True),
    ([0.5, 0.6], 2, 0, False),
    ([0.5, 0.5], 1, 0, True),  # as good is not better
    ([0.5, 0.6, 0.4, 0.4], 2, 2, False),
    ([0.5, 0.6, 0.4, 0.4, 0.4], 2, 2, True),
    ([0.5, NAN, INF], 2, 0, True),
    ([NAN, None, 0.5, 0.4], 2, 3, False),
    ([NAN], 1, -1, True),
    ([NAN, None], 3, -1, False),
]


@pytest.mark.parametrize(("losses", "patience", "place", "ends"), RULES)
def test_training_ends_once_so_many_in_a_row_are_not_better(
    losses: list[float | None], patience: int, place: int, ends: bool
) -> None:
    found = [
        Evaluation(train_step=10 * number, auc=None, logloss=loss, accuracy=None) for number, loss in enumerate(losses)
    ]
    assert place_of_best(found) == place
    assert bool(end_of_patience(found, patience)) == ends


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("sections", [{}, SEVERAL_LABELS], ids=["one label", "several labels"])
@pytest.mark.parametrize("keep", ["newest", "best"])
def test_a_run_ends_where_the_plain_loop_does(patience: int, sections: dict[str, Any], keep: str) -> None:
    for seed in range(count(4, 40)):
        job = small_job("adam", "multi", depth=1 + seed % 4, eval={"patience": patience, "keep": keep}, **sections)
        batches = batches_of(job)
        losses, end = plain(job, batches)
        assert 3 * patience < len(losses) < 36, "the data ends later, and the first evaluation is better than none"
        slots = slots_for(group_specs(job), batches, "more")
        run = InProcessRun(job, batches, Settings(slots=slots, seed=seed, late_store=bool(seed % 2))).run()
        assert_equal_bits(run, losses, end)
        assert len(run.results.evaluations) == len(losses) // 3
        assert run.trainer.loop.ended_by.startswith(f"eval.patience = {patience}: ")
        assert run.prefetcher.barrier.finished


def begun(job: Job, batches: Sequence[ScheduledBatch], seed: int, ranks: int, parts: int) -> RankedRun:
    """A run that goes on from the newest checkpoint in its run directory."""
    pasts = []
    for number in range(ranks):
        checkpoints = Checkpoints(job.run_dir, Disk())
        carry_out(checkpoints.withdraw(OwnShard(number=number, count=ranks)))
        pasts.append(Past(checkpoints=checkpoints, newest=checkpoints.newest_valid()))
    settings = Settings(slots=slots_for(group_specs(job), batches, "more"), seed=seed)
    return RankedRun(job, batches, settings, ranks=ranks, parts=parts, pasts=pasts)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 4), (2, 4), (4, 4)])
def test_a_run_killed_at_any_time_ends_after_the_same_step_with_the_same_best_checkpoint(
    ranks: int, parts: int, tmp_path: Path
) -> None:
    for seed in range(count(3, 30)):
        job = small_job(
            "adagrad",
            "multi",
            job={"run_dir": str(tmp_path / f"run-{seed}")},
            data={"format": "synthetic"},
            eval={"patience": 2, "keep": "best"},
            checkpoint={"every": 5, "keep": 1},
            ranks={"count": ranks, "parts": parts},
        )
        job.run_dir.mkdir()
        batches = batches_of(job)
        losses, end = plain(job, batches, parts)
        assert 6 < len(losses) < 36
        chance = random.Random(seed)
        for life in range(4):
            begun(job, batches, 10 * seed + life, ranks, parts).advance(chance.randrange(15_000 * ranks))
        run = begun(job, batches, seed, ranks, parts).run()
        assert_equal_bits(run, losses, end)
        evaluations = run.pairs[0].results.evaluations
        assert [own.train_step for own in evaluations] == list(range(3, len(losses) + 1, 3))
        best = evaluations[place_of_best(evaluations)].train_step
        assert best == len(losses) - 6
        checkpoints = Checkpoints(job.run_dir, Disk())
        newest, chosen = checkpoints.newest_valid(), checkpoints.choose(None)
        assert newest is not None
        assert (newest.train_steps, newest.best, chosen.train_steps) == (len(losses), chosen.name, best)
        assert checkpoints.candidates() == [newest.name, chosen.name]
        export_run(job.run_dir, tmp_path / "best")
        assert differing(load_file(tmp_path / "best"), plain(job, first_steps(batches, best), parts)[1]) == []
