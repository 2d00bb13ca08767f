"""Launches every kernel by Triton's own launcher, with a driver that only looks.

    python -m tests.kernels.launch_on_stub libcuda.so.1 [--all]     TRITON_LIBCUDA_PATH is the folder of that library

Prints one JSON object a launch: what the kernel was called with, and what reached the driver. Nothing is computed.
"""

import ctypes
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rowcast.trainer.kernels import triton_ops
from tests.kernels.lookups import Layout, divisors_of, group_of, rule_of

Case = tuple[int, torch.dtype, bool, str]
CASES: tuple[Case, ...] = (  # without and with a master and states; compiled fast, because rows are narrow
    (4, torch.float32, False, "sgd"),
    (5, torch.bfloat16, True, "adam"),
)
MORE: tuple[Case, ...] = (
    (128, torch.float32, False, "sgd"),
    (128, torch.float32, False, "rowwise_adagrad"),
    (33, torch.bfloat16, True, "adam"),
    (33, torch.float16, False, "adagrad"),
    (16, torch.bfloat16, True, "sgd"),
    (1024, torch.float32, False, "adam"),
)
STREAM = 0x77
MOST_PARAMETERS = 64


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("launches", "grid", "threads", "stream", "count")),
        ("parameters", ctypes.c_uint64 * MOST_PARAMETERS),
    )


class StubDriver(CudaDriver):  # type: ignore[misc]
    """Triton's driver, which takes compute capability 9.0 from here instead of from torch."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.stub_last.restype = ctypes.POINTER(Launch)
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = lambda device: STREAM

    @property
    def last(self) -> Launch:
        launch: Launch = self._library.stub_last().contents
        return launch


def run_all(cases: Sequence[Case]) -> None:
    slots = torch.arange(64, dtype=torch.int32)
    for case, num_lookups in itertools.product(cases, (1, 16, 400)):
        dim, dtype, master, kind = case
        layout = Layout(dim=dim, kind=kind, dtype=dtype, master=master)
        ids = np.minimum(np.arange(num_lookups) // 5, 33)
        ids[num_lookups // 2 :] = 0  # of 400, a row with more look-ups than a chunk
        bags, weights = (None, np.ones(num_lookups, int)), (None, torch.ones(num_lookups))
        for counts, own_weights in [
            *zip(bags, weights, strict=True),
            *(() if case in CASES else zip(bags, weights[::-1], strict=True)),
        ]:
            group = group_of(ids, counts, own_weights, slots)
            rows, rule = layout.rows(layout.records(64)), rule_of(kind, clip=0.5, step=num_lookups)
            divisors, grads = None if counts is None else divisors_of(group), torch.zeros(num_lookups, dim)
            triton_ops.lookup(rows, group, divisors)
            if case == cases[0]:
                triton_ops.reduce(grads, group, divisors)
            triton_ops.apply(rows, group.unique_slots, torch.zeros(len(group.unique_slots), dim), rule)
            triton_ops.update(rows, grads, group, divisors, rule)
    for num_features, dim, batch_size in (
        (3, 5, 1),
        (3, 5, 16),
        *((26, case[0], 40) for case in cases if case in MORE[:1]),
    ):
        bottom, features = torch.zeros(batch_size, dim), torch.zeros(num_features, batch_size, dim)
        grad = torch.zeros_like(triton_ops.forward(bottom, features))
        triton_ops.backward(bottom, features, grad)


def values_of(arguments: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """What must reach the driver: arguments that are None are compiled in."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from values_of(argument)
        elif isinstance(argument, torch.Tensor):
            yield "pointer", argument.data_ptr()
        elif isinstance(argument, float):
            yield "float", struct.unpack("<I", struct.pack("<f", argument))[0]
        elif argument is not None:
            yield "int", argument


def main(library: str, cases: Sequence[Case]) -> None:
    stub = StubDriver(library)
    driver.set_active(stub)
    run = JITFunction.run

    def noted(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        expected, before = [*values_of(arguments)], stub.last.launches
        stub.last.count = len(expected)
        kernel = run(self, *arguments, grid=grid, warmup=warmup, **options)
        last = stub.last
        told: Mapping[str, Any] = {
            "kernel": self.fn.__name__,
            "absent": [number for number, argument in enumerate(arguments) if argument is None],
            "launches": last.launches - before,
            "expected": expected,
            "parameters": len(re.findall(r"\.param \.\w+", kernel.asm["ptx"].partition(")")[0])),
            "got": list(last.parameters[: last.count]),
            "grid": [last.grid, grid[0]],
            "threads": [last.threads, 32 * options["num_warps"]],
            "stream": [last.stream, STREAM],
        }
        sys.stdout.write(json.dumps(told) + "\n")
        return kernel

    with (
        patch.object(JITFunction, "run", noted),
        patch.object(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM)),
    ):
        triton_ops.make_launcher()
        run_all(cases)


if __name__ == "__main__":
    main(sys.argv[1], (*CASES, *MORE) if "--all" in sys.argv else CASES)
