"""Compiles the kernels for a device that need not be there: `python -m tests.kernels.compile_for_device 90`
for compute capability 9.0, or `gfx942` for AMD's MI300.

It calls them as a run would, with several sizes, learning rates and steps, but launches nothing. Prints one JSON object
a compiled kernel.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rowcast.trainer.kernels import GroupLookup, triton_ops
from tests.kernels.lookups import Layout, divisors_of, group_of, rule_of
from tests.kernels.noted_launches import AbsentDriver

WIDE = 128  # of this dimension the machine code too, which takes time
CASES: tuple[tuple[int, torch.dtype, bool, str], ...] = (
    (WIDE, torch.float32, False, "adagrad"),
    (16, torch.bfloat16, True, "rowwise_adagrad"),
    (33, torch.float32, False, "adagrad"),
)


def groups() -> Iterator[GroupLookup]:
    """Single-hot and jagged, with long rows and without, of numbers that Triton could take for special ones."""
    slots = torch.arange(64, dtype=torch.int32)
    for num_lookups in (1, 16, 400):
        ids = np.minimum(np.arange(num_lookups) // 5, 33)
        yield group_of(ids, None, None, slots)
        yield group_of(ids, np.full(num_lookups, 1), None, slots)


def call(dim: int, dtype: torch.dtype, master: bool, kind: str) -> None:
    layout = Layout(dim=dim, kind=kind, dtype=dtype, master=master)
    for step, group in enumerate(groups()):
        rows, rule = layout.rows(layout.records(64)), rule_of(kind, clip=0.5, step=step + 1)
        divisors = None if group.offsets is None else divisors_of(group)
        grads = torch.zeros(len(group.slots), dim)
        triton_ops.lookup(rows, group, divisors)
        triton_ops.apply(rows, group.unique_slots, triton_ops.reduce(grads, group, divisors), rule)
        triton_ops.update(rows, grads, group, divisors, rule)


def machine_code(kernel: Any) -> str:
    """Returns "" without a disassembler."""
    try:
        return str(kernel.asm["sass"])
    except (OSError, RuntimeError):
        return ""


def main(target: str) -> None:
    driver.set_active(AbsentDriver(target))
    compiled: dict[int, dict[str, Any]] = {}
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled[id(kernel)] = {
            "name": self.fn.__name__,
            "kind": options["RULE"].__module__.rpartition(".")[2] if options.get("RULE") else None,
            "dim": options["D"],
            "ptx": kernel.asm["ptx" if target.isdigit() else "amdgcn"],
            "machine_code": machine_code(kernel) if options["D"] == WIDE and target.isdigit() else "",
        }

    hip = None if target.isdigit() else "as on AMD"
    with patch.object(JITFunction, "run", warm_up), patch.object(torch.version, "hip", hip):
        for case in CASES:
            call(*case)
    for kernel in compiled.values():
        sys.stdout.write(json.dumps(kernel) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
