"""Row optimizers: which rule the kernels apply at which step, and the parts of a record that it works on."""

import torch
from torch import Tensor

from protocol.job import SparseOptimizer
from protocol.tables import GroupSpec
from trainer.kernels import Rows, Rule


def rule_at(settings: SparseOptimizer, train_step: int) -> Rule:
    """`train_step` counts the training batches before this one."""
    return Rule(kind=settings.kind, lr=settings.lr, eps=settings.epsilon, betas=settings.betas, step=train_step + 1)


def rows_of(records: Tensor, group: GroupSpec) -> Rows:
    """The parts of records f32 [num_slots, record_floats], as views."""
    parts = {part.name: records[:, part.offset : part.offset + part.width] for part in group.parts}
    return Rows(weight=parts.pop("weight"), master=parts.pop("master", None), states=tuple(parts.values()))


def warm_up_sqrt() -> None:
    """Makes the first `torch.sqrt` of the process in one thread: made by several, its roots may be inaccurate (pytorch#188792)."""
    torch.ones(1).sqrt()
