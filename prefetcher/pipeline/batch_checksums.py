"""Computes checksums of the known batches, part by part, to detect different data before it is trained.

    a restart   compares the batches that the checkpoint's run had read ahead, with any number of ranks
    ranks       compare the first batches, which all of them read whole

The planning thread makes all calls, batch by batch in step order.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import PurePath

import xxhash
from msgspec.structs import replace

from rowcast.protocol.batch import (
    Lookups,
    SampleCut,
    Samples,
    Scheduled,
    ScheduledBatch,
    checksum_of,
    dense_checksum,
    ids_checksum,
)
from rowcast.protocol.parts import Belonging, Rank, arrays_of_samples, own_bounds, part_of
from rowcast.runtime.checkpoint_manifest import BatchChecksum, DataFile
from rowcast.runtime.errors import Mismatch

MOST_AHEAD = 256  # batches that a checkpoint keeps checksums of
MOST_NAMED = 1000  # checksums of features, of sizes of files, and of files
DENSE_AND_LABELS = "dense features and labels"


@dataclass(frozen=True, slots=True)
class Known:
    """A known batch that is not planned yet."""

    checksums: list[BatchChecksum]  # one for each part of this rank
    cuts: list[SampleCut]  # each takes one of these parts out of the rank's samples


class BatchChecksums:
    def __init__(self, rank: Rank, of: Belonging) -> None:
        self._rank, self._of = rank, of
        self._expected: dict[tuple[int, int | None, int], BatchChecksum] = {}
        self._known: deque[Known] = deque()  # from the next plan's batch on
        self._num_dense = 0  # of these, from the first on: with dense features

    def expect(self, expected: Iterable[BatchChecksum]) -> None:
        """`expected`: of the checkpoint that this attempt begins at."""
        self._expected = {place_of(part): part for part in expected}

    @property
    def ahead(self) -> tuple[BatchChecksum, ...]:
        """Returns the checksums of known, unplanned batches, nearest first."""
        return tuple(chain.from_iterable(known.checksums for known in islice(self._known, MOST_AHEAD)))

    def add_ids(self, ids: Scheduled[Lookups], parts: Sequence[Lookups]) -> None:
        """Adds a batch. `parts`: of this rank, cut from `ids`. Raises Mismatch if the checkpoint's run had read
        different ids."""
        at, bounds = ids.position, own_bounds(ids.batch.batch_size, self._rank)
        checksums = [
            BatchChecksum(
                train_step=at.train_step, eval_batch=at.eval_batch, ids=ids_checksum(part_lookups), dense="", part=part
            )
            for part, part_lookups in zip(self._rank.own_parts, parts, strict=True)
        ]
        for part in checksums:
            expected = self._expected.get(place_of(part))
            if expected is not None and expected.ids != part.ids:
                raise other_batch(expected, "ids")
        cuts = [arrays_of_samples(ids.batch, slice(*ends), self._of) for ends in pairwise(bounds)]
        self._known.append(Known(checksums, cuts))

    def add_dense(self, dense: Samples) -> None:
        """Adds this rank's dense features of the first batch that lacks them. Raises as `add_ids`."""
        known = self._known[self._num_dense]
        for index, (part, cut) in enumerate(zip(known.checksums, known.cuts, strict=True)):
            expected, checksum = self._expected.get(place_of(part)), dense_checksum(dense.within(cut))
            if expected is not None and expected.dense not in ("", checksum):
                raise other_batch(expected, DENSE_AND_LABELS)
            known.checksums[index] = replace(part, dense=checksum)
        self._num_dense += 1

    def planned(self) -> None:
        """The first known batch was planned."""
        self._known.popleft()
        self._num_dense -= 1


def place_of(part: BatchChecksum) -> tuple[int, int | None, int]:
    return part.train_step, part.eval_batch, part.part


def check_first(
    batches: Iterable[ScheduledBatch], rank: Rank, of: Belonging, expected: Sequence[BatchChecksum]
) -> None:
    """Raises Mismatch, before a trainer is welcomed, if the checkpoint's run had read different batches."""
    known = {place_of(part): part for part in expected}
    for scheduled in batches:
        for part in rank.own_parts:
            before = known.get((scheduled.train_step, scheduled.position.eval_batch, part))
            if before is None:
                continue
            batch_part = part_of(scheduled.batch, part, rank.parts, of)
            if before.ids != ids_checksum(batch_part):
                raise other_batch(before, "ids")
            if before.dense not in ("", dense_checksum(batch_part)):
                raise other_batch(before, DENSE_AND_LABELS)


def other_batch(expected: BatchChecksum, what: str) -> Mismatch:
    where = "" if expected.eval_batch is None else f"evaluation batch {expected.eval_batch} after "
    return Mismatch(
        f"the {what} of {where}train step {expected.train_step} are not those that were read before the checkpoint: "
        "the files have changed, or a data set of your own gives its batches in another order; seed that order, or "
        "train the model on new data with another job.run_dir and --from"
    )


def first_checksums(features: Sequence[str], batches: Iterable[ScheduledBatch]) -> dict[str, str]:
    """A checksum over all of these batches for each feature, and for dense features and labels; separately for
    evaluation batches. With many features, neighbours have one together."""
    parts, names = [], named_together("feature", features)
    for batch in batches:
        apart = "" if batch.kind == "train" else " of an evaluation"
        parts += [(name + apart, of_feature(batch.batch, index)) for index, name in enumerate(names)]
        parts.append((DENSE_AND_LABELS + apart, dense_checksum(batch.batch)))
    return checksum_of_each(parts)


def file_checksums(files: Sequence[DataFile]) -> dict[str, str]:
    """Returns a checksum of each file's size and one of its sample, sizes first: files of other sizes are sampled in
    other places. With many files, neighbours share one."""
    names = named_together(
        "data file", [f"{place} ({PurePath(file.path).name})" for place, file in enumerate(files, 1)]
    )
    sizes = [(f"the size of {name}", f"{file.nbytes} ") for name, file in zip(names, files, strict=True)]
    return checksum_of_each([*sizes, *((name, file.checksum) for name, file in zip(names, files, strict=True))])


def named_together(what: str, names: Sequence[str]) -> list[str]:
    """Returns a name for each; at most MOST_NAMED differ."""
    size, labels = -(-len(names) // MOST_NAMED), [f"{what} {name}" for name in names]
    return (
        labels
        if size <= 1
        else [f"one of {size} {what}s from {labels[at - at % size]} on" for at in range(len(labels))]
    )


def checksum_of_each(parts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns a checksum of all that has the same name."""
    hashers: dict[str, xxhash.xxh3_64] = {}
    for name, part in parts:
        hashers.setdefault(name, xxhash.xxh3_64()).update(part.encode())
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def of_feature(batch: Lookups, index: int) -> str:
    ids, offsets = slice(index * batch.size, (index + 1) * batch.size), batch.offsets
    if offsets is not None:
        offsets = offsets[ids.start : ids.stop + 1]
        ids, offsets = slice(offsets[0], offsets[-1]), offsets - offsets[0]
    return checksum_of([batch.ids[ids], offsets, None if batch.weights is None else batch.weights[ids]])
