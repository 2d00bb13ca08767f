"""Triton's kernels up to their launch: nothing is compiled, and no device is needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, torch_ops, triton_ops


class AbsentDriver:
    """As much of Triton's driver as a launch asks for before the kernel is compiled."""

    def __init__(self, target: str = "90") -> None:
        """`target`: a compute capability times 10, or AMD's name of an architecture."""
        is_cuda = target.isdigit()
        self._target = GPUTarget("cuda", int(target), 32) if is_cuda else GPUTarget("hip", target, 64)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def noted_launches(note: Callable[[str, str], None]) -> Iterator[None]:
    """Calls note(kernel, variant) for each launch of a Triton kernel."""

    def instead_of_compiling(self: Any, key: str, *others: Any) -> None:
        note(self.fn.__name__, key)

    driver.set_active(AbsentDriver())
    with patch.object(JITFunction, "_do_compile", instead_of_compiling):
        yield


class NotedKernels:
    """Implements `Kernels`: launches Triton's kernels under `noted_launches` and computes with `torch_ops`."""

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        triton_ops.lookup(rows, group, divisors)
        return torch_ops.lookup(rows, group, divisors)

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        triton_ops.reduce(pooled_grad, group, divisors)
        return torch_ops.reduce(pooled_grad, group, divisors)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        triton_ops.apply(rows, unique_slots, row_grads, rule)
        torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        triton_ops.update(rows, pooled_grad, group, divisors, rule)
        torch_ops.update(rows, pooled_grad, group, divisors, rule)
