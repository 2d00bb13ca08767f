"""Counts rows, bytes and slots where they move: at the store, at the rings, and at the copies on the device."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Finished, Keys, Records
from rowcast.protocol.messages import RingRef
from rowcast.protocol.transport.ring import RingSlice, RingWriter
from rowcast.runtime.arrays import I64
from rowcast.trainer.device import cuda, streams
from rowcast.trainer.device.streams import Move
from tests.support import driver, seeded_streams


@dataclass(frozen=True)
class Written:
    """Rows that were written into a ring, and where."""

    address: int
    nbytes: int
    keys: list[int]  # none where the writer knows only slots


@dataclass
class RingTraffic:
    """What one ring took, by the stamp of its pieces without the piece's number."""

    waiting: list[Written] = field(default_factory=list)  # written into pieces that are not committed yet
    row_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    all_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    keys: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def commit(self, piece: RingSlice, stamp: int) -> None:
        start, end = piece.payload.ctypes.data, piece.payload.ctypes.data + len(piece.payload)
        for written in [written for written in self.waiting if start <= written.address < end]:
            self.waiting.remove(written)
            self.row_bytes[stamp >> 20] += written.nbytes
            self.keys[stamp >> 20] += written.keys
        self.all_bytes[stamp >> 20] += len(piece.payload)


@dataclass
class Traffic:
    """Everything that moved in one run."""

    rings: list[RingTraffic] = field(default_factory=list)  # fetch, back
    writers: list["CountingWriter"] = field(default_factory=list)
    gathered: list[tuple[int, list[int]]] = field(default_factory=list)  # address of the records, slots
    gathered_bytes: int = 0
    scattered: list[tuple[int, list[int]]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)  # keys


class CountingWriter(RingWriter):
    """A ring whose pieces know what was written into them."""

    def __init__(self, buffer: npt.NDArray[np.uint8], *, always_checksum: bool) -> None:
        super().__init__(buffer, always_checksum=always_checksum)
        self.traffic = RingTraffic()
        self.addresses = range(buffer.ctypes.data, buffer.ctypes.data + len(buffer))

    def commit(self, piece: RingSlice, stamp: int, checksum: bool) -> RingRef:
        self.traffic.commit(piece, stamp)
        return super().commit(piece, stamp, checksum)


class CountingStore(MemoryStore):
    traffic: Traffic

    def read(self, keys: Keys, out: Records) -> Finished:
        self.traffic.rings[0].waiting.append(Written(out.ctypes.data, out.nbytes, keys.tolist()))
        assert out.ctypes.data in self.traffic.writers[0].addresses, "rows are read straight into the ring"
        return super().read(keys, out)

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Finished:
        self.traffic.stored += keys.tolist()
        return super().write_numbered(keys, numbers, rows)


def count_traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Counts what the next in-process run moves: call it before the run is made."""
    traffic = Traffic()

    def make_writer(buffer: npt.NDArray[np.uint8], *, always_checksum: bool) -> CountingWriter:
        writer = CountingWriter(buffer, always_checksum=always_checksum)
        traffic.writers.append(writer)
        traffic.rings.append(writer.traffic)
        return writer

    def copy(source: Tensor, out: Tensor) -> None:
        if out.data_ptr() in traffic.writers[1].addresses:
            traffic.rings[1].waiting.append(Written(out.data_ptr(), out.nbytes, []))
        out.copy_(source)

    gather_rows, scatter_rows = streams.gather, streams.scatter

    def gather(moves: Sequence[Move]) -> None:
        traffic.gathered += [(own.rows.data_ptr(), own.slots.tolist()) for own in moves]
        traffic.gathered_bytes += sum(own.beside.nbytes for own in moves)
        gather_rows(moves)

    def scatter(moves: Sequence[Move]) -> None:
        traffic.scattered += [(own.rows.data_ptr(), own.slots.tolist()) for own in moves]
        scatter_rows(moves)

    monkeypatch.setattr(CountingStore, "traffic", traffic, raising=False)
    monkeypatch.setattr(driver, "MemoryStore", CountingStore)
    for module in (driver, cuda):  # the prefetcher's end, and then the trainer's
        monkeypatch.setattr(module, "RingWriter", make_writer)
    for function in (copy, gather, scatter):
        for module in (streams, seeded_streams):
            monkeypatch.setattr(module, function.__name__, function)
    return traffic
