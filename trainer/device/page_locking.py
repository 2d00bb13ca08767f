"""Page-locks shared rings, so that copies between them and a CUDA device run in parallel with everything else."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from rowcast.runtime.arrays import Bytes
from rowcast.runtime.telemetry.logs import get_logger


@contextmanager
def page_locked(buffers: Sequence[Bytes], device: torch.device) -> Iterator[bool]:
    """Registers page-aligned buffers with the driver within the context; yields whether all were registered.

    A container or a memlock limit may refuse. Copies then use a buffer (`host_memory.Bounced`), and a warning says what
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
        torch.ones(1, device=device).add_(
            1
        )  # an addition is always a kernel; zeros may be a memset, which clears nothing
