"""Models that own their step: the bits of the plain loop, on any ranks, after stops and kills at any step."""

from pathlib import Path

import numpy as np
import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import PlannedSteps
from rowcast.runtime.disk import Disk
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits, differing
from tests.support.driver import InProcessRun, Past, Settings, start_state
from tests.support.own_steps import without_dense
from tests.support.ranked_run import RankedRun
from tests.support.restarts import Restarts, assert_ends_as, plain

NUM_STEPS, EVALUATIONS = 12, (3, 8)
MODELS = ["everything", "adversary"]


def run_of(model: str) -> tuple[InProcessRun, list[ScheduledBatch]]:
    job = without_dense(small_job("adagrad", model={"kind": f"tests.support.own_steps:{model}"}))
    batches = small_batches(job, "single", num_steps=NUM_STEPS - len(EVALUATIONS), eval_at=EVALUATIONS)
    return InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "two batches"))), batches


@pytest.mark.parametrize("model", MODELS)
def test_its_bits_are_the_plain_loops_for_any_parts_and_trainers(model: str) -> None:
    run, batches = run_of(model)
    start = start_state(run.job, NUM_DENSE)
    skipped: list[int] = []
    run.runner.dense_step.skipped = skipped
    assert_equal_bits(run.run(), *run_plain_loop(run.job, start, batches))
    assert skipped == ([3, 7] if model == "everything" else [])
    for ranks, parts in ((1, 2), (2, 2), (2, 4)):
        ranked = RankedRun(run.job, batches, run.settings, ranks=ranks, parts=parts).run()
        assert_equal_bits(ranked, *run_plain_loop(run.job, start, batches, parts))


@pytest.mark.parametrize("last", range(NUM_STEPS - 1))
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_is_stopped_at_any_step_goes_on_with_the_same_state(model: str, last: int, tmp_path: Path) -> None:
    run, batches = run_of(model)
    whole = InProcessRun(run.job, batches, run.settings, Past(checkpoints=at(tmp_path / "whole"), newest=None)).run()
    checkpoints = at(tmp_path / "stopped")
    stopped = InProcessRun(run.job, batches, run.settings, Past(checkpoints=checkpoints, newest=None))

    def stop_after(plan: PlannedSteps) -> None:
        if plan.steps[-1].step == last:
            stopped.prefetcher.stop("test")

    stopped.prefetcher.planning.on_plan = stop_after
    stopped.run()
    assert stopped.writer is not None
    past = Past(checkpoints=checkpoints, newest=stopped.writer.newest)
    rest = InProcessRun(run.job, batches, run.settings, past).run()
    assert stopped.losses() + rest.losses()[len(stopped.losses()) :] == whole.losses()
    assert differing(rest.state(), whole.state()) == []
    assert rest.saved[-1] == whole.saved[-1]
    assert b"objects.structure" in rest.saved[-1]
    assert rest.results.evaluations[-1] == whole.results.evaluations[-1]


def test_figures_of_the_models_own_are_the_same_for_any_number_of_trainers() -> None:
    run, batches = run_of("everything")
    whole = [own.means for own in run.run().results.evaluations]
    for of, found in zip(EVALUATIONS, whole, strict=True):
        labels = next(own.batch.labels for own in batches if own.step == of)
        assert found["clicks"] == float(labels.astype(np.float64).sum()) / (2.5 * len(labels))
        assert found["never"] is None
    ranked = [RankedRun(run.job, batches, run.settings, ranks=ranks, parts=4).run() for ranks in (1, 2)]
    one, two = ([own.means for own in each.pairs[0].results.evaluations] for each in ranked)
    assert one == two
    for found, of_parts in zip(whole, one, strict=True):
        assert of_parts["clicks"] == found["clicks"]


def at(folder: Path) -> Checkpoints:
    folder.mkdir()
    return Checkpoints(folder, Disk())


@pytest.mark.parametrize("model", MODELS)
def test_kills_and_other_numbers_of_trainers_between_them_change_no_bit(model: str, tmp_path: Path) -> None:
    run, batches = run_of(model)
    own = Restarts(tmp_path, run.job, batches, parts=2)
    own.live(1, advances=400)
    own.live(2, 5)
    own.live(2, advances=600)
    own.live(1, 9)
    assert_ends_as(own.live(2), plain(own, 2), tmp_path)


def test_an_import_of_weights_begins_with_new_objects() -> None:
    run, _ = run_of("everything")
    weights = {name: own for name, own in run.runner.state().items() if name.startswith("model.")}
    run.runner.restore(weights)
    assert run.runner.model.notes.content["said"] == ("nothing", None)
