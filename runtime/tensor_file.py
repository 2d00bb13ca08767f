"""Headers of safetensors files, which may be larger than memory. `safetensors` checks files that are read, but writes
only from memory, so headers are made here:

    8 bytes: length of the JSON | JSON: name -> dtype, shape, data_offsets, padded to 8 bytes | content of each tensor
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from rowcast.runtime.disk import open_regular
from rowcast.runtime.errors import DataError

BLOCK_BYTES = 4 * 2**20
MOST_HEADER = 100_000_000  # bytes, by safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor of any dtype in safetensors. Its content stays uninterpreted, because numpy has no bfloat16."""

    dtype: str  # safetensors' name, such as "F32"
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTensor(TensorSpec):
    start: int  # of its content in the file


def make_header(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Returns it, and where each tensor begins in the file."""
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offsets, end = dict[str, int](), 0
    for name, tensor in tensors.items():
        content[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        offsets[name] = end
        end += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def read_header(path: Path) -> dict[str, PlacedTensor]:
    """Returns the tensors in the file's order. Raises DataError if it is not a safetensors file, and OSError."""
    with open_regular(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads on, into tensors
        end = 8 + int.from_bytes(file.read(8), "little")
        header = file.read(min(end - 8, MOST_HEADER))
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise DataError(f"{path}: not a safetensors file ({error})") from None
    entries = json.loads(header)
    tensors = {
        name: PlacedTensor(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            start=end + entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def read_blocks(file: IO[bytes], tensor: PlacedTensor) -> Iterator[bytes]:
    """Yields a tensor's content in order. Raises DataError if the file ends early."""
    file.seek(tensor.start)
    rest = tensor.nbytes
    while rest:
        block = file.read(min(BLOCK_BYTES, rest))
        if not block:
            raise DataError(f"{file.name}: the file ends {rest} bytes before a tensor does")
        rest -= len(block)
        yield block
