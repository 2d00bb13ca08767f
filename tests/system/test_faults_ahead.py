"""What a reader finds wrong far ahead costs no good step: the run trains up to it, makes a checkpoint, then ends."""

from pathlib import Path

import numpy as np
import pytest

from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.broken_source import Where, broken
from tests.support.driver import InProcessRun, Past, Settings
from tests.support.ranked_run import RankedRun

NUM_STEPS, EVALUATIONS = 24, (11, 12, 17)
JOB = small_job("adagrad", lookahead={"horizon": 16})
BATCHES = small_batches(JOB, "single", num_steps=NUM_STEPS - len(EVALUATIONS), eval_at=EVALUATIONS)
SETTINGS = Settings(slots=slots_for(group_specs(JOB), BATCHES, "one batch"))


def past(folder: Path) -> Past:
    return Past(checkpoints=Checkpoints(folder, Disk()), newest=None)


@pytest.mark.parametrize("where", ["ids", "dense"])
@pytest.mark.parametrize("step", [1, 15, 12, 23])
def test_every_step_before_a_fault_is_trained_and_in_a_checkpoint(step: int, where: Where, tmp_path: Path) -> None:
    run = broken(InProcessRun(JOB, BATCHES, SETTINGS, past(tmp_path)), BATCHES, step, where)
    with pytest.raises(DataError, match="row 7 is bad"):
        run.run()
    assert run.writer is not None
    assert run.writer.newest is not None
    assert (run.writer.newest.position.step, run.writer.newest.finished) == (step, False)
    whole = InProcessRun(JOB, BATCHES, SETTINGS).run()
    num_trained = sum(batch.kind == "train" for batch in BATCHES[:step])
    assert np.array_equal(run.results.losses, whole.results.losses[:num_trained])


def test_a_stop_before_the_fault_is_a_stop(tmp_path: Path) -> None:
    run = broken(InProcessRun(JOB, BATCHES, SETTINGS, past(tmp_path)), BATCHES, 16, "ids")
    run.prefetcher.planning.on_plan = lambda plan: run.prefetcher.stop("test") if plan.plan == 3 else None
    run.run()
    assert run.writer is not None
    assert run.writer.newest is not None
    assert run.writer.newest.position.step == 4


@pytest.mark.parametrize("where", ["ids", "dense"])
@pytest.mark.parametrize("step", [15, 12])
def test_ranks_end_at_the_same_checkpoint(step: int, where: Where, tmp_path: Path) -> None:
    pasts = [past(tmp_path) for _ in range(2)]
    run = RankedRun(JOB, BATCHES, SETTINGS, ranks=2, parts=2, pasts=pasts)
    for pair in run.pairs:
        broken(pair, BATCHES, step, where)
    with pytest.raises(DataError, match="row 7 is bad"):
        run.run()
    assert run.pairs[0].writer is not None
    newest = run.pairs[0].writer.newest
    assert newest is not None
    assert (newest.position.step, len(newest.shards)) == (step, 2)
