"""What a run in one thread came to, beside the plain loop."""

import numpy as np
import torch
from torch import Tensor

from rowcast.job.schema import Job
from tests.support.driver import InProcessRun
from tests.support.full_capacity import bits


def assert_equal_bits(run: InProcessRun, losses: list[float], end: dict[str, Tensor]) -> None:
    assert np.array(run.results.losses, np.float32).tobytes() == np.array(losses, np.float32).tobytes(), "losses differ"
    state = run.state()
    assert state.keys() == end.keys()
    for name, tensor in end.items():
        assert torch.equal(bits(state[name]), bits(tensor)), f"{name} differs"


def assert_tested_what_it_claims(run: InProcessRun, job: Job) -> None:
    """Below full capacity, a run shows nothing unless it evicts a dirty row and brings it back under `after_step`."""
    assert sum(group.num_dirty for plan in run.plans for group in plan.groups) > 0, "no dirty row was evicted"
    assert any(plan.after_step is not None for plan in run.plans), "no evicted row was fetched again under after_step"
    if job.lookahead.depth > 1:
        assert run.max_in_flight >= 2, "never two plans in flight"
