"""Checksums of rows as they stand in their slots, where a plan or a barrier asks for them: the trainer's half of `--verify`.

The prefetcher names slots, in arrays of the plan (`rowcast.protocol.row_checksum`); this side knows no key and draws no conclusion. All of it is
work of the fill stream, so it needs no wait but those that are there:

    victims     after `fill_after` and before the first row of their group is filled: as the last step left them, clean ones too
    fetched     after the plan's last row is filled, before its look-up
    barrier     with the first rows that are gathered; nothing else runs

The host reads the results where it reads others of the step: after its event, or after that of a barrier's last copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowcast.protocol.row_checksum import column_constants
from rowcast.trainer.execute.streams import Streams

BLOCK_WORDS = 2**20  # of rows at a time: the temporary memory of a check


@dataclass(frozen=True, slots=True)
class Asked:
    """What one plan or barrier asks for."""

    checksums: Tensor  # i64 [n] on the host, in the order of the parts
    parts: dict[str, tuple[Tensor, Tensor]]  # by name: i32 slots on the device, and their part of the checksums


class RowChecks:
    """Issues the work; called by the main thread."""

    def __init__(self, records: Sequence[Tensor], streams: Streams) -> None:
        """`records` f32 [slots, record_floats] a group."""
        self._records = records
        self._streams = streams
        self._constants = [self._constants_of(rows.shape[1]) for rows in records]

    def _constants_of(self, num_words: int) -> Tensor:
        constants = self._streams.allocate(8 * num_words).view(torch.int64)
        self._streams.fill.copy(torch.from_numpy(column_constants(num_words)), constants)
        return constants

    def asked(self, arrays: dict[str, Tensor], names: Sequence[str]) -> Asked:
        """`names` of the arrays that ask, in their order; none of them is there in a run that does not verify."""
        slots = {name: arrays[name] for name in names if name in arrays}
        pinned = self._streams.device.type == "cuda"
        checksums = torch.empty(sum(map(len, slots.values())), dtype=torch.int64, device="cpu", pin_memory=pinned)
        parts, end = {}, 0
        for name, own in slots.items():
            parts[name] = (own, checksums[end : end + len(own)])
            end += len(own)
        return Asked(checksums, parts)

    def issue(self, asked: Asked, name: str, group: int) -> None:
        """Has the checksums of one part computed, of rows of `group`."""
        slots, out = asked.parts.get(name, (None, None))
        if slots is None or out is None or not len(slots):
            return
        rows, constants = self._records[group], self._constants[group]
        self._streams.fill.run(lambda: write_checksums(rows, slots, constants, out))


def write_checksums(rows: Tensor, slots: Tensor, constants: Tensor, out: Tensor) -> None:
    """out[i] = checksum of rows[slots[i]]; `rows` f32, `slots` i32, `constants` i64, `out` i64 on the host."""
    block = max(1, BLOCK_WORDS // rows.shape[1])
    for start in range(0, len(slots), block):
        words = rows.index_select(0, slots[start : start + block]).view(torch.int32)
        out[start : start + block].copy_((words * constants).sum(dim=1), non_blocking=True)
