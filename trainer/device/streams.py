"""Orders device work by streams and events, times it, and moves bytes of rings and rows. `cuda.py` has what needs CUDA.

    PlainStreams    runs all work immediately, in order; for CPU training
    CudaStreams     streams of a CUDA device

`Stream.run` calls its closure at once on CUDA (the device queues what the closure issues) and on PlainStreams. Tests
queue the closure and run it later (`tests/support/seeded_streams.py`). Only an event shows that work is complete:
`Streams.done(event, why)`.

Rows are copied between slots and neighbouring memory, of all groups in one compiled call on a CPU:

    gather     rows[slots[i]] -> out[i]           scatter    source[i] -> rows[slots[i]]
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rowcast.protocol.messages import Released, RingRef
from rowcast.protocol.transport.ring import RingReader, release
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.compiled import arrays_of, c_memcpy, compiled_loop, prefetch_at
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Stage

AHEAD = 8  # rows between prefetching and copying
i32_at, i64_at = arrays_of(np.int32), arrays_of(np.int64)
Closure = Callable[[], None]

# only if ranks divide a batch
RankWait = Literal[
    "rows_packed",  # exchange: the rows for other ranks have left their slots
    "rows_received",  # compute: the rows that this rank's parts look up have arrived
    # only if one rank owns a whole table:
    "vectors_packed",  # exchange: this rank has pooled its tables for the parts of others
    "vectors_received",  # compute: the vectors of this rank's parts have arrived from other owners
    "vector_gradients_packed",  # exchange: the gradients of these are together
    "vector_gradients_received",  # compute: those of the vectors that this rank has pooled for others have arrived
    # in any case:
    "parts_packed",  # exchange: gradients, losses and counts of this rank's parts are added up
    "parts_received",  # compute: all parts' values for this rank's rows, and for its slice of the rest, have arrived
    "slice_summed",  # exchange: this rank's slice is added up
    "sum_gathered",  # compute: every rank's slice has arrived
    "state_gathered",  # host: all ranks' evaluation counts, for a checkpoint, have arrived
    "exchanged",  # exchange: a collective is complete, so its memory may be read or reused
]

Wait = Literal[
    "copied",  # fill: the plan's arrays and rows have arrived; the step's look-up follows its fill
    "fill_after",  # fill: the last step that uses a victim is complete
    "evict_staging",  # fill: the previous victims have left these bytes of evict staging
    "fill_staging",  # copy-in: the previous rows have left these bytes of fill staging
    "filled",  # compute: the step's rows are in their slots
    "used",  # compute: the step's work that a training script issued on other streams is complete
    "gathered",  # evict: the victims are in evict staging
    "sent",  # host: the victims are in the ring, RowsBack may be sent
    "released",  # host: a piece was copied out of the ring, its space may be reused
    "results",  # host: the step is complete, its loss may be read
    RankWait,
]


# exchange: rows, sums of gradients and slices are packed, sent, awaited and added; loop.py names the others
Phase = Literal["gather", "fill", "exchange", "lookup", "forward", "backward", "update"]
Lap = Phase | Literal["ranks"]  # ranks: the time within `exchange` when collectives are in progress

Shown = Callable[[], AbstractContextManager[object]]  # records a span of the timeline


class Move(NamedTuple):
    """Some rows of a group. Views cost more than copying a few rows, so only a device gets them."""

    rows: Tensor  # [any, D] of any stride
    all_slots: Tensor  # of these, those from `first` on
    first: int
    size: int  # rows
    memory: Tensor  # flat, in the dtype of `rows`; the rows' neighbours begin at `begin`
    begin: int

    @property
    def slots(self) -> Tensor:
        return self.all_slots[self.first : self.first + self.size]

    @property
    def beside(self) -> Tensor:
        width = self.rows.shape[1]
        return self.memory[self.begin : self.begin + self.size * width].view(self.size, width)


def move(rows: Tensor, slots: Tensor, beside: Tensor) -> Move:
    """Of all these slots [n]; `beside` [n, D] is contiguous."""
    return Move(rows, slots, 0, len(slots), beside.view(-1), 0)


def gather(moves: Sequence[Move]) -> None:
    """beside[i] = rows[slots[i]] of each move; slots i32."""
    if moves and moves[0].rows.device.type == "cpu":
        check(gather_each(places_of(moves)))
        return
    for move in moves:
        torch.index_select(move.rows, 0, move.slots, out=move.beside)


def scatter(moves: Sequence[Move]) -> None:
    """rows[slots[i]] = beside[i] of each move; slots i64 and distinct."""
    if moves and moves[0].rows.device.type == "cpu":
        check(scatter_each(places_of(moves)))
        return
    for move in moves:
        move.rows.index_copy_(0, move.slots, move.beside)


def places_of(moves: Sequence[Move]) -> I64:
    """Returns [*, 7]: addresses of rows, slots and neighbours, how many these are, bytes of a row, bytes from row to
    row, and how many rows there are."""
    places = []
    for rows, slots, first, size, memory, begin in moves:
        item, (num_rows, width) = memory.itemsize, rows.shape
        at = slots.data_ptr() + first * slots.itemsize, memory.data_ptr() + begin * item
        places.append((rows.data_ptr(), *at, size, width * item, rows.stride(0) * item, num_rows))
    return np.array(places, np.int64).reshape(-1, 7)


def check(moved: bool) -> None:
    if not moved:
        raise IndexError("a row is moved to or from a slot that does not exist: a bug of rowcast")


@compiled_loop
def gather_each(places: I64) -> bool:
    """Returns whether every slot exists."""
    for k in range(len(places)):
        rows, beside, count, width, stride = places[k, 0], places[k, 2], places[k, 3], places[k, 4], places[k, 5]
        slots = i32_at(places[k, 1], count)
        for i in range(count):
            if i + AHEAD < count:
                prefetch_at(np.uint64(rows), slots[i + AHEAD] * stride)
            if np.uint64(slots[i]) >= np.uint64(places[k, 6]):
                return False
            c_memcpy(np.uint64(beside + i * width), np.uint64(rows + slots[i] * stride), np.uint64(width))
    return True


@compiled_loop
def scatter_each(places: I64) -> bool:
    """Returns whether every slot exists."""
    for k in range(len(places)):
        rows, beside, count, width, stride = places[k, 0], places[k, 2], places[k, 3], places[k, 4], places[k, 5]
        slots = i64_at(places[k, 1], count)
        for i in range(count):
            if i + AHEAD < count:
                prefetch_at(np.uint64(rows), slots[i + AHEAD] * stride)
            if np.uint64(slots[i]) >= np.uint64(places[k, 6]):
                return False
            c_memcpy(np.uint64(rows + slots[i] * stride), np.uint64(beside + i * width), np.uint64(width))
    return True


class Event(Protocol):
    def query(self) -> bool:
        """Returns whether all work issued before the event was recorded is complete."""


class Work(Protocol):
    """A collective in progress, such as a `torch.distributed.Work`."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Makes later work on the current stream, or in this thread, wait for the collective."""


class Mark(Protocol):
    def seconds_since(self, earlier: Any) -> float:
        """Returns the time between two marks of one stream, once the work before both is complete."""


class Stream(ABC):
    """Runs work in the order it was issued; `wait` delays what is issued after it."""

    is_device = False  # True if the work runs later, on a device

    @abstractmethod
    def run(self, closure: Closure) -> None: ...

    @abstractmethod
    def wait(self, event: Event, why: Wait) -> None: ...

    @abstractmethod
    def record(self) -> Event: ...

    def memory_like(self, tensor: Tensor, count: int) -> Tensor:
        """Returns [count] of the tensor's dtype and device, not initialised, for this stream's work. Once dropped, its
        bytes may be reused by the work issued next, on any stream that this one does not wait for."""
        return tensor.new_empty(count)

    def communicate(self, start: Callable[[], Work]) -> None:
        """Starts a collective; later work waits until it is complete."""
        self.run(lambda: ignore(start().wait()))

    def mark(self) -> "Mark":
        """Marks the moment between the work issued before and after, on the device's clock."""
        raise NotImplementedError(f"{type(self).__name__} runs on the host and has no clock of its own")

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copies: out[:] = source, both contiguous and of one dtype."""
        self.run(lambda: copy(source, out))

    def gather(self, moves: Sequence[Move]) -> None:
        """As `gather`; slots are read when the work runs."""
        self.run(lambda: gather(moves))

    def scatter(self, moves: Sequence[Move]) -> None:
        """As `scatter`; slots are read when the work runs."""
        self.run(lambda: scatter(moves))


def ignore(result: object) -> None:
    pass


def copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source, non_blocking=True)


class Streams(ABC):
    """The streams of a trainer."""

    device: torch.device
    copy_in: Stream  # host ring -> staging and arrays
    fill: Stream  # slots -> evict staging, fill staging -> slots
    compute: Stream  # look-up to update of each step
    evict: Stream  # evict staging -> host ring
    exchange: Stream  # collectives of several ranks, which must issue them in one order

    def done(self, event: Event, why: Wait) -> bool:
        """Returns whether the event has happened; the host polls and never waits."""
        return event.query()

    def allocate(self, nbytes: int) -> Tensor:
        """Returns u8 [nbytes] for every stream. Call it rarely: it waits for the device."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def settle(self) -> None:  # noqa: B027 - on the host, such work is complete already
        """Completes work issued outside these streams. Waits for the device: call it rarely."""

    def advance(self) -> bool:
        """Runs work that a test has queued. Returns whether anything ran."""
        return False


class Always:
    """An event that has always happened: its work was complete before."""

    def query(self) -> bool:
        return True


class PlainStream(Stream):
    def run(self, closure: Closure) -> None:
        closure()

    def wait(self, event: Event, why: Wait) -> None:
        pass

    def record(self) -> Event:
        return Always()


class PlainStreams(Streams):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copy_in = self.fill = self.compute = self.evict = self.exchange = PlainStream()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # untouched pages cost nothing


class Spent(Protocol):
    def __call__(self, lap: Lap, seconds: float, step: int, ended_s: float) -> None:
        """A lap of `step` took `seconds` and ended at `ended_s` (time.perf_counter())."""


def discard(lap: Lap, seconds: float, step: int, ended_s: float) -> None:
    """Implements `Spent` for a clock whose readings are not used."""


class PhaseClock:
    """Times the work on one stream, where it runs when issued: by the host's clock. Each step is a `begin` and laps."""

    def __init__(self, spent: Spent = discard) -> None:
        self._spent = spent
        self._step = 0
        self._since_s = 0.0

    def begin(self, step: int) -> None:
        self._step, self._since_s = step, time.perf_counter()

    def lap(self, lap: Lap) -> None:
        """Assigns the work issued since `begin` or the last lap to this lap."""
        now_s = time.perf_counter()
        self._spent(lap, now_s - self._since_s, self._step, now_s)
        self._since_s = time.perf_counter()  # the time of `spent` belongs to no phase

    def complete(self, step: int) -> None:
        """Called when all work up to the end of `step` is done."""


class HostMemory:
    """A ring's bytes for copies to and from the device: the ring itself. Payloads are u8 [n], views of the ring."""

    def arriving(self, payload: Bytes) -> Tensor:
        """Returns an arrived piece's bytes, u8 [n], for a copy to the device, valid until the piece is released."""
        return torch.from_numpy(payload)

    def leaving(self, payload: Bytes) -> Tensor:
        """Returns memory, u8 [n], for a copy of a piece from the device."""
        return torch.from_numpy(payload)

    def landed(self, payload: Bytes) -> None:
        """Called after that copy: puts its bytes into the ring."""


class FetchRing:
    """The ring with rows, slots and the model state. The main thread calls `release`."""

    def __init__(self, ring: RingReader, memory: HostMemory, send: Callable[[Released], None]) -> None:
        self._ring, self._memory = ring, memory
        self._send = send

    def payload(self, ref: RingRef, stamp: int) -> Tensor:
        """Returns the bytes of a piece, u8 [n], valid until released. The mail thread calls it for each piece, in
        order.

        Raises RemoteProtocolError if the bytes are not as announced."""
        return self._memory.arriving(self._ring.view(ref, stamp))

    def release(self, ref: RingRef) -> None:
        release(self._ring, ref, self._send)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` torch's current device, on which kernels are launched; does nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stage_on(device: torch.device, stage: Stage) -> Stage:
    """A stage that works on `device`. A new thread would use the first device, also when `device` is a different
    one."""

    def advance() -> bool:
        with on_device(device):
            return stage()

    return advance


@contextmanager
def memory_for(what: str, change: str) -> Iterator[None]:
    """Around an allocation. Raises ConfigError if memory is short; any other error, also a late one of CUDA, stays."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in first_line:
            raise
        raise ConfigError(f"{what} ({first_line}); {change}") from None
