"""Checks the arrays of batches, and whether parts would divide look-ups that belong to the whole batch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rowcast.analysis.check.findings import Finding, ok, warning
from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch
from rowcast.protocol.inputs import belonging, described, input_specs
from rowcast.runtime.telemetry.format_numbers import human_bytes


@dataclass(kw_only=True, slots=True)
class SeenArrays:
    of_batch: dict[str, tuple[int, str]] = field(default_factory=dict)  # most bytes, and what an array holds
    spread: set[int] = field(default_factory=set)  # positions of features that several samples of a batch look up
    used: set[int] = field(default_factory=set)  # positions of features that a batch of several samples looks up

    def add(self, batch: Batch, job: Job) -> None:
        for own in input_specs(batch.inputs, belonging(job).arrays):
            nbytes = max(batch.inputs[own.name].nbytes, self.of_batch.get(own.name, (0, ""))[0])
            self.of_batch[own.name] = nbytes, f"{described(own)} per {f'look-up of {own.of}' if own.of else 'sample'}"
        if batch.offsets is None or batch.size == 1:
            self.spread |= set(range(len(job.features))) if batch.size > 1 else set()
            return
        num_samples = np.count_nonzero(np.diff(batch.offsets).reshape(-1, batch.size), axis=1)
        self.spread |= set(np.flatnonzero(num_samples > 1).tolist())
        self.used |= set(np.flatnonzero(num_samples).tolist())


def check_arrays(job: Job, seen: SeenArrays) -> Iterator[Finding]:
    for name, (nbytes, what) in seen.of_batch.items():
        yield ok(f"{name}: {what}, up to {human_bytes(nbytes)} a step")
    whole = belonging(job).batch_positions
    if job.ranks.num_parts == 1:
        return
    for position in sorted(seen.used - seen.spread - whole):
        name = job.features[position]
        yield warning(
            f"feature {name}: one sample has all look-ups of a batch, and {job.ranks.num_parts} parts divide it, so "
            f'others train without them; if they belong to the batch, set data.of.{name} = "batch"'
        )
