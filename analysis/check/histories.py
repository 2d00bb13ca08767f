"""Checks the histories of a next-item model: how many are cut to `model.history`, and whether their times rise."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.check.findings import Finding, ok, warning
from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.protocol.batch import Batch


@dataclass(kw_only=True, slots=True)
class SeenHistories:
    num_samples: int = 0
    num_cut: int = 0
    num_falling: int = 0  # samples with a time before the one that precedes it
    first_fall: tuple[int, int] = (0, 0)  # both times

    def add(self, batch: Batch, job: Job) -> None:
        if not isinstance(job.model, NextItemSettings):
            return
        first = job.features.index(job.model.history_feature) * batch.size
        bounds = bag_offsets(batch.ids, batch.offsets)[first : first + batch.size + 1]
        self.num_samples += batch.size
        self.num_cut += int(np.count_nonzero(np.diff(bounds) > job.model.history))
        name = job.model.time
        if job.data.lookup_arrays.get(name) != job.model.history_feature:
            return
        times, starts = batch.inputs[name], bounds - bounds[0]
        falls = np.setdiff1d(np.flatnonzero(times[1:] < times[:-1]) + 1, starts)
        if len(falls) and not self.num_falling:
            self.first_fall = int(times[falls[0] - 1]), int(times[falls[0]])
        self.num_falling += len(np.unique(np.searchsorted(starts, falls, side="right")))


def check_histories(job: Job, seen: SeenHistories) -> Iterator[Finding]:
    if not isinstance(job.model, NextItemSettings):
        return
    read = f"of {seen.num_samples:,} histories read"
    if seen.num_cut:
        yield ok(
            f"{seen.num_cut:,} {read} are longer than model.history = {job.model.history}; their oldest items are cut"
        )
    if seen.num_falling:
        before, after = seen.first_fall
        yield warning(
            f"the array {job.model.time} falls within {seen.num_falling:,} {read}, first from {before} to {after}; "
            "sort each history by time, the oldest item first"
        )
