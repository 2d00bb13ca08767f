"""Checks batches of code outside this project before use: shapes, dtypes, ids and values."""

from dataclasses import replace
from itertools import pairwise
from textwrap import shorten
from typing import Any

import numpy as np

from rowcast.job.models import NO_MODEL
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Ids, bag_offsets
from rowcast.prefetcher.readers.formats.user_arrays import as_batch, is_array, is_by_position
from rowcast.prefetcher.readers.formats.user_inputs import check_inputs
from rowcast.prefetcher.readers.id_check import (
    IdCheck,
    Location,
    check_dense,
    check_labels,
    check_offsets,
    dense_names,
    job_features,
    lookup_location,
    require_weights,
)
from rowcast.protocol.batch import Batch, needed_offsets
from rowcast.protocol.parts import belonging
from rowcast.runtime.errors import DataError

PAIRS_SHOWN = 3000  # characters, enough for about thirty features
BY_NAME = "where that is not their order, give them by name, as a mapping from feature to ids"


class BatchCheck:
    def __init__(self, job: Job) -> None:
        self._features = job_features(job)
        self._names = [feature.name for feature in self._features]
        self._weighted = bool(job.data.columns.weights)
        self._ids = IdCheck(job)
        self._columns = job.data.columns
        self._label_may_miss = job.data.columns.label_values == "none" or job.model.kind == NO_MODEL
        self._of = belonging(job)
        self.num_dense: int | None = None  # None: any number
        self.pairing = ""  # of the first batch whose ids came by position: each feature with its column

    @property
    def num_invalid(self) -> int:
        return self._ids.num_invalid

    def check(self, offered: Any, where: str) -> Batch:
        """Returns a batch, given in any shape that `user_arrays.py` reads, with contiguous arrays, checked ids and no
        needless offsets. Raises DataError that starts with `where`."""
        batch = as_batch(offered, self._names, where, self._columns.label_shape, self._of.batch_features)
        self._check_shapes(batch, where)
        self._check_values(batch, where)
        by_position = len(self._features) > 1 and is_by_position(offered)
        ids = self._paired_ids(batch, where) if by_position else self._checked_ids(batch, where)
        offsets = needed_offsets(batch.ids, batch.offsets)
        return replace(
            batch,
            dense=np.ascontiguousarray(batch.dense),
            labels=np.ascontiguousarray(batch.labels),
            ids=ids,
            offsets=None if offsets is None else np.ascontiguousarray(offsets),
            weights=None if batch.weights is None else np.ascontiguousarray(batch.weights),
            inputs={name: np.ascontiguousarray(array) for name, array in sorted(batch.inputs.items())},
        )

    def _check_shapes(self, batch: Batch, where: str) -> None:
        num_samples = len(batch.labels) if np.ndim(batch.labels) else 1
        num_bags = len(self._features) * num_samples
        if not num_samples:
            raise DataError(f"{where} has no samples; yield batches of at least one")
        require_array(batch.labels, f"{where}: labels", "float32", (num_samples, *self._columns.label_shape))
        require_array(batch.dense, f"{where}: dense", "float32", (num_samples, self.num_dense))
        require_array(batch.ids, f"{where}: ids", "int64", (None,) if batch.offsets is not None else (num_bags,))
        if batch.offsets is not None:
            require_array(batch.offsets, f"{where}: offsets", "int64", (num_bags + 1,))
            check_offsets(batch.offsets, len(batch.ids), where)
        require_weights(self._weighted, batch.weights is not None, where)
        if batch.weights is not None:
            require_array(batch.weights, f"{where}: weights", "float32", (len(batch.ids),))
        check_inputs(batch, self._of, where)

    def _check_values(self, batch: Batch, where: str) -> None:
        check_dense(batch.dense, dense_names(batch.dense.shape[1]), sample_location(where))
        are_missing = bool(np.isnan(batch.labels).all()) and not self._columns.labels
        if are_missing and not self._label_may_miss:
            raise DataError(
                f'{where} has no labels; give them, or set data.columns.label_values = "none" for a model with its own '
                "loss"
            )
        if self._columns.labels:
            check_labels([*batch.labels.T], self._columns, sample_location(where))
        elif not are_missing:  # a label may be any number: the data set knows what the model's loss takes
            check_dense(batch.labels[:, None], ["label"], sample_location(where))
        if batch.weights is not None:
            check_dense(batch.weights[:, None], ["weights"], lookup_location(where, 0))

    def _checked_ids(self, batch: Batch, where: str) -> Ids:
        ids, bounds = np.ascontiguousarray(batch.ids), bag_offsets(batch.ids, batch.offsets)[:: batch.size]
        return self._ids.check(ids, bounds, lambda f: lookup_location(where, int(bounds[f])))

    def _paired_ids(self, batch: Batch, where: str) -> Ids:
        try:
            return self._checked_ids(batch, where)
        except DataError as error:
            raise DataError(f"{error}; ids come by position: {self._pairs(batch)}; {BY_NAME}") from None
        finally:
            self.pairing = self.pairing or self._pairs(batch)

    def _pairs(self, batch: Batch) -> str:
        """Returns `feature <- column` for each feature, with its largest id and the rows of its table."""
        bounds = bag_offsets(batch.ids, batch.offsets)[:: batch.size]
        largest = [max(batch.ids[start:stop].tolist(), default=0) for start, stop in pairwise(bounds)]
        pairs = zip(self._features, largest, strict=True)
        named = (
            f"{own.name} <- column {f} (ids up to {most:,} of {own.num_embeddings:,})"
            for f, (own, most) in enumerate(pairs)
        )
        return shorten(", ".join(named), PAIRS_SHOWN, placeholder=" ...")


def sample_location(where: str) -> Location:
    return lambda i: f"{where}, sample {i}"


def require_array(array: Any, what: str, dtype: str, shape: tuple[int | None, ...]) -> None:
    """Raises DataError unless `array` is of `dtype` and `shape`, in which None matches any number."""
    fits = is_array(array) and array.dtype == dtype and array.ndim == len(shape)
    if not fits or any(need is not None and need != size for need, size in zip(shape, array.shape, strict=True)):
        found = typed_shape(str(array.dtype), array.shape) if is_array(array) else type(array).__name__
        raise DataError(f"{what} are {found}; give {typed_shape(dtype, shape)}")


def typed_shape(dtype: str, shape: tuple[int | None, ...]) -> str:
    return f"{dtype}[{', '.join('any' if size is None else str(size) for size in shape)}]"
