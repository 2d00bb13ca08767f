"""How the bytes of a ring reach the copies between host and device, which run beside everything else only from page-locked memory.

    Direct    the ring itself, locked where it lies (`pinning.py`), or a device that is the CPU
    Bounced   a locked buffer as large as the ring, where the system refuses to lock the ring:
                  ring -> buffer -> device      device -> buffer -> ring

A piece has the same place in the buffer as in the ring. So it is free exactly when the ring's is, and nothing else has to be kept.
"""

from typing import Protocol

import torch
from torch import Tensor

from rowcast.runtime.arrays import Bytes


class HostMemory(Protocol):
    """Payloads are u8 [n], views of the ring."""

    def arriving(self, payload: Bytes) -> Tensor:
        """The bytes of a piece that came, u8 [n] for a copy to the device, until the piece is released."""

    def leaving(self, payload: Bytes) -> Tensor:
        """Where a copy from the device may put the bytes of a piece, u8 [n]."""

    def landed(self, payload: Bytes) -> None:
        """That copy is complete: its bytes are in the ring behind this call."""


class Direct:
    def arriving(self, payload: Bytes) -> Tensor:
        return torch.from_numpy(payload)

    def leaving(self, payload: Bytes) -> Tensor:
        return torch.from_numpy(payload)

    def landed(self, payload: Bytes) -> None:
        pass


class Bounced:
    def __init__(self, ring: Bytes, buffer: Tensor) -> None:
        """`ring` as it is mapped here; `buffer` u8 of its size."""
        assert len(buffer) == len(ring), f"a buffer of {len(buffer)} bytes for a ring of {len(ring)}"
        self._start = ring.ctypes.data
        self._buffer = buffer

    def arriving(self, payload: Bytes) -> Tensor:
        return self.leaving(payload).copy_(torch.from_numpy(payload))

    def leaving(self, payload: Bytes) -> Tensor:
        offset = payload.ctypes.data - self._start
        return self._buffer[offset : offset + len(payload)]

    def landed(self, payload: Bytes) -> None:
        torch.from_numpy(payload).copy_(self.leaving(payload))


def host_memory(ring: Bytes, device: torch.device, *, pinned: bool) -> HostMemory:
    """`pinned`: whether the ring is locked where it lies."""
    if pinned or device.type == "cpu":
        return Direct()
    return Bounced(ring, torch.empty(len(ring), dtype=torch.uint8, device="cpu", pin_memory=True))
