"""Does anything wait for the device in the steady loop, and do copies run under compute?

Replays in bf16 of both batch sizes with a cache of SHARE of their rows: the first third warms up, the second runs while
torch reports every call that waits for the device, the last one under the profiler.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.findings import NO_DEVICE, Findings, NotHere
from benchmarks.gpu_check.jobs import Size, batches_of, capacity_of, make_job, sizes
from benchmarks.gpu_check.trace import read_trace, told
from benchmarks.training.recorded import record, slots_for, touched
from benchmarks.training.replay import Replay

SHARE = 0.2
WAITS = "no call of the steady loop waits for the device"
UNDER = "copies under compute"
WARNS = "called a synchronizing CUDA operation"  # what torch says of each


def check_steady(findings: Findings, device: torch.device, folder: Path) -> None:
    for size in reversed(sizes(device)):
        check_size(findings, device, size, folder / f"profile-{size.batch_size}.json.gz")


def check_size(findings: Findings, device: torch.device, size: Size, file: Path) -> None:
    job, batches, named = (
        make_job(size, device, "bf16"),
        batches_of(size, device),
        f"batch {size.batch_size}, {{}}".format,
    )
    slots = slots_for(job, batches, capacity_of(touched(job, batches), SHARE))
    with record(job, batches, slots, device) as recording:
        replay = Replay(recording, job)
        third = replay.num_steps // 3
        findings.item(named("warm-up"), lambda: ran(replay, third))
        if device.type == "cuda":
            findings.item(named(WAITS), lambda: waits_in(replay, 2 * third))
            findings.item(named(UNDER), lambda: profiled(replay, file, device))
        else:
            findings.not_here(named(WAITS), NO_DEVICE)
            findings.item(named("the profiler's file is written and read"), lambda: tried(replay, file.parent, device))
            findings.not_here(named(UNDER), NO_DEVICE)


def ran(replay: Replay, until: int) -> dict[str, Any]:
    before = len(replay.peer.done_s)
    replay.run(until)
    return {"steps": len(replay.peer.done_s) - before}


def waits_in(replay: Replay, until: int) -> dict[str, Any]:
    """Where in the source torch saw a call that waits, and how often."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            steps = ran(replay, until)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    calls = calls_that_wait(seen)
    return {**steps, "calls": calls, "passed": not calls}


def calls_that_wait(seen: Sequence[warnings.WarningMessage]) -> dict[str, int]:
    """How often each line of the source made a call that waits, among all warnings of a run."""
    waits = [warning for warning in seen if WARNS in str(warning.message)]
    return dict(Counter(f"{warning.filename}:{warning.lineno}" for warning in waits))


def profiled(replay: Replay, file: Path, device: torch.device) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    before = len(replay.peer.done_s)
    with profile(activities=activities) as profiler:
        replay.run()
    profiler.export_chrome_trace(str(file))
    trace = read_trace(file)
    if device.type == "cuda" and not trace.kernels:
        raise NotHere("the profiler recorded no kernels: CUPTI does not work here")
    return told(trace, len(replay.peer.done_s) - before)


def tried(replay: Replay, folder: Path, device: torch.device) -> dict[str, Any]:
    file = folder / "tried.gz"
    found = profiled(replay, file, device)
    return {"bytes": file.stat().st_size, "steps": found["steps"]}
