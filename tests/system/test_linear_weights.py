"""Tables with linear weights through planner, cache and write-back: the plain loop's bits."""

import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.jobs import table


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("kind", ["wide-deep", "deepfm"])
def test_its_bits_are_the_plain_loops(kind: str, optimizer: str, dtype: str) -> None:
    tables = [
        table("a", 60, 4, linear=True, dtype=dtype),
        table("b", 40, 4, "b0", "b1", linear=True, dtype=dtype),
        table("c", 50, 4, dtype=dtype),
    ]
    job = small_job(optimizer, tables=tables, model={"kind": kind, "top_mlp": [6, 1]})
    batches = small_batches(job, "multi", num_steps=6, eval_at=(2,))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)
