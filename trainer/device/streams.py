"""Orders device work by streams and events, on CUDA and on the CPU.

    PlainStreams    runs all work immediately, in order; for CPU training
    CudaStreams     streams of a CUDA device

`Stream.run` calls its closure at once on CUDA (the device queues what the closure issues) and on PlainStreams. Tests
queue the closure and run it later (`tests/support/seeded_streams.py`). Only an event shows that work is complete:
`Streams.done(event, why)`.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Stage

Closure = Callable[[], None]

# only if ranks divide a batch
RankWait = Literal[
    "rows_packed",  # exchange: the rows for other ranks have left their slots
    "rows_received",  # compute: the rows that this rank's parts look up have arrived
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


class Event(Protocol):
    def query(self) -> bool:
        """Returns whether all work issued before the event was recorded is complete."""


class Work(Protocol):
    """A collective in progress, such as a `torch.distributed.Work`."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Makes later work on the current stream, or in this thread, wait for it."""


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def seconds_since(self, earlier: "CudaMark") -> float:
        """Returns the time between two marks of one stream, once the work before both is complete."""
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


class Stream(ABC):
    """Runs work in the order it was issued; `wait` delays what is issued after it."""

    is_device = False  # True: the work runs later, on a device

    @abstractmethod
    def run(self, closure: Closure) -> None: ...

    @abstractmethod
    def wait(self, event: Event, why: Wait) -> None: ...

    @abstractmethod
    def record(self) -> Event: ...

    def communicate(self, start: Callable[[], Work]) -> None:
        """Starts a collective; later work waits until it is complete."""
        self.run(lambda: ignore(start().wait()))

    def mark(self) -> CudaMark:
        """Marks the moment between the work issued before and after, on the device's clock."""
        raise NotImplementedError(f"{type(self).__name__} runs on the host and has no clock of its own")

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copies: out[:] = source, both contiguous and of one dtype."""
        self.run(lambda: copy(source, out))

    def gather(self, rows: Tensor, slots: Tensor, out: Tensor) -> None:
        """out[i] = rows[slots[i]]; slots int32, read when the work runs."""
        self.run(lambda: gather(rows, slots, out))

    def scatter(self, source: Tensor, slots: Tensor, rows: Tensor) -> None:
        """rows[slots[i]] = source[i]; slots int64 and distinct, read when the work runs."""
        self.run(lambda: scatter(source, slots, rows))


def ignore(result: object) -> None:
    pass


def copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source, non_blocking=True)


def gather(rows: Tensor, slots: Tensor, out: Tensor) -> None:
    torch.index_select(rows, 0, slots, out=out)


def scatter(source: Tensor, slots: Tensor, rows: Tensor) -> None:
    rows.index_copy_(0, slots, source)


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


class CudaStream(Stream):
    is_device = True

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """`priority`: lower is earlier, when kernels of several streams are ready."""
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def run(self, closure: Closure) -> None:
        with torch.cuda.stream(self._stream):
            closure()

    def wait(self, event: Event, why: Wait) -> None:
        assert isinstance(event, torch.cuda.Event), "the event belongs to another kind of stream"
        self._stream.wait_event(event)

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)


class CurrentCudaStream(Stream):
    """Torch's current stream at each call, which a training script chooses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, closure: Closure) -> None:
        closure()

    def wait(self, event: Event, why: Wait) -> None:
        assert isinstance(event, torch.cuda.Event), "the event belongs to another kind of stream"
        torch.cuda.current_stream(self._device).wait_event(event)

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class CudaStreams(Streams):
    def __init__(self, device: torch.device, compute: Stream | None = None) -> None:
        """`compute`: used instead of a new stream."""
        self.device = device
        # rows are moved by short kernels, which would queue behind those of a step that fill the device
        self.copy_in, self.fill, self.evict = (CudaStream(device, priority=-1) for _ in range(3))
        self.compute = self.exchange = compute or CudaStream(device)

    def allocate(self, nbytes: int) -> Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self.settle()  # the zeros were written on torch's current stream, and all streams will use them
        return memory

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is CUDA if there is a device, a different one for each rank of a host. Raises ValueError for a device that
    torch does not know or have."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"{local_rank + 1} trainers run on this host, where torch sees {torch.cuda.device_count()} CUDA "
                'devices; start fewer trainers on a host, or set trainer.device = "cpu"'
            )
        return torch.device("cuda", local_rank) if local_rank else torch.device("cuda")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"trainer.device = {name!r} is not a device that torch knows; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"trainer.device = {name!r}, but torch sees no CUDA device here; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"trainer.device = {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"trainer.device = {name!r}, but this machine has cuda:0 to cuda:{last}; use one of these")
    return device


def warm_up_sqrt() -> None:
    """Runs the process's first `torch.sqrt` in one thread: in several, its roots may be inaccurate (pytorch#188792)."""
    torch.ones(1, device="cpu").sqrt()


def device_name(device: torch.device) -> str:
    """Returns `cpu`, or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def float32_products(device: torch.device) -> str:
    """Returns `whole`, or the precision that torch was told to use instead."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return {"none": "whole", "ieee": "whole"}.get(found := str(backend.matmul.fp32_precision), found)


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else PlainStreams()


def adopted_streams(device: torch.device) -> Streams:
    """Makes streams for steps that a training script computes, on torch's current stream."""
    return CudaStreams(device, CurrentCudaStream(device)) if device.type == "cuda" else PlainStreams()


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


def peak_device_bytes(device: torch.device, cache_bytes: int) -> int:
    """Returns the peak memory of the device. On the CPU it is `cache_bytes`: the rest belongs to the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else cache_bytes


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


def release_memory(device: torch.device) -> None:
    """Frees unused objects, reference cycles included, and returns memory that torch has cached."""
    gc.collect()
    if device.type == "cuda":
        with on_device(device):
            torch.cuda.empty_cache()


def device_random_state(device: torch.device) -> Tensor:
    """Returns u8. `device` must not be the CPU."""
    return torch.cuda.get_rng_state(device)


def set_device_random_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device)
