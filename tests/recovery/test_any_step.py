"""A run that is stopped after any step goes on as if it had not been, also before, within and after an evaluation."""

from pathlib import Path

import numpy as np
import pytest

from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.plan import PlannedSteps
from rowcast.runtime.disk import Disk
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Past, Settings

NUM_STEPS, EVALUATIONS = 7, (2, 3, 6)  # one in the middle, and one that ends the data
JOB = small_job("adagrad")
BATCHES = small_batches(JOB, "single", num_steps=NUM_STEPS - len(EVALUATIONS), eval_at=EVALUATIONS)
SETTINGS = Settings(slots=slots_for(group_specs(JOB), BATCHES, "one batch"))


@pytest.fixture(scope="module")
def undisturbed() -> InProcessRun:
    return InProcessRun(JOB, BATCHES, SETTINGS).run()


def run_until(last: int, checkpoints: Checkpoints) -> InProcessRun:
    """A run that is stopped after step `last`."""
    run = InProcessRun(JOB, BATCHES, SETTINGS, Past(checkpoints=checkpoints, newest=None))

    def stop_after(plan: PlannedSteps) -> None:
        if plan.steps[-1].step == last:
            run.prefetcher.stop("test")

    run.prefetcher.planning.on_plan = stop_after
    return run.run()


@pytest.mark.parametrize("last", range(NUM_STEPS - 1))
def test_a_run_that_is_stopped_there_has_the_same_losses_and_evaluations(
    last: int, tmp_path: Path, undisturbed: InProcessRun
) -> None:
    checkpoints = Checkpoints(tmp_path, Disk())
    stopped = run_until(last, checkpoints)
    assert stopped.writer is not None
    newest = stopped.writer.newest
    assert newest is not None
    assert (newest.position.step, newest.finished) == (last + 1, False)
    rest = InProcessRun(JOB, BATCHES, SETTINGS, Past(checkpoints=checkpoints, newest=newest)).run()
    assert np.array_equal(rest.results.losses, undisturbed.results.losses)
    assert rest.results.evaluations == undisturbed.results.evaluations
    assert len(rest.results.evaluations) == 2
