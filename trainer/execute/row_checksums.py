"""Computes checksums of rows in their slots when a plan or a barrier requests them: the trainer's half of `--verify`.

The prefetcher names slots, in arrays of the plan (`rowcast.protocol.row_checksum`); the trainer knows no keys and draws
no conclusions. All of this is work of the fill stream, so it needs no additional waits:

    victims     after `fill_after`, before the first row of their group is filled: the rows as the last step left them,
                clean victims included
    fetched     after the plan's last row is filled, before its look-up
    barrier     with the first gathered rows; nothing else runs then

The host reads the checksums when it reads other results of the step: after the step's event, or after the event of a
barrier's last copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowcast.protocol.row_checksum import column_constants
from rowcast.trainer.execute.streams import Streams

BLOCK_WORDS = 2**20  # words of rows checked at a time: limits the temporary memory


@dataclass(frozen=True, slots=True)
class RequestedChecksums:
    """The checksums that one plan or barrier requests."""

    checksums: Tensor  # i64 [n] on the host, in the order of the parts
    parts: dict[str, tuple[Tensor, Tensor]]  # by name: i32 slots on the device, and their part of `checksums`


NONE_REQUESTED = RequestedChecksums(torch.empty(0, dtype=torch.int64, device="cpu"), {})


class RowChecks:
    """Issues the checks. Called by the main thread."""

    def __init__(self, records: Sequence[Tensor], streams: Streams) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        self._records = records
        self._streams = streams
        self._constants = [self._constants_of(rows.shape[1]) for rows in records]

    def _constants_of(self, num_words: int) -> Tensor:
        constants = self._streams.allocate(8 * num_words).view(torch.int64)
        self._streams.fill.copy(torch.from_numpy(column_constants(num_words)), constants)
        return constants

    def requested(self, arrays: dict[str, Tensor], names: Sequence[str]) -> RequestedChecksums:
        """`names`: the arrays of slots to check, in their order. A run without `--verify` has none of them."""
        slots_by_name = {name: arrays[name] for name in names if name in arrays}
        num_slots = sum(map(len, slots_by_name.values()))
        pinned = self._streams.device.type == "cuda"
        checksums = torch.empty(num_slots, dtype=torch.int64, device="cpu", pin_memory=pinned)
        parts, end = {}, 0
        for name, slots in slots_by_name.items():
            parts[name] = (slots, checksums[end : end + len(slots)])
            end += len(slots)
        return RequestedChecksums(checksums, parts)

    def issue(self, requested: RequestedChecksums, name: str, group: int) -> None:
        """Issues the checksums of one part, whose rows are in `group`."""
        slots, out = requested.parts.get(name, (None, None))
        if slots is None or out is None or not len(slots):
            return
        rows, constants = self._records[group], self._constants[group]
        self._streams.fill.run(lambda: write_checksums(rows, slots, constants, out))


def write_checksums(rows: Tensor, slots: Tensor, constants: Tensor, out: Tensor) -> None:
    """Computes out[i] = checksum of rows[slots[i]]; `rows` f32, `slots` i32, `constants` i64, `out` i64 on the host."""
    block = max(1, BLOCK_WORDS // rows.shape[1])
    for start in range(0, len(slots), block):
        words = rows.index_select(0, slots[start : start + block]).view(torch.int32)
        out[start : start + block].copy_((words * constants).sum(dim=1), non_blocking=True)
