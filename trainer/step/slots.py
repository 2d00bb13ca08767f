"""Holds the rows on the device, one per slot, and moves them between slots and staging.

Everything here is work of the fill stream, issued by the main thread.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import RowSpan
from rowcast.trainer.device.streams import Streams, memory_for
from rowcast.trainer.step.sender import EvictTask, Sender
from rowcast.trainer.step.staging import Staging, StagingSpan


class Slots:
    def __init__(self, groups: tuple[GroupSpec, ...], records: list[Tensor], streams: Streams) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        self.groups = groups
        self.records = records
        self.streams = streams
        self._widths = [group.record_floats for group in groups]

    @property
    def cache_bytes(self) -> int:
        return sum(records.nbytes for records in self.records)

    @property
    def table_bytes(self) -> int:
        """Of all rows of all tables, on the device or not."""
        return sum(group.num_rows * group.record_bytes for group in self.groups)

    def gather(self, spans: Sequence[RowSpan], slots: Sequence[Tensor], out: Tensor) -> list[tuple[RowSpan, Tensor]]:
        """Issues copies of rows from their slots to `out`, in staging; returns each span with its rows there."""
        sources, floats = [], out.view(torch.float32)
        for span, span_slots in zip(spans, slots, strict=True):
            rows = self._rows(floats, span, span.offset)
            self.streams.fill.gather(self.records[span.group], span_slots, rows)
            sources.append((span, rows))
        return sources

    def scatter(self, content: Tensor, spans: Sequence[RowSpan], slots: Sequence[Tensor]) -> None:
        """Issues copies of rows from `content`, which is in staging and begins with the first span, to `slots`, i64."""
        floats = content.view(torch.float32)
        for span, span_slots in zip(spans, slots, strict=True):
            rows = self._rows(floats, span, span.offset - spans[0].offset)
            self.streams.fill.scatter(rows, span_slots, self.records[span.group])

    def nbytes(self, spans: Sequence[RowSpan]) -> int:
        """Returns the bytes from offset 0 of a piece to the end of its last span."""
        return spans[-1].offset + spans[-1].count * self.groups[spans[-1].group].record_bytes if spans else 0

    def _rows(self, floats: Tensor, span: RowSpan, offset: int) -> Tensor:
        """Returns a span at byte `offset` of staging, as f32 [count, record_floats]."""
        width, first = self._widths[span.group], offset // 4
        return floats[first : first + span.count * width].view(span.count, width)


class EvictStaging:
    """Holds rows that have left their slots until the sender has copied them to the ring. Runs on the main thread."""

    def __init__(self, slots: Slots, nbytes: int, sender: Sender) -> None:
        self.nbytes = nbytes
        self._slots = slots
        self._staging = Staging(slots.streams, nbytes)
        self._sender = sender

    def room(self, spans: Sequence[RowSpan]) -> StagingSpan | None:
        """Returns space for these rows; None while there is not enough."""
        return self._staging.take(self._slots.nbytes(spans))

    def send(
        self,
        spans: Sequence[RowSpan],
        slots: Sequence[Tensor],
        room: StagingSpan,
        *,
        step: int | None,
        barrier: int | None,
        piece: int,
        last: bool,
    ) -> None:
        """Issues the gather of the rows into `room` and queues them for the sender as one message; see EvictTask."""
        fill = self._slots.streams.fill
        if room.after is not None:
            fill.wait(room.after, "evict_staging")
        sources = self._slots.gather(spans, slots, room.content)
        self._sender.send_rows(
            EvictTask(
                step=step,
                barrier=barrier,
                piece=piece,
                last=last,
                sources=sources,
                room=room,
                gathered=fill.record(),
            )
        )


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[Tensor]:
    """Allocates the slots of each group, f32 [slots, record_floats]. Raises ConfigError if device memory is short."""
    nbytes = sum(rows * group.record_bytes for rows, group in zip(slots, groups, strict=True))
    with memory_for(f"cache.capacity: no room for {nbytes} bytes of slots on {device}", "make it smaller"):
        return [
            torch.zeros(rows, group.record_floats, dtype=torch.float32, device=device)
            for rows, group in zip(slots, groups, strict=True)
        ]
