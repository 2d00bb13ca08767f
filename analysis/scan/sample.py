"""Samples a job's data: reads windows of consecutive batches, spread evenly over one epoch.

    epoch, in training order    0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 15 16 17    3 strata of as many batches
    windows of length 2           [2 3]               [10 11]  [12 13]             one at a random place in each

The first batches of a log are only its first hours; a window in each stratum covers all of it, and all batches are
equally likely. Each stratum has one window per draw, all different: draw 0 can choose what draw 1 judges.

Batches between two windows are not decoded if the format can seek to a row cheaply.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np

from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.data_files import files_of, is_gzip
from rowcast.prefetcher.readers.reader import Reader, can_share, open_reader
from rowcast.protocol.batch import Batch, Kind
from rowcast.runtime.errors import ConfigError

DECODED_ROWS = 32768  # rows per block when a streamed file is decoded
FULL_SHUFFLE_SHARE = 32  # shuffling n rows takes about as long as reading n / 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much of an epoch to read in all draws together: a share or a number of samples, and a minimum of batches."""

    share: float | None = None
    samples: int | None = None
    least_batches: int = 0

    def __post_init__(self) -> None:
        assert (self.share is None) != (self.samples is None), f"a share of {self.share} and {self.samples} samples"
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"--sample {self.share}: give a share above 0, at most 1")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples {self.samples}: give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Batches `start` to `stop` of an epoch. Windows of all draws are disjoint."""

    start: int
    stop: int
    draw: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledBatch:
    window: Window
    index: int  # among the epoch's batches
    batch: Batch


def sample_windows(
    job: Job, reader: Reader, amount: Amount, *, length: int = 1, draws: int = 1, split: Kind = "train"
) -> Iterator[Window]:
    """Windows of `length` batches, ascending; a function of job.seed and the arguments. An epoch's last may be shorter.

    Endless if only reading can tell the length of an epoch, as for data.format = "package.module:factory";
    `read_windows` ends."""
    num_samples = reader.num_samples(split)
    share = share_of(job, amount, num_samples)
    if num_samples is None or not can_share(job):  # a factory's batches have any size
        stratum = max(draws, round(draws / share))
        return drawn(((i * stratum, (i + 1) * stratum) for i in count()), None, length, draws, job.job.seed)
    num_batches = -(-num_samples // job.data.batch_size)
    num_units = -(-num_batches // length)
    num_strata = min(max(1, round(share * num_units / draws)), num_units // draws)
    bounds = [i * num_units // num_strata for i in range(num_strata + 1)] if num_strata else []
    return drawn(pairwise(bounds), num_batches, length, draws, job.job.seed)


def share_of(job: Job, amount: Amount, num_samples: int | None) -> float:
    """Raises ConfigError if a number of samples is requested and the data does not say how many it has."""
    if num_samples is None:
        if amount.share is None:
            raise ConfigError(
                f"--samples: {job.data.format} does not say how many samples it has; give a share, such as --sample "
                "0.05"
            )
        return amount.share
    wanted = amount.samples if amount.share is None else amount.share * num_samples
    assert wanted is not None, "an amount is a share or a number"
    return min(1.0, max(wanted, amount.least_batches * job.data.batch_size) / max(num_samples, 1))


def drawn(
    strata: Iterator[tuple[int, int]], num_batches: int | None, length: int, draws: int, seed: int
) -> Iterator[Window]:
    """`draws` windows per stratum, which is a range of units of `length` batches."""
    random = np.random.default_rng(seed)
    for first, end in strata:
        units = first + random.choice(end - first, size=draws, replace=False)
        for draw in np.argsort(units).tolist():
            start = int(units[draw]) * length
            yield Window(
                start=start, stop=start + length if num_batches is None else min(start + length, num_batches), draw=draw
            )


def read_windows(
    job: Job, reader: Reader, windows: Iterator[Window], *, split: Kind = "train", epoch: int = 0
) -> Iterator[SampledBatch]:
    """The batches of ascending windows, until the windows or the epoch end. Raises what `Reader.batches` raises."""
    skipped_batches = rows_worth_skipping(job, reader, split) / job.data.batch_size
    batches, at = reader.batches(split, epoch, 0), 0
    for window in windows:
        assert window.start >= at, f"a window at batch {window.start} after batch {at}"
        if window.start - at > skipped_batches:
            batches, at = reader.batches(split, epoch, window.start), window.start
        found = -1
        for found, batch in enumerate(islice(batches, window.start - at, window.stop - at)):
            yield SampledBatch(window=window, index=window.start + found, batch=batch)
        if found + 1 < window.stop - window.start:
            return
        at = window.stop


def rows_worth_skipping(job: Job, reader: Reader, split: Kind) -> float:
    window = job.data.shuffle_window if split == "train" else None
    if not can_share(job) or is_compressed(job, split):
        return float("inf")
    if window == 0:
        return (reader.num_samples(split) or 0) / FULL_SHUFFLE_SHARE
    return 0 if format_of(job.data.format).random_access else max(DECODED_ROWS, window or 0)


def is_compressed(job: Job, split: Kind) -> bool:
    return any(map(is_gzip, files_of(job, "eval_path" if split == "eval" and job.data.eval_path else "path")))


def reader_for_another_pass(job: Job, reader: Reader) -> Reader:
    """A factory may have returned an iterator, which is exhausted after one pass; files can be read again."""
    return reader if can_share(job) else open_reader(job)
