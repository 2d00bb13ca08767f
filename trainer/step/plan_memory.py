"""Holds the arrays of one plan on the device, including those derived on the host.

    block    | dense | labels | 0.order | ... | 0.long_rows | ... | 0.fill_slots | ... | 0.slots | 0.bag_order | ... |
               from the ring, piece by piece    from page-locked memory                  made on the device

Arrays that follow from others are not sent: the mail thread derives the short ones. The main thread copies them to the
device before the block's last piece, on the same stream, so the copy needs no separate event. The long ones are made on
the device, after that piece (`kernels/lookups.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.messages import ArraySpec, PlanHeader
from rowcast.protocol.packing import ARRAY_ALIGNMENT
from rowcast.protocol.plan_layout import ITEM_BYTES, Dtype
from rowcast.runtime.arrays import I32, Bytes
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.device.streams import Streams, memory_for
from rowcast.trainer.kernels.chunks import Chunks, chunk_arrays, most_chunk_items
from rowcast.trainer.kernels.lookups import arrange
from rowcast.trainer.step.plan_check import i32_of, ordered

DTYPES: dict[Dtype, torch.dtype] = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
}


@dataclass(frozen=True, slots=True)
class DerivedArrays:
    """The arrays derived from a plan's arrays, on the host."""

    items: I32  # all of them, each from a multiple of ARRAY_ALIGNMENT bytes
    places: dict[str, tuple[int, int]]  # start and end of each array in `items`
    indices: list[str]  # those of int64, as torch requires for positions to write to


class PlanMemory:
    """Memory for one plan, reused for the next when the previous plan's step is complete. Runs on the main thread."""

    def __init__(self, streams: Streams, groups: Sequence[GroupSpec]) -> None:
        self._streams = streams
        self._groups = groups
        self._block = streams.allocate(0)
        self._derived = self._host_memory(0)  # not writable until the step is complete
        self._derived_items: I32 = self._derived.numpy().view(np.int32)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def open(self, step: int, header: PlanHeader) -> Tensor:
        """Returns u8 [arrays_bytes] for the plan's arrays. Raises ConfigError if device memory does not suffice."""
        derived = most_derived_bytes(header)
        arranged = sum(2 * arranged_bytes(spec) for _, spec in ordered(header))
        if len(self._block) < header.arrays_bytes + derived + arranged:
            self._block = self._allocate(step, header.arrays_bytes + derived + arranged)
        if len(self._derived) < derived:
            self._derived = self._host_memory(derived * 5 // 4)
            self._derived_items = self._derived.numpy().view(np.int32)
        return self._block[: header.arrays_bytes]

    def put(self, header: PlanHeader, derived: DerivedArrays) -> dict[str, Tensor]:
        """Issues their copy to the device; returns them there."""
        nbytes = derived.items.nbytes
        self._derived_items[: len(derived.items)] = derived.items
        block = self._block[header.arrays_bytes : header.arrays_bytes + nbytes]
        self._streams.copy_in.copy(self._derived[:nbytes], block)
        items = block.view(torch.int32)
        arrays = {name: items[first:last] for name, (first, last) in derived.places.items()}
        for name in derived.indices:
            arrays[name] = arrays[name].view(torch.int64)
        return arrays

    def arrange(self, header: PlanHeader, arrays: dict[str, Tensor]) -> None:
        """Issues the making of `slots` and `bag_order` from each `order`, which they replace in `arrays`. All arrays of
        the plan must have been copied on the same stream.
        """
        end = header.arrays_bytes + most_derived_bytes(header)
        for group, spec in ordered(header):
            order = arrays.pop(spec.name)
            made = []
            for name in ("slots", "bag_order"):
                array = self._block[end : end + 4 * len(order)].view(torch.int32)
                arrays[f"{group}.{name}"] = array
                made.append(array)
                end += arranged_bytes(spec)
            inputs = [arrays[f"{group}.{name}"] for name in ("segment_offsets", "unique_slots")]
            self._streams.copy_in.run(partial(arrange, self._groups[group], order, *inputs, *made))

    def _allocate(self, step: int, nbytes: int) -> Tensor:
        what = f"step {step} brings {nbytes} bytes of look-ups, for which {self._streams.device} has no room"
        with memory_for(what, "make data.batch_size or cache.capacity smaller"):
            return self._streams.allocate(nbytes * 5 // 4)

    def _host_memory(self, nbytes: int) -> Tensor:
        is_cuda = self._streams.device.type == "cuda"
        return torch.empty(aligned(nbytes, ARRAY_ALIGNMENT), dtype=torch.uint8, device="cpu", pin_memory=is_cuda)


def derive(header: PlanHeader, content: Bytes) -> DerivedArrays:
    """Computes the chunks of each group's long rows, and its fetch_slots as "<group>.fill_slots", i64.

    `content` u8 [arrays_bytes]: the plan's arrays, checked. Any thread.
    """
    segments = [i32_of(content, spec) for spec in header.arrays if spec.name.endswith(".segment_offsets")]
    fetched = [i32_of(content, spec) for spec in header.arrays if spec.name.endswith(".fetch_slots")]
    indices = {f"{group}.fill_slots": slots.astype(np.int64).view(np.int32) for group, slots in enumerate(fetched)}
    arrays, places, end = chunk_arrays(segments) | indices, {}, 0
    for name, array in arrays.items():
        places[name] = end, end + len(array)
        end = aligned(end + len(array), ARRAY_ALIGNMENT // 4)
    items = np.zeros(end, np.int32)
    for array, (first, last) in zip(arrays.values(), places.values(), strict=True):
        items[first:last] = array
    return DerivedArrays(items, places, list(indices))


def most_derived_bytes(header: PlanHeader) -> int:
    """Returns an upper bound; each array begins at a multiple of ARRAY_ALIGNMENT."""
    spare = (len(Chunks._fields) + 1) * ARRAY_ALIGNMENT
    return sum(
        aligned(4 * most_chunk_items(group.num_lookups) + 8 * group.num_fetch, ARRAY_ALIGNMENT) + spare
        for group in header.groups
    )


def arranged_bytes(spec: ArraySpec) -> int:
    """Returns the bytes of one array that is made from this `order`."""
    return aligned(4 * math.prod(spec.shape), ARRAY_ALIGNMENT)


def unpack(block: Tensor, specs: tuple[ArraySpec, ...]) -> dict[str, Tensor]:
    """Returns named views of a block. Raises RemoteProtocolError if an array is not inside it."""
    nbytes, arrays = len(block), {}
    items = {name: block.view(DTYPES[name]) for name in {spec.dtype for spec in specs}}
    for spec in specs:
        size = ITEM_BYTES[spec.dtype]
        first, count = spec.offset // size, math.prod(spec.shape)
        if (first + count) * size > nbytes:
            raise RemoteProtocolError(
                f"array {spec.name} ends at byte {(first + count) * size} of a block of {nbytes} bytes"
            )
        array = items[spec.dtype][first : first + count]
        arrays[spec.name] = array if len(spec.shape) == 1 else array.view(spec.shape)
    return arrays
