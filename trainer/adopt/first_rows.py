"""Where the first values of an adopted table's rows are: in a file, made by a rule, or all alike."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rowcast.protocol.script_setup import Columns
from rowcast.runtime.errors import ConfigError

BLOCK_ROWS = 2**16
MOST_WHOLE = 2**24  # rows: above, nothing takes memory or disk by the rows of a table unless the script reads it whole


def is_large(num_rows: int) -> bool:
    return num_rows > MOST_WHOLE


made_here: set[str] = set()  # files of `rowcast.tables`, mapped shared


def place_of(weights: Tensor) -> Columns | None:
    """Where a mapped file has these values, f32 [V, D]. None: in no file, or in another order than by rows."""
    path = weights.untyped_storage().filename
    if not path or weights.stride(1) != 1 or weights.stride(0) < weights.shape[1] or not len(weights):
        return None
    place = Columns(
        width=weights.shape[1], path=path, offset=4 * int(weights.storage_offset()), row_bytes=4 * weights.stride(0)
    )
    if path in made_here:
        return place
    size = Path(path).stat().st_size
    if size < place.offset + place.row_bytes * (len(weights) - 1) + 4 * place.width:
        return None
    memory = np.memmap(path, np.uint8, "r")
    values = np.ndarray(weights.shape, np.float32, memory, place.offset, (place.row_bytes, 4)).view(np.int32)
    mine = weights.view(torch.int32).numpy()  # a private mapping may have other values than its file
    blocks = range(0, len(mine), BLOCK_ROWS)
    is_same = all(np.array_equal(values[at : at + BLOCK_ROWS], mine[at : at + BLOCK_ROWS]) for at in blocks)
    return place if is_same else None


def mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the zeros of a new file, which takes space as they are written. Raises ConfigError if there is too
    little: a page that finds none ends the process."""
    size = math.prod(shape)
    num_bytes, free = size * dtype.itemsize, shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise ConfigError(
            f"{path} would take {num_bytes:,} bytes, but its disk has {free:,} free; free space there, or name a "
            "folder on another disk"
        )
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype, device="cpu").view(*shape)


def alike(value: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """All elements are `value`; takes no memory."""
    return torch.full([1] * len(shape), value, dtype=dtype, device="cpu").expand(*shape)
