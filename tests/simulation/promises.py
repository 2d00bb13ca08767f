"""What must hold when a run has ended."""

import numpy as np
import torch

from tests.simulation.scenario import Reference
from tests.support.driver import InProcessRun


class LifeFailed(AssertionError):
    """What rowcast promises did not hold."""


def check_run(run: InProcessRun, wanted: Reference) -> None:
    """Losses, evaluations, tables, row state and dense weights have the bits of the undisturbed run."""
    if np.array(run.results.losses, np.float32).tobytes() != wanted.losses:
        raise LifeFailed("losses differ from the plain loop's")
    if run.results.evaluations != wanted.evaluations:
        raise LifeFailed(f"evaluations {run.results.evaluations} differ from {wanted.evaluations}")
    state = run.state()
    if state.keys() != wanted.state.keys():
        raise LifeFailed(f"the run has {sorted(state)}, the plain loop {sorted(wanted.state)}")
    check_state(state, wanted, "after the run")


def check_state(state: dict[str, torch.Tensor], wanted: Reference, where: str) -> None:
    for name, tensor in state.items():
        if not torch.equal(tensor.view(torch.int32), wanted.state[name].contiguous().view(torch.int32)):
            raise LifeFailed(f"{name} {where} differs from the plain loop's")
