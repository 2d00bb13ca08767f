"""The machine, device and software on which the figures were measured, and what can be used here."""

import os
import platform
import shutil
from typing import Any

import torch

from benchmarks.gpu_check.findings import NO_DEVICE, Findings
from benchmarks.gpu_check.packages import packages
from benchmarks.machine import machine
from rowcast.protocol.transport.ring_file import SHARED_MEMORY, in_memory_buffer, shared_memory
from rowcast.trainer.device.cuda import page_locked

PAGE = 4096


def check_environment(findings: Findings, device: torch.device) -> None:
    findings.item("machine", lambda: {**machine(), **host_facts(), "device": str(device)})
    findings.item("packages", packages)
    if device.type != "cuda":
        for name in ("device", "page-locked rings", "copy speed"):
            findings.not_here(name, NO_DEVICE)
        return
    findings.item("device", lambda: device_facts(device))
    findings.item("page-locked rings", lambda: {"can_be_pinned": can_be_pinned(device)})
    findings.item("copy speed", lambda: copy_speed(device))


def host_facts() -> dict[str, Any]:
    shared, free = shared_memory()
    return {
        "linux": platform.release(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        str(SHARED_MEMORY): {"bytes": shared, "free": free},
        "c_compiler": next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None),
    }


def can_be_pinned(device: torch.device) -> bool:
    with page_locked([in_memory_buffer(64 * PAGE)], device) as locked:
        return locked


def device_facts(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "device_bytes": total,
        "device_bytes_free": free,
    }


def copy_speed(device: torch.device) -> dict[str, Any]:
    """GB/s of 256 MiB between page-locked memory and the device."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(2**28, dtype=torch.uint8, device=device)
    return {"to_device_gbs": copied(host, far), "from_device_gbs": copied(far, host)}


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
