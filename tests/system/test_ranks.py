"""R1 and R2: however many ranks share the parts of each batch, training has the bits of the plain loop in parts."""

import functools
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from tests.support.batches import BAGS, NUM_DENSE, OPTIMIZERS, Bags, slots_for, small_batches, small_job
from tests.support.driver import Settings, start_state
from tests.support.full_capacity import bits
from tests.support.ranked_run import RankedRun

RANKS = (1, 2, 3, 4, 8)


def assert_equal_bits(run: RankedRun, losses: list[float], end: dict[str, Tensor]) -> None:
    assert np.array(run.losses(), np.float32).tobytes() == np.array(losses, np.float32).tobytes(), "losses differ"
    state = run.state()
    assert state.keys() == end.keys()
    assert not [name for name, tensor in end.items() if not torch.equal(bits(state[name]), bits(tensor))]
    run.owned_rows()


@functools.cache
def reference(
    optimizer: str, bags: Bags, parts: int
) -> tuple[Job, list[ScheduledBatch], list[float], dict[str, Tensor]]:
    job = small_job(optimizer, bags)
    batches = small_batches(job, bags, num_steps=8, eval_at=(3, 6))
    return job, batches, *run_plain_loop(job, start_state(job, NUM_DENSE), batches, parts)


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_ranks_gives_the_bits_of_the_plain_loop_in_eight_parts(optimizer: str, bags: Bags) -> None:
    job, batches, losses, end = reference(optimizer, bags, 8)
    for ranks in (1, 4):
        slots = slots_for(group_specs(job), batches, "one batch")
        settings = Settings(slots=slots, seed=ranks)
        run = RankedRun(job, batches, settings, ranks=ranks, parts=8).run()
        assert_equal_bits(run, losses, end)
