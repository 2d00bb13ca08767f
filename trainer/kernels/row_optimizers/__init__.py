"""What each row optimizer does to a batch's rows. `job/row_optimizers.py` lists them.

    <name>.py             `train(weight, states, row_grads, rule)`: the rule in plain torch operations, in place, whose bits the others have
    <name>_compiled.py    `update`: the sum of the gradients and the rule, in compiled loops over fp32 rows on a CPU
    <name>_triton.py      `train` and `scalars`: the rule inside Triton's kernels, on CUDA

Only the first is needed: without the others, rows are gathered, trained by the plain rule and written back.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from rowcast.job.row_optimizers import ROW_OPTIMIZERS


def modules(suffix: str = "") -> dict[str, ModuleType]:
    """`<name><suffix>.py` of each row optimizer that has one, by the optimizer's name."""
    paths = {name: own.module + suffix for name, own in ROW_OPTIMIZERS.items()}
    return {name: import_module(path) for name, path in paths.items() if find_spec(path) is not None}
