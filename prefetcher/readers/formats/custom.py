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
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from rowcast.job.named_code import import_code
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.formats.user_batches import BatchCheck
from rowcast.prefetcher.readers.id_check import dense_names
from rowcast.prefetcher.readers.reader import Pending, decoded
from rowcast.protocol.batch import Batch, Kind
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, DataError, RowcastError

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


def is_iterator(source: Any) -> bool:
    return isinstance(source, Iterator) and not hasattr(source, "batches") and not callable(source)


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
    if is_iterator(source) and job.data.epochs > 1:
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
