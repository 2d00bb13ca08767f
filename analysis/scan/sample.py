"""Samples a job's data: draws batches, spread evenly over one epoch.

    epoch, in training order    0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 15 16 17    3 strata of as many batches
    drawn                         1                   10      12                   one at a random place in each

The first batches of a log are only its first hours; a batch of each stratum covers all of it, and all batches are
equally likely.

Batches between two drawn ones are not decoded if the format can seek to a row cheaply.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np

from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Reader, can_share, open_reader
from rowcast.protocol.batch import Batch, Kind

DECODED_ROWS = 32768  # rows per block when a Parquet file is decoded
FULL_SHUFFLE_SHARE = 32  # shuffling n rows takes about as long as reading n / 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much of an epoch to read: a share, and a minimum of batches."""

    share: float  # above 0, at most 1
    least_batches: int = 0


def draw_batches(job: Job, reader: Reader, amount: Amount, split: Kind) -> Iterator[int]:
    """Yields the numbers of batches, ascending; a function of job.seed and the arguments.

    Endless if only reading can tell the length of an epoch, as for data.format = "package.module:factory";
    `read_drawn` ends."""
    num_samples = reader.num_samples(split)
    share = amount.share if num_samples is None else share_of(job, amount, num_samples)
    if num_samples is None or not can_share(job):  # a factory's batches have any size
        stratum = max(1, round(1 / share))
        return drawn(((i * stratum, (i + 1) * stratum) for i in count()), job.job.seed)
    num_batches = -(-num_samples // job.data.batch_size)
    num_strata = min(max(1, round(share * num_batches)), num_batches)
    bounds = [i * num_batches // num_strata for i in range(num_strata + 1)] if num_strata else []
    return drawn(pairwise(bounds), job.job.seed)


def share_of(job: Job, amount: Amount, num_samples: int) -> float:
    wanted = max(amount.share * num_samples, amount.least_batches * job.data.batch_size)
    return min(1.0, wanted / max(num_samples, 1))


def drawn(strata: Iterator[tuple[int, int]], seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    for first, end in strata:
        yield first + int(random.choice(end - first, size=1, replace=False)[0])


def read_drawn(job: Job, reader: Reader, wanted: Iterator[int], split: Kind) -> Iterator[Batch]:
    """Yields the batches, until they or the epoch end. Raises what `Reader.batches` raises."""
    skipped_batches = rows_worth_skipping(job, reader, split) / job.data.batch_size
    batches, at = reader.batches(split, 0, 0), 0
    for index in wanted:
        if index - at > skipped_batches:
            batches, at = reader.batches(split, 0, index), index
        found = next(islice(batches, index - at, None), None)
        if found is None:
            return
        yield found
        at = index + 1


def rows_worth_skipping(job: Job, reader: Reader, split: Kind) -> float:
    window = job.data.shuffle_window if split == "train" else None
    if not can_share(job):
        return float("inf")
    if window == 0:
        return (reader.num_samples(split) or 0) / FULL_SHUFFLE_SHARE
    return 0 if format_of(job.data.format).random_access else max(DECODED_ROWS, window or 0)


def reader_for_another_pass(job: Job, reader: Reader) -> Reader:
    """A factory may have returned an iterator, which is exhausted after one pass; files can be read again."""
    return reader if can_share(job) else open_reader(job)
