"""The device and software on which the figures were measured."""

import os
import platform
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from rowcast.trainer.execute.page_locking import page_locked

PAGE = 4096


def environment(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = dict(machine())
    facts |= {
        "device": str(device),
        "linux": platform.release(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    buffer = np.zeros(64 * PAGE, np.uint8)
    with page_locked([buffer], device) as locked:
        facts["rings_can_be_pinned"] = locked
    try:
        from importlib.metadata import version

        facts["triton"] = version("triton")
    except ImportError:
        facts["triton"] = None
    return facts | device_facts(device)


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "device_bytes": total,
        "device_bytes_free": free,
        "copy_gbs": copy_speed(device),
    }


def copy_speed(device: torch.device) -> dict[str, float]:
    """GB/s of 256 MiB between page-locked memory and the device."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(2**28, dtype=torch.uint8, device=device)
    return {"to_device": copied(host, far), "from_device": copied(far, host)}


def copied(source: torch.Tensor, target: torch.Tensor, rounds: int = 8) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    target.copy_(source)
    begin.record()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return rounds * source.nbytes / milliseconds / 1e6
