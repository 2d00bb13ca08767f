"""Tries an optimizer before it trains a row of a table: what it keeps of a row, and whether rows train apart."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.catch_up import made_anew, step_without_hooks
from rowcast.trainer.adopt.step_log import has_rows

TRIED_ROWS, TRIED_DIM, TRIED_STEPS = 3, 4, 2  # of a table that shows what an optimizer keeps of a row


def first_states(table: str, rule: type[Optimizer], group: Mapping[str, Any], *, is_sparse: bool) -> dict[str, float]:
    """The value of each state of a row before the optimizer's first step. Steps a small table, and each row alone.

    Raises ConfigError if a state has not a row for each row, or if a row's step depends on other rows."""
    keep = f"give {table} an optimizer that does, or leave it on the device by keep=[{table!r}]"
    if group.get("fused"):
        raise ConfigError(
            f"{rule.__name__}(fused=True) rounds the last values of an array differently, so rows apart would not have "
            f'the bits of the table {table}; leave fused out (Hugging Face: TrainingArguments(optim="adamw_torch")), '
            f"or leave the table on the device by keep=[{table!r}]"
        )
    weights = torch.linspace(-1, 1, TRIED_ROWS * TRIED_DIM, device="cpu").reshape(TRIED_ROWS, TRIED_DIM)
    try:
        first, whole, states = tried(rule, group, weights, is_sparse=is_sparse)
        alone = torch.cat([tried(rule, group, row[None], is_sparse=is_sparse)[1] for row in weights])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{rule.__name__} cannot train the rows of a table ({error}); {keep}") from None
    for name, own in states.items():
        if own.is_sparse or own.shape != weights.shape:
            kept = "a sparse tensor" if own.is_sparse else f"{list(own.shape)}"
            raise ConfigError(
                f"{rule.__name__} keeps {name} of {kept} for a table of {list(weights.shape)}, and rowcast moves state "
                f"that has a row for each row; {keep}"
            )
    if not torch.equal(whole, alone):
        raise ConfigError(
            f"{rule.__name__} does not train each row for itself: a step of one row depends on others; {keep}"
        )
    return {name: first.get(name, 0.0) for name in states}


def moves_without_gradient(rule: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether a step with a gradient of zero changes a row that has had another one."""
    parameter = nn.Parameter(torch.ones(1, TRIED_DIM, device="cpu"))
    optimizer = made_anew(rule, group, parameter)
    rows: list[list[Tensor]] = []
    for gradient in (1.0, 0.0):
        parameter.grad = torch.full((1, TRIED_DIM), gradient, device="cpu")
        step_without_hooks(optimizer)
        states = (own.clone() for own in optimizer.state[parameter].values() if has_rows(own))
        rows.append([parameter.detach().clone(), *states])
    return any(not torch.equal(before, after) for before, after in zip(*rows, strict=True))


def tried(
    rule: type[Optimizer], group: Mapping[str, Any], weights: Tensor, *, is_sparse: bool
) -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
    """Steps a parameter with these weights. Returns the first value of states that are there from the beginning, the
    weights after the steps, and states."""
    parameter = nn.Parameter(weights.clone())
    optimizer = made_anew(rule, group, parameter)
    first = {name: float(own.flatten()[0]) for name, own in optimizer.state[parameter].items() if has_rows(own)}
    for _ in range(TRIED_STEPS):
        parameter.grad = (weights * 0.5).to_sparse(1) if is_sparse else weights * 0.5
        step_without_hooks(optimizer)
    states = {name: own for name, own in optimizer.state[parameter].items() if has_rows(own)}
    return first, parameter.detach(), states
