"""Triton's interpreter runs kernels on a CPU and rounds otherwise than a device; that of Triton 3.6 cannot work with
numpy 2.4 or later. Both are corrected here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from rowcast.runtime.arrays import F32


def mend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        InterpreterBuilder,
        "create_fma",
        lambda self, x, y, z: TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar),
    )
    cut_off = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(source.data), tl.bfloat16)
        return cut_off(self, source, kind)

    for name in ("cast_impl", "create_fp_trunc"):
        patch.setattr(InterpreterBuilder, name, cast)
    begin_launch = interpreter._patch_lang_tensor

    def patch_tensors(tensor: Any, scope: Any) -> None:
        begin_launch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # Triton 3.6 makes an int of an array of one element

    patch.setattr(interpreter, "_patch_lang_tensor", patch_tensors)


def fma(x: F32, y: F32, z: F32) -> F32:
    """x * y + z, rounded once. In fp64 the product of two fp32 is exact; a sum rounded to odd may be rounded again."""
    product, term = (
        x.astype(np.float64) * y.astype(np.float64),
        np.broadcast_to(z.astype(np.float64), np.broadcast_shapes(x.shape, z.shape)),
    )
    total = product + term
    back = total - product
    error = (product - (total - back)) + (term - back)
    bits = total.view(np.int64)
    towards_error = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits % 2 == 0), bits + towards_error, bits).view(np.float64).astype(np.float32)


def to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """To the nearest, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()
