"""Implements the row optimizers that `job/row_optimizers.py` lists.

    <name>.py             `train(weight, states, row_grads, rule)`: the rule in plain torch operations, in place;
                          the other two have its bits
    <name>_compiled.py    `update`: the sum of the gradients and the rule, in compiled loops over fp32 rows on a CPU
    <name>_triton.py      `train` and `scalars`: the rule inside Triton's kernels, on CUDA

Only the first is required: without the others, rows are gathered, trained by the plain rule and written back.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from rowcast.job.row_optimizers import ROW_OPTIMIZERS


def modules(suffix: str = "") -> dict[str, ModuleType]:
    """Imports `<name><suffix>.py` of each row optimizer that has one, by the optimizer's name."""
    paths = {name: optimizer.module + suffix for name, optimizer in ROW_OPTIMIZERS.items()}
    return {name: import_module(path) for name, path in paths.items() if find_spec(path) is not None}
