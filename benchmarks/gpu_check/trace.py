"""What a profiler's trace tells: how much copying lies under compute, who waited for the device, where the time went.

The trace is the Chrome trace of `torch.profiler`; times are in microseconds.

    compute      the stream whose kernels take longest: look-up to update
    moving       kernels of other streams: rows between slots and staging
    to_device    copies from the host;  from_device  copies to the host
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

Span = tuple[float, float]  # begin, end
DIRECTIONS = {"HtoD": "to_device", "DtoH": "from_device"}
MOST_KERNELS = 20


@dataclass(slots=True)
class Trace:
    copies: dict[str, list[Span]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS.values()})
    copied_bytes: Counter[str] = field(default_factory=Counter)
    kernels: dict[int, list[Span]] = field(default_factory=dict)  # by stream
    kernel_us: Counter[str] = field(default_factory=Counter)  # by name
    waits: Counter[str] = field(default_factory=Counter)  # calls of the host that wait for the device, by name

    @property
    def compute(self) -> list[Span]:
        return max(self.kernels.values(), key=total, default=[])

    @property
    def moving(self) -> list[Span]:
        compute = self.compute
        return [span for spans in self.kernels.values() if spans is not compute for span in spans]


def read_trace(file: Path) -> Trace:
    with gzip.open(file) as content:
        return trace_of(json.load(content)["traceEvents"])


def trace_of(events: Iterable[dict[str, Any]]) -> Trace:
    trace = Trace()
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            trace.kernels.setdefault(event["args"]["stream"], []).append(span_of(event))
            trace.kernel_us[name] += event["dur"]
        elif kind == "gpu_memcpy":
            direction = next((own for sign, own in DIRECTIONS.items() if sign in name), None)
            if direction is not None:
                trace.copies[direction].append(span_of(event))
                trace.copied_bytes[direction] += event["args"].get("bytes", 0)
        elif kind in ("cuda_runtime", "cuda_driver") and ("Synchronize" in name or name == "cudaMemcpy"):
            trace.waits[name] += 1
    return trace


def span_of(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def total(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def share_under(spans: Sequence[Span], cover: Iterable[Span]) -> float | None:
    """The share of the time of `spans` that lies under `cover`; None if they take no time.

    Two of the spans at the same time both count.
    """
    whole = total(spans)
    if not whole:
        return None
    covers = merged(cover)
    begins = [begin for begin, _ in covers]
    sums = [0.0, *accumulate(end - begin for begin, end in covers)]  # covered before each

    def covered_before(moment: float) -> float:
        number = bisect_right(begins, moment)
        return sums[number] - max(0.0, covers[number - 1][1] - moment) if number else 0.0

    return sum(covered_before(end) - covered_before(begin) for begin, end in spans) / whole


def told(trace: Trace, steps: int) -> dict[str, Any]:
    """For the file; milliseconds a step."""
    compute, beside = trace.compute, {"moving": trace.moving, **trace.copies}
    everything = merged([*compute, *(span for spans in beside.values() for span in spans)])
    lasted = everything[-1][1] - everything[0][0] if everything else 0.0
    busy = {name: total(merged(spans)) for name, spans in ({"compute": compute} | beside).items()}
    return {
        "steps": steps,
        "step_ms": lasted / steps / 1e3,
        "busy_ms": {name: us / steps / 1e3 for name, us in busy.items()},
        "idle_ms": (lasted - total(everything)) / steps / 1e3,
        "share_under_compute": {name: share_under(spans, compute) for name, spans in beside.items()},
        "megabytes": {name: nbytes / steps / 1e6 for name, nbytes in trace.copied_bytes.items()},
        "kernels_ms": {name: us / steps / 1e3 for name, us in trace.kernel_us.most_common(MOST_KERNELS)},
        "host_waits": dict(trace.waits),
    }
