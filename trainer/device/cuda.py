"""Chooses the device and makes what a run has on it: streams and their clocks, page-locked memory."""

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.device.streams import (
    Closure,
    Event,
    HostMemory,
    Lap,
    PhaseClock,
    PlainStreams,
    Spent,
    Stream,
    Streams,
    Wait,
    on_device,
)


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def seconds_since(self, earlier: "CudaMark") -> float:
        """Returns the time between two marks of one stream, once the work before both is complete."""
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


class CudaStream(Stream):
    is_device = True

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """`priority`: lower is earlier, when kernels of several streams are ready."""
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def run(self, closure: Closure) -> None:
        with torch.cuda.stream(self._stream):
            closure()

    def memory_like(self, tensor: Tensor, count: int) -> Tensor:
        with torch.cuda.stream(self._stream):  # torch reuses dropped memory in the order of the stream that took it
            return super().memory_like(tensor, count)

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


class DeviceClock(PhaseClock):
    """On the timeline, a step's phases end when the host saw the step complete, up to one turn of the main loop
    late."""

    def __init__(self, stream: Stream, spent: Spent) -> None:
        super().__init__(spent)
        self._stream = stream
        self._marks: deque[tuple[int, Lap | None, Any]] = deque()  # step, the lap that ends here, mark

    def begin(self, step: int) -> None:
        self._marks.append((step, None, self._stream.mark()))

    def lap(self, lap: Lap) -> None:
        self._marks.append((self._marks[-1][0], lap, self._stream.mark()))

    def complete(self, step: int) -> None:
        laps: list[tuple[Lap, float]] = []
        before: Any = None
        while self._marks and self._marks[0][0] <= step:
            _, lap, mark = self._marks.popleft()
            if lap is not None and before is not None:
                laps.append((lap, mark.seconds_since(before)))
            before = mark
        ended_s = time.perf_counter()
        for lap, seconds in reversed(laps):
            self._spent(lap, seconds, step, ended_s)
            ended_s -= seconds


def phase_clock(stream: Stream, spent: Spent) -> PhaseClock:
    return DeviceClock(stream, spent) if stream.is_device else PhaseClock(spent)


class Bounced(HostMemory):
    """A page-locked buffer as large as the ring, if the system refuses to lock the ring.

        ring -> buffer -> device      device -> buffer -> ring

    A piece has the same offset in the buffer as in the ring. So its bytes in the buffer and in the ring are free at the
    same time, without separate bookkeeping."""

    def __init__(self, ring: Bytes, buffer: Tensor) -> None:
        """`ring` as it is mapped here; `buffer`: u8, of the same size."""
        assert len(buffer) == len(ring), f"the buffer has {len(buffer)} bytes, the ring {len(ring)}"
        self._start = ring.ctypes.data
        self._buffer = buffer

    def arriving(self, payload: Bytes) -> Tensor:
        return self.leaving(payload).copy_(torch.from_numpy(payload))

    def leaving(self, payload: Bytes) -> Tensor:
        offset = payload.ctypes.data - self._start
        return self._buffer[offset : offset + len(payload)]

    def landed(self, payload: Bytes) -> None:
        torch.from_numpy(payload).copy_(self.leaving(payload))


def host_memory(ring: Bytes, device: torch.device, *, page_locked: bool) -> HostMemory:
    """`page_locked`: the ring itself is page-locked. Raises ConfigError if the system refuses a buffer for it too."""
    if page_locked or device.type == "cpu":
        return HostMemory()
    try:
        return Bounced(ring, torch.empty(len(ring), dtype=torch.uint8, device="cpu", pin_memory=True))
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"transport.ring: no room for {len(ring)} bytes of page-locked memory beside a ring ({first_line}); raise "
            "`ulimit -l`, or make it smaller"
        ) from None


class RingEnds:
    """The trainer's ends of both rings, and the host memory that copies between them and the device use."""

    def __init__(self, fetch: Bytes, back: Bytes, device: torch.device, *, page_locked: bool, mirrored: bool) -> None:
        """`page_locked`: both buffers are. `mirrored`: each process has a copy of each ring, kept equal over TCP."""
        self.page_locked = page_locked
        self.fetch = RingReader(fetch, mirror=mirrored)
        self.back = RingWriter(back, always_checksum=mirrored)
        self.fetch_memory = host_memory(fetch, device, page_locked=page_locked)
        self.back_memory = host_memory(back, device, page_locked=page_locked)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is CUDA if there is a device, a different one for each rank of a host. Raises ConfigError for a device
    that torch does not know or have."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{local_rank + 1} trainers run on this host, where torch sees {torch.cuda.device_count()} CUDA "
                'devices; start fewer trainers on a host, or set trainer.device = "cpu"'
            )
        return torch.device("cuda", local_rank) if local_rank else torch.device("cuda")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"trainer.device = {name!r} is not a device that torch knows; use auto, cpu or cuda"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"trainer.device = {name!r}, but torch sees no CUDA device here; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device = {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"trainer.device = {name!r}, but this machine has cuda:0 to cuda:{last}; use one of these")
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
    return {"none": "whole", "ieee": "whole"}.get(precision := str(backend.matmul.fp32_precision), precision)


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else PlainStreams()


def adopted_streams(device: torch.device) -> Streams:
    """Makes streams for steps that a training script computes, on torch's current stream."""
    return CudaStreams(device, CurrentCudaStream(device)) if device.type == "cuda" else PlainStreams()


def peak_device_bytes(device: torch.device, cache_bytes: int) -> int:
    """Returns the peak memory of the device. On the CPU it is `cache_bytes`: the rest belongs to the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else cache_bytes


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


@contextmanager
def page_locked(buffers: Sequence[Bytes], device: torch.device) -> Iterator[bool]:
    """Registers page-aligned buffers with the driver within the context; yields whether all were registered.

    A container or a memlock limit may refuse. Copies then use a buffer (`Bounced`), and a warning says what
    to change."""
    if device.type != "cuda":
        yield False
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # the context must exist before anything is registered
    registered = []
    for buffer in buffers:
        code = int(runtime.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
        if code != 0:
            # a harmless kernel takes the error, which the next launch would raise
            with suppress(RuntimeError):
                # an addition is always a kernel; zeros may be a memset, which clears nothing
                torch.ones(1, device=device).add_(1)
            get_logger().warning(
                "rings are not pinned", bytes=buffer.nbytes, cuda_error=code, change="raise `ulimit -l`"
            )
            break
        registered.append(buffer)
    try:
        yield len(registered) == len(buffers)
    finally:
        torch.cuda.synchronize(device)
        for buffer in registered:
            runtime.cudaHostUnregister(buffer.ctypes.data)
