"""Implements the row optimizers that `job/optimizers.py` lists, a file each.

    train                   the rule in plain torch operations, in place; the others have its bits
    update                  the sum of the gradients and the rule, in compiled loops over fp32 rows on a CPU
    train_block, scalars    the rule inside Triton's kernels, on CUDA; `triton_ops` imports Triton for it

Only the first is required: without the others, rows are gathered, trained by `train` and written back.
"""

from importlib import import_module
from types import ModuleType

from rowcast.job.optimizers import ROW_OPTIMIZERS


def having(function: str) -> dict[str, ModuleType]:
    """Imports the row optimizers' files; returns those that define `function`, by the optimizer's name."""
    files = {name: import_module(optimizer.module) for name, optimizer in ROW_OPTIMIZERS.items()}
    return {name: file for name, file in files.items() if hasattr(file, function)}
