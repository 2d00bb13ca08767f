"""Computes checksums of the known batches, to detect different data before it is trained.

    a restart   compares the batches that the checkpoint's run had read ahead           `add_ids`, `add_dense`
    ranks       compare all their batches, up to the one after each plan's   `planned`

The planning thread makes all calls, batch by batch in step order.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import xxhash

from rowcast.protocol.batch import Lookups, Samples, Scheduled, ScheduledBatch
from rowcast.protocol.messages import BATCHES_BITS
from rowcast.runtime.checkpoint_manifest import BatchChecksum
from rowcast.runtime.errors import Mismatch

MOST_AHEAD = 256  # batches that a checkpoint keeps checksums of
MOST_NAMED = 1000  # checksums of features
DENSE_AND_LABELS = "dense features and labels"


class BatchChecksums:
    def __init__(self, depth: int, expected: Iterable[BatchChecksum] = ()) -> None:
        """`expected`: of the checkpoint that this attempt begins at."""
        self._expected = {(batch.train_step, batch.eval_batch): batch for batch in expected}
        self._known: deque[BatchChecksum] = deque()  # from the next plan's batch on
        self._num_dense = 0  # of these, from the first on: with dense features
        self._end: tuple[str, ...] = ()  # the end after the last known batch, once known
        # no more than every rank knows at a plan: with an automatic horizon, each looks ahead at least depth batches
        self._ids, self._dense = Chain(depth), Chain(1)

    @property
    def ahead(self) -> tuple[BatchChecksum, ...]:
        """Returns the checksums of known, unplanned batches, nearest first."""
        return tuple(islice(self._known, MOST_AHEAD))

    def add_ids(self, ids: Scheduled[Lookups]) -> None:
        """Adds a batch. Raises Mismatch if the checkpoint's run had read different ids."""
        at, checksum = ids.position, ids_checksum(ids.batch)
        expected = self._expected.get((at.train_step, at.eval_batch))
        if expected is not None and expected.ids != checksum:
            raise other_batch(expected, "ids")
        self._known.append(BatchChecksum(train_step=at.train_step, eval_batch=at.eval_batch, ids=checksum, dense=""))

    def add_dense(self, dense: Samples) -> None:
        """Adds the dense features of the first batch that lacks them. Raises as `add_ids`."""
        batch, checksum = self._known[self._num_dense], dense_checksum(dense)
        expected = self._expected.get((batch.train_step, batch.eval_batch))
        if expected is not None and expected.dense not in ("", checksum):
            raise other_batch(expected, DENSE_AND_LABELS)
        self._known[self._num_dense] = BatchChecksum(
            train_step=batch.train_step, eval_batch=batch.eval_batch, ids=batch.ids, dense=checksum
        )
        self._num_dense += 1

    def end(self, how: str) -> None:
        """Notes that no batch follows: the data ended, or has a fault there."""
        self._end = (how,)

    def planned(self) -> int:
        """The first known batch was planned. Returns a checksum of all batches of the attempt up to it, of the dense
        part of the next one and the ids of depth more. Equal ones mean that two prefetchers read the same."""
        near = list(islice(self._known, self._ids.ahead + 1))
        ids = self._ids.planned([*(batch.ids for batch in near), *self._end])
        dense = self._dense.planned([batch.dense for batch in near])
        self._known.popleft()
        self._num_dense -= 1
        return (ids ^ dense) % (1 << BATCHES_BITS)


class Chain:
    """A checksum over all batches up to `ahead` beyond the planned one."""

    def __init__(self, ahead: int) -> None:
        self._hasher = xxhash.xxh3_64()
        self.ahead = ahead
        self._num_added = 0  # of the values from the next plan's batch on

    def planned(self, values: Sequence[str]) -> int:
        """`values`: of the batches from the planned one on, as far as they are known."""
        for value in values[self._num_added : self.ahead + 1]:
            self._hasher.update(value.encode())
        self._num_added = min(len(values), self.ahead + 1) - 1
        checksum: int = self._hasher.intdigest()
        return checksum


def check_first(batches: Iterable[ScheduledBatch], expected: Iterable[BatchChecksum]) -> None:
    """Raises Mismatch, before a trainer is welcomed, if the checkpoint's run had read different batches."""
    checksums = BatchChecksums(depth=1, expected=expected)
    for own in batches:
        checksums.add_ids(own)
        checksums.add_dense(own.batch)


def other_batch(expected: BatchChecksum, what: str) -> Mismatch:
    where = "" if expected.eval_batch is None else f"evaluation batch {expected.eval_batch} after "
    return Mismatch(
        f"the {what} of {where}train step {expected.train_step} are not those that were read before the checkpoint: "
        "the files have changed, or a data set of your own gives its batches in another order; seed that order, or "
        "train the model on new data with another job.run_dir and --from"
    )


def ids_checksum(batch: Lookups) -> str:
    return checksum_of([batch.ids, batch.offsets, batch.weights])


def dense_checksum(batch: Samples) -> str:
    return checksum_of([batch.dense, batch.labels, *batch.inputs.values()])


def checksum_of(arrays: Sequence[npt.NDArray[np.generic] | None]) -> str:
    """Returns the xxh3_64 of the arrays' bytes, 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for array in arrays:
        if array is not None:
            hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def first_checksums(features: Sequence[str], batches: Iterable[ScheduledBatch]) -> dict[str, str]:
    """A checksum over all of these batches for each feature, and for dense features and labels; separately for
    evaluation batches. With many features, neighbours have one together."""
    size = -(-len(features) // MOST_NAMED)
    names = [f"feature {features[first]}" for first in range(0, len(features), size)]
    names = names if size == 1 else [f"one of {size} features from {name} on" for name in names]
    hashers: dict[str, xxhash.xxh3_64] = {}
    for own in batches:
        apart = "" if own.kind == "train" else " of an evaluation"
        parts = [(names[index // size], of_feature(own.batch, index)) for index in range(len(features))]
        for name, checksum in [*parts, (DENSE_AND_LABELS, dense_checksum(own.batch))]:
            hashers.setdefault(name + apart, xxhash.xxh3_64()).update(checksum.encode())
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def of_feature(batch: Lookups, index: int) -> str:
    own, offsets = slice(index * batch.size, (index + 1) * batch.size), batch.offsets
    if offsets is not None:
        offsets = offsets[own.start : own.stop + 1]
        own, offsets = slice(offsets[0], offsets[-1]), offsets - offsets[0]
    return checksum_of([batch.ids[own], offsets, None if batch.weights is None else batch.weights[own]])
