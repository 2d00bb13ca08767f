"""Reads batches from Python code, `data.format = "package.module:factory"`, and checks each.

The factory is called as factory(job, **job.data.options), or without the job if it has no such argument. It returns one
of

    an object           with batches(split, epoch, start) -> iterable of batches, from batch `start` on; it may also
                        have num_dense, num_samples(split) as `reader.Reader` has, and num_batches(split)
    a function          called as function(split, epoch) -> iterable of batches, for each epoch and for "eval"
    an iterable         of training batches, iterated once per epoch; it has no evaluation split

A batch is a `Batch`, or has one of the shapes that `user_arrays.py` reads. The factory decides order, split and
shuffle. Unless an object has `start`, continuing at a batch first makes all earlier ones, and one worker makes all
batches: it could not skip any.

Checks the arrays of batches of code outside this project: their dtypes, and how many entries they have.

Checks batches of code outside this project before use: shapes, dtypes, ids and values.
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice, pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from rowcast.job.models import NO_MODEL
from rowcast.job.named_code import import_code
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Ids, bag_offsets
from rowcast.prefetcher.readers.formats.user_arrays import as_batch, is_array, is_by_position
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
from rowcast.prefetcher.readers.reader import Pending, decoded
from rowcast.protocol.batch import Batch, Kind, needed_offsets
from rowcast.protocol.parts import Belonging, Rank, belonging
from rowcast.protocol.plan_layout import ITEM_BYTES, MAX_DIMENSIONS
from rowcast.runtime.errors import ConfigError, DataError, RowcastError, listed


def check_inputs(batch: Batch, of: Belonging, where: str) -> None:
    """Raises DataError that starts with `where`. Ids and offsets were checked."""
    bounds = bag_offsets(batch.ids, batch.offsets)
    for name in of.batch_features:
        others = np.flatnonzero(lengths_of(name, batch, bounds, of)[1:])
        if len(others):
            raise DataError(
                f"{where}: feature {name} has look-ups in sample {others[0] + 1}, and data.of.{name} = "
                '"batch"; give all of them to sample 0'
            )
    for name in of.arrays:
        if name not in batch.inputs:
            raise DataError(
                f"{where}: data.of names the array {name}, and the batch has {listed(list(batch.inputs)) or 'none'}"
            )
    for name, array in batch.inputs.items():
        check_array(name, array, where)
        if name not in of.arrays and len(array) != batch.size:
            raise DataError(
                f"{where}: {name} has {len(array)} entries for {batch.size} samples; give one for each, or set "
                f'data.of.{name} = "FEATURE" if they belong to the look-ups of a feature'
            )
        if name in of.arrays:
            num_lookups = int(lengths_of(of.arrays[name], batch, bounds, of).sum())
            if len(array) != num_lookups:
                raise DataError(
                    f"{where}: {name} has {len(array)} entries for {num_lookups} look-ups of feature "
                    f"{of.arrays[name]}; give one for each"
                )


def lengths_of(feature: str, batch: Batch, bounds: Ids, of: Belonging) -> Ids:
    """Returns the look-ups of each sample."""
    first = of.positions[feature] * batch.size
    return np.diff(bounds[first : first + batch.size + 1])


def check_array(name: str, array: Any, where: str) -> None:
    if not isinstance(name, str) or "." in name or not name.isprintable():
        raise DataError(f"{where}: the array {name!r} needs a name that is printable text without a dot; rename it")
    dtype = array.dtype if is_array(array) else None
    if dtype is None or dtype.str[1:] not in ITEM_BYTES or not dtype.isnative:
        raise DataError(
            f"{where}: {name} is {type(array).__name__ if dtype is None else dtype}; give an array of bool, integers "
            "of 8 to 64 bits or floats of 16 to 64"
        )
    if not 1 <= array.ndim <= MAX_DIMENSIONS:
        raise DataError(
            f"{where}: {name} has {array.ndim} dimensions; give from 1 to {MAX_DIMENSIONS}, of entries first"
        )


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


# (split, epoch, start) -> batches in any shape that user_arrays.py reads
Batches = Callable[[Kind, int, int], Iterable[Any]]


def open_reader(job: Job) -> "CustomReader":
    """Imports and calls the factory. Raises ConfigError if that fails."""
    factory = import_code(job, "data.format")
    signature = inspect.signature(factory)
    given = [job] if takes_job(signature, job.data.options) else []
    try:
        signature.bind(*given, **job.data.options)
    except TypeError as error:
        raise ConfigError(
            f"data.format = {job.data.format!r}: the factory cannot be called with (job, **data.options): {error}; "
            "it returns batches, or a function of (split, epoch)"
        ) from None
    return CustomReader(job, factory(*given, **job.data.options))


def takes_job(signature: inspect.Signature, options: Collection[str]) -> bool:
    """Whether a factory's first argument is the job: it has that name, or nothing else provides it."""
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return False
    return first.name == "job" or (first.default is first.empty and first.name not in options)


class CustomReader:
    """A `Reader` over what the factory returned."""

    def __init__(self, job: Job, source: Any) -> None:
        self._job, self._source = job, source
        self._name = job.data.format
        self._batches = batches_of(job, source)
        self._check = BatchCheck(job)
        self._first_epoch: Iterator[Any] | None = None  # the training batches of epoch 0, once one was read
        self._num_train: int | None = None  # batches, once epoch 0 was opened
        self.pairing = ""
        self.paths: list[Path] = []  # the files that foreign code reads are unknown
        self._check.num_dense = self._first_num_dense()
        self.dense_names = dense_names(self._check.num_dense)

    @property
    def invalid_ids(self) -> int:
        return self._check.num_invalid

    def num_samples(self, split: Kind) -> int | None:
        known = getattr(self._source, "num_samples", None)
        count: int | None = known(split) if callable(known) else None
        return count

    def num_batches(self, split: Kind) -> int | None:
        known = getattr(self._source, "num_batches", None)
        if callable(known):
            return int(known(split))
        if hasattr(self._source, "batches"):
            return None
        if split == "train":
            return self._num_train if callable(self._source) else length(self._source)
        if not callable(self._source):
            return 0
        with data_set_errors(f"{self._name}, eval batch 0 of epoch 0"):
            return length(self._source(split, 0))

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        return decoded(self.pending(split, epoch, start))

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        batches: Iterator[Any] | None = None
        for index in count(start):
            where = f"{self._name}, {split} batch {index} of epoch {epoch}"
            with data_set_errors(where):
                batches = iter(self._open(split, epoch, start)) if batches is None else batches
                batch = next(batches, None)
            if batch is None:
                return
            yield partial(self._whole, batch, where)

    def _whole(self, offered: Any, where: str, rank: Rank) -> Batch:
        return self._check.check(offered, where)

    def _open(self, split: Kind, epoch: int, start: int) -> Iterable[Any]:
        """Opens a split. Reuses epoch 0's iterator: it yields each batch once, and a second one may be shuffled
        differently."""
        first_epoch, is_first_epoch = self._first_epoch, split == "train" and epoch == 0
        if first_epoch is None or not is_first_epoch or (start and hasattr(self._source, "batches")):
            return self._batches(split, epoch, start)
        self._first_epoch = None
        return islice(first_epoch, start, None)

    def _first_num_dense(self) -> int:
        """Returns the number that the source declares, or that of the first training batch."""
        declared = getattr(self._source, "num_dense", None)
        if declared is not None:
            return int(declared)
        where = f"{self._name}, train batch 0 of epoch 0"
        with data_set_errors(where):
            batches = self._batches("train", 0, 0)
            self._num_train = length(batches)
            rest = iter(batches)
            first = next(rest, None)
        if first is None:
            raise DataError(f"{self._name} yields no training batch; yield at least one")
        check = BatchCheck(self._job)
        checked = check.check(first, where)
        self.pairing = check.pairing
        self._first_epoch = chain([first], rest)
        return int(checked.dense.shape[-1])


@contextmanager
def data_set_errors(where: str) -> Iterator[None]:
    """Turns an error of the data set's code into one that ends the run; its traceback goes to stderr."""
    try:
        yield
    except RowcastError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise DataError(
            f"{where}: the data set raised {type(error).__name__}: {error}; correct it, its traceback is in the log"
        ) from error


def batches_of(job: Job, source: Any) -> Batches:
    """Wraps whatever the factory returned in one function. Raises ConfigError for an unknown kind."""
    if hasattr(source, "batches"):
        return lambda split, epoch, start: source.batches(split, epoch, start)
    if callable(source):
        return lambda split, epoch, start: skip(source(split, epoch), start)
    if not isinstance(source, Iterable):
        raise ConfigError(
            f"data.format = {job.data.format!r}: the factory returned {type(source).__name__}; "
            "return an object with batches, a function or an iterable"
        )
    if isinstance(source, Iterator) and job.data.epochs > 1:
        raise ConfigError(
            f"data.format = {job.data.format!r}: the factory returned an iterator, which can be read once, "
            f"but data.epochs = {job.data.epochs}; return a function of (split, epoch)"
        )
    return lambda split, epoch, start: skip(source, start) if split == "train" else ()


def skip(batches: Iterable[Any], start: int) -> Iterable[Any]:
    """Skips the first `start` batches. With `start` 0, returns `batches` itself, which may have a length."""
    return islice(batches, start, None) if start else batches


def length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
