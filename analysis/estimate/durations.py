"""Predicts how long each task of a job takes: the device's from a rates file, the host's measured here.

    decode, plan                          processor time of this job's own batches, while its plans are made
    fetch, write back                     rows of the step, at the rate of the store of training
    copy in, fill, step, copy out         the step's kernels and its overhead of each type, from the rates file
    exchange                              rows, gradients and sums between ranks, from the rates file

Every duration is for an exclusive core; the walk divides the cores.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.advise.cost import COUNTED, probe_rows
from rowcast.analysis.estimate.device_rates import OF_MAIN, DeviceRates
from rowcast.analysis.estimate.pipeline import Handover, Planned
from rowcast.analysis.estimate.step_kernels import TASKS, step_calls
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.runtime.arrays import F64

MESSAGES: tuple[Handover, ...] = ("rows sent", "rows back", "ring room", "step done")
LEAST_MARGIN = 0.1  # fraction of a step's time: predictions were off by 8 % on average
UNKNOWN = 0.2  # error of a kernel that was measured at too few shapes to know it
HANDLING_S = 5e-5  # a batch from its decoder, a piece into the ring


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow:
    """Seconds for one row of each group, [groups]."""

    read: F64  # fetched before, so it was probably trained
    first: F64  # never fetched before: its first value is computed
    write: F64


class EstimatedDurations:
    """Implements `pipeline.Durations`."""

    def __init__(self, job: Job, plan: Sequence[Planned], device: DeviceRates, row: HostRow | None = None) -> None:
        """`row`: measured if it is not given. Raises ConfigError if the rates do not hold for the job."""
        groups = group_specs(job)
        self._row = measured_rows(job, groups) if row is None else row
        self._counted = [step.counted for step in plan if step.counted is not None]
        self._tasks: list[Mapping[str, float]] = []
        self._message_s, self._wake_s = device.seconds("message"), device.seconds("wait")
        outside: set[str] = set()
        of_kernels: dict[str, float] = defaultdict(float)
        whole_batch = max((own.counts.batch for own in self._counted), default=0)
        for own in self._counted:
            tasks: dict[str, float] = dict.fromkeys(TASKS, 0.0)
            for task, kernel, counts, calls in step_calls(device, job, groups, own.counts):
                seconds = calls * device.seconds(kernel, **counts)
                tasks[task] += seconds
                of_kernels[kernel] += seconds
                # an epoch's last batch may be small
                if own.counts.batch == whole_batch and not device.kernels[kernel].covers(counts):
                    outside.add(kernel)
            lookups = float(sum(group.lookups for group in own.counts.groups))
            of_host = sum(device.seconds(name, lookups=lookups) for name in OF_MAIN)
            # a device computes while the host issues what follows
            step_s = max(tasks["step"], of_host) if device.clock == "device" else tasks["step"] + of_host
            self._tasks.append({**tasks, "step": step_s})
        self.margin = max(LEAST_MARGIN, margin(device, of_kernels)) * (2 if outside else 1)
        self.outside = sorted(outside)  # kernels that were not measured at the job's shapes

    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        own = self._counted[step]
        groups = own.counts.groups
        if name in TASKS:
            return self._tasks[step][name] / pieces
        if name == "fetch":
            first = np.array(own.first)
            again = np.array([group.fetched for group in groups]) - first
            return float(again @ self._row.read + first @ self._row.first) / pieces
        if name == "write back":
            return float(np.array([group.written_back for group in groups]) @ self._row.write) / pieces
        if name == "barrier":
            return float(np.array(own.flushed) @ self._row.write) if own.flushed else 0.0
        if name in MESSAGES:
            return self._message_s
        known = {"decode": own.decode_s, "plan": own.plan_s, "rows filled": self._wake_s, "rows home": self._wake_s}
        return known.get(name, HANDLING_S)


def margin(device: DeviceRates, of_kernels: Mapping[str, float]) -> float:
    """The share of the kernels' time that their errors leave open. `of_kernels`: seconds. Kernels are off
    independently of each other."""
    errors = []
    for name, seconds in of_kernels.items():
        known = device.kernels[name].error
        errors.append(seconds * (UNKNOWN if known is None else known))
    return math.hypot(*errors) / max(1e-12, sum(of_kernels.values()))


def measured_rows(job: Job, groups: Sequence[GroupSpec]) -> HostRow:
    # rates that `advise` may rely on are a share of those measured
    rates = [probe_rows(group, job.job.seed) for group in groups]
    read, first, write = (
        np.array([COUNTED / getattr(own, name) for own in rates]) for name in ("read", "first", "write")
    )
    return HostRow(read=read, first=first, write=write)
