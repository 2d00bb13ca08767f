"""Computes checksums of rows in their slots when a plan or a barrier requests them: the trainer's half of `--verify`.

The prefetcher lists slots, in arrays of the plan (`rowcast.protocol.row_checksum`); the trainer knows no keys and
compares nothing. All work is on the fill stream, so it needs no additional waits:

    victims     after `fill_after`, before the first row of their group is filled: as the last step left them,
                clean victims included
    fetched     after the plan's last row is filled, before its look-up
    barrier     with the first gathered rows; nothing else runs then

The host reads the checksums when it reads other results of the step: after the step's event, or after the event of a
barrier's last copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowcast.protocol.messages import Flush, PlanHeader, RowChecksums, RowSpan
from rowcast.protocol.row_checksum import (
    barrier_name,
    checksum_messages,
    column_constants,
    fetched_name,
    victims_name,
)
from rowcast.trainer.device.streams import Streams

BLOCK_WORDS = 2**20  # words of rows checked at a time: limits the temporary memory


@dataclass(frozen=True, slots=True)
class Requested:
    """The checksums that one plan or barrier requests."""

    checksums: Tensor  # i64 [n] on the host, in the order of `parts`
    parts: dict[str, tuple[Tensor, Tensor]]  # by name: i32 slots on the device, and their slice of `checksums`


class RowChecks:
    """Called at every plan and barrier, even without requests. The main thread calls everything except `report`."""

    def __init__(self, records: Sequence[Tensor], streams: Streams) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        self._records = records
        self._streams = streams
        self._constants = [self._constants_of(rows.shape[1]) for rows in records]
        self._requested: dict[tuple[int | None, int | None], Requested] = {}  # by step and barrier, until reported
        groups = range(len(records))
        self._plan_names = [name for group in groups for name in (fetched_name(group), victims_name(group))]

    def _constants_of(self, num_words: int) -> Tensor:
        constants = self._streams.allocate(8 * num_words).view(torch.int64)
        self._streams.fill.copy(torch.from_numpy(column_constants(num_words)), constants)
        return constants

    def plan_opened(self, step: int, plan: PlanHeader, arrays: dict[str, Tensor]) -> None:
        """`arrays`: of the plan, by name."""
        if plan.num_checksums:
            self._requested[step, None] = self._open(arrays, self._plan_names)

    def before_fill(self, step: int, rows: Sequence[RowSpan]) -> None:
        """Called before a piece's `rows` are filled."""
        if (requested := self._requested.get((step, None))) is None:
            return
        for span in rows:
            if span.start == 0:  # every victim of the group is still in its slot
                self._issue(requested, victims_name(span.group), span.group)

    def plan_filled(self, step: int) -> None:
        if (requested := self._requested.get((step, None))) is None:
            return
        for group in range(len(self._records)):
            self._issue(requested, fetched_name(group), group)

    def barrier_opened(self, barrier: Flush, slots: dict[str, Tensor]) -> None:
        """`slots`: of the barrier, by name. No row has left them."""
        if barrier.num_checksums:
            names = [barrier_name(group) for group in range(len(self._records))]
            requested = self._requested[barrier.after_step, barrier.barrier] = self._open(slots, names)
            for group, name in enumerate(names):
                self._issue(requested, name, group)

    def report(self, step: int | None, barrier: int | None) -> Iterator[RowChecksums]:
        """Yields what a plan or barrier has requested, once its checks are complete. The sender's thread calls it."""
        requested = self._requested.pop((step, barrier), None)
        if requested is not None:
            yield from checksum_messages(step, barrier, requested.checksums.numpy())

    def _open(self, arrays: dict[str, Tensor], names: Sequence[str]) -> Requested:
        """`names`: the arrays of slots to check, in their order."""
        slots_by_name = {name: arrays[name] for name in names if name in arrays}
        num_slots = sum(map(len, slots_by_name.values()))
        pinned = self._streams.device.type == "cuda"
        checksums = torch.empty(num_slots, dtype=torch.int64, device="cpu", pin_memory=pinned)
        parts, end = {}, 0
        for name, slots in slots_by_name.items():
            parts[name] = (slots, checksums[end : end + len(slots)])
            end += len(slots)
        return Requested(checksums, parts)

    def _issue(self, requested: Requested, name: str, group: int) -> None:
        """Issues the checksums of one of `parts`, with rows in `group`."""
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
