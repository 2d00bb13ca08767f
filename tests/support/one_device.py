"""Notes what a trainer does outside its device's context: what of it would touch another device than `trainer.device`.

There is no device here. Contexts are noted where the product enters them, by thread, as CUDA's current device belongs
to a thread; work is noted where it is issued to a stream, to a kernel or to an allocator. Backward passes run on the
caller's thread here, and for a device on autograd's own threads, which this cannot show.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rowcast.trainer.device.cuda import page_locked
from rowcast.trainer.device.streams import Closure, Event, PlainStream, PlainStreams, Wait
from rowcast.trainer.kernels import GroupLookup, RecordViews, torch_ops
from rowcast.trainer.step.memory import make_records

CONNECTION, RUN = "rowcast.trainer.run.connection", "rowcast.trainer.run.attempt"
STREAMS = "rowcast.trainer.device.streams"
USES = {
    "on_device": (STREAMS, RUN),
    "choose_kernels": ("rowcast.trainer.run.machine",),
    "make_records": ("rowcast.trainer.step.memory",),
    "page_locked": (CONNECTION,),
}


class OneDevice:
    """Stands in for the functions of `USES`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: set[tuple[str, str]] = set()  # what was done, and by which thread
        self.outside: set[tuple[str, str]] = set()  # of it, outside the context
        self._thread = threading.local()
        for name, modules in USES.items():
            for module in modules:
                monkeypatch.setattr(f"{module}.{name}", getattr(self, name))
        monkeypatch.setattr(f"{RUN}.make_streams", self.make_streams)

    def note(self, what: str) -> None:
        found = what, threading.current_thread().name
        self.work.add(found)
        if not getattr(self._thread, "depth", 0):
            self.outside.add(found)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        yield
        self._thread.depth -= 1

    def choose_kernels(self, *others: Any) -> "NotedKernels":
        self.note("kernels")
        return NotedKernels(self)

    def make_records(self, *others: Any) -> list[Tensor]:
        self.note("records")
        return make_records(*others)

    def page_locked(self, *others: Any) -> AbstractContextManager[bool]:
        self.note("page-locking")
        return page_locked(*others)

    def make_streams(self, device: torch.device) -> "NotedStreams":
        self.note("streams")
        return NotedStreams(self)


class NotedKernels:
    def __init__(self, device: OneDevice) -> None:
        self._device = device

    def lookup(self, rows: RecordViews, lookup: GroupLookup, divisors: Tensor | None) -> Tensor:
        self._device.note("look-up")
        return torch_ops.lookup(rows, lookup, divisors)

    def update(self, *others: Any) -> None:
        self._device.note("update")
        torch_ops.update(*others)


class NotedStream(PlainStream):
    def __init__(self, device: OneDevice, name: str) -> None:
        self._device, self._name = device, name

    def run(self, closure: Closure) -> None:
        self._device.note(self._name)
        closure()

    def wait(self, event: Event, why: Wait) -> None:
        self._device.note(self._name)

    def record(self) -> Event:
        self._device.note(self._name)
        return super().record()


class NotedStreams(PlainStreams):
    def __init__(self, device: OneDevice) -> None:
        self.device = torch.device("cpu")
        self._noted = device
        self.copy_in, self.fill, self.compute, self.evict = (
            NotedStream(device, name) for name in ("copy in", "fill", "compute", "evict")
        )

    def done(self, event: Event, why: Wait) -> bool:
        self._noted.note(f"event {why}")
        return super().done(event, why)

    def allocate(self, nbytes: int) -> Tensor:
        self._noted.note("allocation")
        return super().allocate(nbytes)
