"""The bytes of a row in a version: one stride for all rows of a table, a multiple of 8.

    fp32, fp16   key u64 | values                          | linear f32, if there is one | zeros
    int8         key u64 | scale f32 | bias f32 | values u8 | zeros | linear f32          | zeros

value = bias + scale * u8, each operation rounded in fp32. bias is the row's least value, scale (largest - least) / 255.
"""

from typing import Literal, NamedTuple

import numpy as np

from rowcast.job.tables import TableSpec, aligned
from rowcast.runtime.arrays import F32, I64, Bools, Bytes

DType = Literal["fp32", "fp16", "int8"]
DTYPES: tuple[DType, ...] = ("fp32", "fp16", "int8")
FP32, FP16, INT8 = range(3)  # in the order of DTYPES
KEY_BYTES, WORD = 8, 8
LEVELS = np.float32(255)


class RowLayout(NamedTuple):
    """In a form for compiled loops."""

    kind: int
    dim: int  # values without the linear weight
    values_at: int  # bytes from the start of a row
    linear_at: int  # 0: no linear weight
    stride: int


def row_layout(dtype: DType, table: TableSpec) -> RowLayout:
    kind, dim = DTYPES.index(dtype), table.embedding_dim - table.linear
    values_at = KEY_BYTES + (8 if kind == INT8 else 0)
    linear_at = aligned(values_at + dim * (4, 2, 1)[kind], 4)
    end = linear_at + 4 if table.linear else linear_at
    return RowLayout(kind, dim, values_at, linear_at if table.linear else 0, aligned(end, WORD))


def encoded(layout: RowLayout, rows: I64, values: F32) -> Bytes:
    """Returns u8 [n, stride] of values f32 [n, width], a linear weight last."""
    out = np.zeros((len(rows), layout.stride), np.uint8)
    words = out.view(np.float32)
    out.view(np.int64)[:, 0] = rows
    weights = values[:, : layout.dim]
    if layout.kind == INT8:
        least, scale = ranges(weights)
        steps = np.where(scale > 0, scale, np.float32(1))[:, None]
        words[:, 2], words[:, 3] = scale, least
        levels = np.rint((weights - least[:, None]) / steps)
        out[:, layout.values_at : layout.values_at + layout.dim] = np.minimum(levels, LEVELS)
    elif layout.kind == FP16:
        with np.errstate(over="ignore"):
            out.view(np.float16)[:, layout.values_at // 2 :][:, : layout.dim] = weights
    else:
        words[:, layout.values_at // 4 :][:, : layout.dim] = weights
    if layout.linear_at:
        words[:, layout.linear_at // 4] = values[:, layout.dim]
    return out


def ranges(values: F32) -> tuple[F32, F32]:
    """Returns the least value of each row, and the step between levels, f32 [n]."""
    least = values.min(axis=1, initial=np.float32(np.inf) if values.shape[1] else np.float32(0))
    largest = values.max(axis=1, initial=np.float32(-np.inf) if values.shape[1] else np.float32(0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale: F32 = (largest - least) / LEVELS
    return least, scale


def holds(layout: RowLayout, values: F32) -> Bools:
    """Returns bool [n]: whether the dtype can hold the row, and all of the row is finite."""
    weights, finite = values[:, : layout.dim], np.asarray(np.isfinite(values).all(axis=1))
    if layout.kind == FP16:
        with np.errstate(over="ignore"):
            rounded = weights.astype(np.float16)
        return np.asarray(finite & np.isfinite(rounded).all(axis=1))
    if layout.kind == INT8:
        return np.asarray(finite & np.isfinite(ranges(weights)[1]))
    return finite
