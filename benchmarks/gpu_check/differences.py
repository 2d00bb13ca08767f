"""Where results first have other bits: the step and both losses; the table, row and column and both values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Losses = npt.NDArray[np.float32]


def loss_difference(losses: Losses, expected: Losses) -> dict[str, Any]:
    """The first step whose loss differs; empty if none does."""
    if len(losses) != len(expected):
        return {"steps": len(losses), "steps_expected": len(expected)}
    differ = np.flatnonzero(losses.view(np.int32) != expected.view(np.int32))
    if not len(differ):
        return {}
    step = int(differ[0])
    return {"step": step, "loss": losses[step].item(), "expected": expected[step].item(), "steps_differ": len(differ)}


def state_difference(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """The first value that differs, in the order of names; empty if none does. Rows are those of an export."""
    if state.keys() != expected.keys():
        return {"names": sorted(state.keys() ^ expected.keys())}
    for name, theirs in expected.items():
        ours = state[name].cpu()
        differ = (as_bytes(ours) != as_bytes(theirs.cpu())).any(dim=1)
        if differ.any():
            at = int(differ.nonzero()[0])
            row, column = divmod(at, max(1, ours[0].numel())) if ours.dim() else (0, 0)
            values = {"value": ours.flatten()[at].item(), "expected": theirs.flatten()[at].item()}
            return {"name": name, "row": row, "column": column, **values, "values_differ": int(differ.sum())}
    return {}


def as_bytes(tensor: Tensor) -> Tensor:
    """u8 [elements, bytes of one]."""
    return tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8)
