"""How much copying is hidden by compute, as `torch.profiler` records a replay; and whether its loop ever waits for the
device.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.jobs import Size, make_job
from benchmarks.training.recorded import slots_for, touched
from benchmarks.training.replay import Replay
from rowcast.protocol.batch import ScheduledBatch

Span = tuple[float, float]  # microseconds
SHARE = 0.05


def check_overlap(
    size: Size, device: torch.device, batches: Sequence[ScheduledBatch], profile_file: Path | None
) -> dict[str, Any]:
    """Raises RuntimeError if the steady loop synchronises with the device."""
    job = make_job(size, device)
    known = touched(job, batches)
    slots = slots_for(job, batches, max(int(known.rows * SHARE), known.largest_batch))
    with Replay(job, batches, slots, device) as replay:
        warm = len(batches) // 2
        replay.run(until=lambda: len(replay.peer.done_s) >= warm)
        if device.type != "cuda":
            replay.run()
            return {"copied_us": 0.0, "hidden_share": None}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.cuda.set_sync_debug_mode("error")
            try:
                replay.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(device)
    if profile_file is not None:
        profiler.export_chrome_trace(str(profile_file))
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    copies = [span(event) for event in events if "HtoD" in event.name or "DtoH" in event.name]
    kernels = merged([span(event) for event in events if "Memcpy" not in event.name and "Memset" not in event.name])
    total = sum(end - begin for begin, end in copies)
    hidden = sum(covered(copy, kernels) for copy in copies)
    return {"copied_us": total, "hidden_share": hidden / total if total else None, "no_synchronisation": True}


def span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def merged(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def covered(copy: Span, kernels: Sequence[Span]) -> float:
    return sum(max(0.0, min(copy[1], end) - max(copy[0], begin)) for begin, end in kernels)
