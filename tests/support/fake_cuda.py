"""A CUDA device without one: `torch.cuda` as far as the product uses it, over the queues of the seeded scheduler.

Work that a CUDA stream of the product runs is queued on the stream that is torch's current one, and runs later in an
order that the seed decides; memory of the device and page-locked memory is memory of the host, noted by its addresses.
Kernels, the driver's own checks and times are not shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rowcast.trainer.device.cuda import CudaStream, CudaStreams, CurrentCudaStream
from rowcast.trainer.device.streams import Closure, Event, Stream, Wait
from tests.support.seeded_streams import SeededEvent, SeededStream, SeededStreams

CUDA = torch.device("cuda")
PAGE_LOCKED_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class FakeStream:
    """A `torch.cuda.Stream`."""

    def __init__(self, cuda: "FakeCuda", queue: SeededStream, priority: int) -> None:
        self.queue, self.priority = queue, priority
        self._cuda = cuda

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.recorded, "CUDA does not wait for an event that was never recorded"
        self.queue.wait(event, "filled")  # nothing is left out here

    def issue(self, work: Closure) -> None:
        """Runs `work` now if it was issued by work of this stream, which is then what comes next."""
        if self._cuda.running is self:
            work()
        else:
            self.queue.run(lambda: self._cuda.execute(self, work))


class FakeEvent(SeededEvent):
    """A `torch.cuda.Event`; its time is the number of works before it."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()
        self.recorded, self._has_time, self._at = False, enable_timing, 0

    def record(self, stream: FakeStream) -> None:
        assert not self.recorded, "each event of the product is recorded once"
        self.recorded = True
        stream.issue(lambda: self._happen(stream._cuda))

    def _happen(self, cuda: "FakeCuda") -> None:
        self.happened, self._at = True, cuda.works

    def elapsed_time(self, later: "FakeEvent") -> float:
        """Milliseconds."""
        for event in (self, later):
            assert event._has_time, "events without enable_timing have no time"
            assert event.happened, "cudaErrorNotReady"
        return float(later._at - self._at)


class FakeCuda(TorchFunctionMode):
    """The device, from entering this context to leaving it, in this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, without: Wait | None = None) -> None:
        super().__init__()
        self.works = 0  # that ran so far
        self.running: FakeStream | None = None
        self.registered: dict[int, int] = {}  # address -> bytes
        self.refused: set[int] = set()  # addresses that are not to be page-locked
        self.stale_error = False
        self.pageable = 0  # copies that CUDA would make while the host waits
        self.streams: list[FakeStream] = []
        self._scheduler = SeededStreams(seed)
        self._free = list(self._scheduler._streams)
        self._memory: dict[str, list[Tensor]] = {"device": [], "pinned": []}  # kept: no address is used twice
        self._random = torch.arange(16, dtype=torch.uint8)
        self.current = self.new_stream()
        for name, stand_in in self._stand_ins().items():
            monkeypatch.setattr(f"torch.cuda.{name}", stand_in)
        for kind in (CudaStream, CurrentCudaStream):
            monkeypatch.setattr(kind, "run", self._queued(kind.run))
            monkeypatch.setattr(kind, "wait", left_out(kind.wait, without))
        done = CudaStreams.done
        monkeypatch.setattr(CudaStreams, "done", lambda own, event, why: why == without or done(own, event, why))
        monkeypatch.setattr(CudaStreams, "advance", lambda own: self.advance())

    def _stand_ins(self) -> dict[str, Any]:
        return {
            "Stream": lambda device, priority=0: self.new_stream(priority),
            "Event": FakeEvent,
            "stream": self._with_stream,
            "current_stream": lambda device: self.current,
            "synchronize": lambda device: self.synchronize(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop),
            "device": lambda device: nullcontext(),
            "empty_cache": lambda: None,
            "_sleep": lambda cycles: self.spend(1),
            "max_memory_allocated": lambda device: sum(memory.nbytes for memory in self._memory["device"]),
            "get_rng_state": lambda device: self._random.clone(),
            "set_rng_state": lambda state, device: self._random.copy_(state),
        }

    # streams

    def new_stream(self, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(self, self._free.pop(0), priority))
        return self.streams[-1]

    def _queued(self, run: Callable[[Any, Closure], None]) -> Callable[[Stream, Closure], None]:
        """`run` itself chooses the stream on which the closure then waits for its turn."""
        return lambda stream, closure: run(stream, lambda: self.current.issue(closure))

    @contextmanager
    def _with_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def execute(self, stream: FakeStream, work: Closure) -> None:
        self.works += 1
        self.running = stream
        try:
            with self._with_stream(stream):
                work()
        finally:
            self.running = None

    def spend(self, works: int) -> None:
        """Lets the time of that many works pass."""
        self.works += works

    def advance(self) -> bool:
        return self._scheduler.advance()

    def synchronize(self) -> None:
        assert self.running is None, "work of a stream waits for the device"
        while self.advance():
            pass
        assert not any(stream.queue._queue for stream in self.streams), "the device would never come to rest"

    # memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.holds("device", args[0])
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            out, source = args
            self.pageable += self._is_pageable(source, out) or self._is_pageable(out, source)
        is_device = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        is_pinned = kwargs.pop("pin_memory", False)
        if is_device:
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if is_device or is_pinned:
            self._memory["device" if is_device else "pinned"].append(made)
        if func is torch.Tensor.add_ and self.holds("device", args[0]) and self.stale_error:  # surely a kernel
            self.stale_error = False
            raise RuntimeError("the error of an earlier call")
        return made

    def _is_pageable(self, host: Tensor, device: Tensor) -> bool:
        return self.holds("device", device) and not (
            self.holds("device", host) or self.holds("pinned", host) or self._is_registered(host)
        )

    def holds(self, kind: str, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(own.data_ptr() <= first < own.data_ptr() + own.nbytes for own in self._memory[kind])

    def _is_registered(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(start <= first < start + nbytes for start, nbytes in self.registered.items())

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        assert not address % 4096, "the driver registers whole pages"
        if address in self.refused:
            self.stale_error = True
            return PAGE_LOCKED_ALREADY
        self.registered[address] = nbytes
        return 0


def left_out(wait: Callable[[Any, Event, Wait], None], without: Wait | None) -> Callable[[Any, Event, Wait], None]:
    return lambda stream, event, why: None if why == without else wait(stream, event, why)
