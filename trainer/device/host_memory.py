"""Provides a ring's bytes for copies to and from the device, page-locked so that the copies run in parallel.

    Direct    the ring itself: page-locked in place, or the device is the CPU
    Bounced   a page-locked buffer as large as the ring, if the system refuses to lock the ring:
                  ring -> buffer -> device      device -> buffer -> ring

A piece has the same offset in the buffer as in the ring. So its bytes in the buffer and in the ring are free at the
same time, without separate bookkeeping.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from rowcast.protocol.messages import Released, RingRef
from rowcast.protocol.transport.ring import RingReader, RingWriter, release
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger


class HostMemory(Protocol):
    """Payloads are u8 [n], views of the ring."""

    def arriving(self, payload: Bytes) -> Tensor:
        """Returns an arrived piece's bytes, u8 [n], for a copy to the device, valid until the piece is released."""

    def leaving(self, payload: Bytes) -> Tensor:
        """Returns memory, u8 [n], for a copy of a piece from the device."""

    def landed(self, payload: Bytes) -> None:
        """Called after that copy: puts its bytes into the ring."""


class Direct:
    def arriving(self, payload: Bytes) -> Tensor:
        return torch.from_numpy(payload)

    def leaving(self, payload: Bytes) -> Tensor:
        return torch.from_numpy(payload)

    def landed(self, payload: Bytes) -> None:
        pass


class Bounced:
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
        return Direct()
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
        self.fetch = RingReader(fetch, mirror=mirrored)
        self.back = RingWriter(back, always_checksum=mirrored)
        self.fetch_memory = host_memory(fetch, device, page_locked=page_locked)
        self.back_memory = host_memory(back, device, page_locked=page_locked)


class FetchRing:
    """The ring with rows, slots and the model state. The main thread calls `release`."""

    def __init__(self, rings: RingEnds, send: Callable[[Released], None]) -> None:
        self._ring, self._memory = rings.fetch, rings.fetch_memory
        self._send = send

    def payload(self, ref: RingRef, stamp: int) -> Tensor:
        """Returns the bytes of a piece, u8 [n], valid until released. The mail thread calls it for each piece, in
        order.

        Raises RemoteProtocolError if the bytes are not as announced."""
        return self._memory.arriving(self._ring.view(ref, stamp))

    def release(self, ref: RingRef) -> None:
        release(self._ring, ref, self._send)


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
            clear_sticky_error(device)
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


def clear_sticky_error(device: torch.device) -> None:
    """Clears the error of a refused registration by a kernel that does no harm; else the next launch would raise it."""
    with suppress(RuntimeError):
        # an addition is always a kernel; zeros may be a memset, which clears nothing
        torch.ones(1, device=device).add_(1)
