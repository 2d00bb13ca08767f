"""`trainer.connect`: the loader of a training script, whose batches' rows are on the device when it yields them.

It starts with the first batch: until then tables can be loaded, and nothing runs. It ends with the data, with an error, when it is closed
or collected, and with the script; the prefetcher that it started ends with it.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import environ
from types import TracebackType
from typing import Any, Self

import structlog
import torch

from protocol.child import Child
from protocol.errors import ConfigError
from protocol.telemetry.logs import setup_logging
from trainer.adopt import files
from trainer.adopt.batch import LoadedBatch
from trainer.adopt.dense import DenseSide, Stateful
from trainer.adopt.module import EmbeddingBagCollection
from trainer.adopt.session import Session, SessionParts
from trainer.adopt.settings import NO_DATA
from trainer.adopt.slices import Slice
from trainer.cache import ArrivedStep
from trainer.optim import warm_up_sqrt
from trainer.service import refuse_several_ranks


def connect(
    ebc: EmbeddingBagCollection,
    dataset: str | None = None,
    *,
    epochs: int | None = None,
    options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    save_every: int | None = None,
    evaluate: bool = False,
    dense: Sequence[Stateful] | None = None,
    dense_optimizer: bool = True,
    accumulate: int = 1,
    fresh: bool = True,
) -> "Loader":
    """The loader of `ebc`'s batches.

    `dataset` is what `data.format` of a job file takes, most often "package.module:factory"; a prefetcher is started for it, with `epochs`,
    `options` of the factory, and a checkpoint after every `save_every` train steps. Without it, the prefetcher of `ebc`'s job file is one
    that runs already. `max_steps` train steps end the run. `evaluate`: yield evaluation batches too. `dense`: the model, its optimizer and
    whatever else has state, to be saved with the checkpoints; with `fresh=False` the run then goes on from the newest. `dense_optimizer`:
    that torch.optim steps once a batch, which is checked. `accumulate`: each batch of the data set is yielded as so many micro-batches,
    whose gradients make one step. Raises ConfigError.
    """
    files.refuse_within_prefetcher()
    refuse_several_ranks(environ.get("WORLD_SIZE", "1"))
    if not isinstance(dataset, str | None):
        raise ConfigError(
            f'connect: dataset = {dataset!r} is no name; the prefetcher, another process, imports what "package.module:factory" names'
        )
    if accumulate < 1:
        raise ConfigError(f"connect: accumulate = {accumulate} must be a number of micro-batches, at least 1")
    given = {"data.format": dataset, "data.epochs": epochs, "data.options": options, "checkpoint.every": save_every}
    changes = {name: value for name, value in given.items() if value is not None}
    is_launched = dataset is not None or not ebc.has_job_file
    if not is_launched and (changes or max_steps is not None or not fresh):
        raise ConfigError(
            "connect: without a dataset the prefetcher runs already, so its job file and its own options say everything but evaluate and "
            "dense; give a dataset to have one started"
        )
    if is_launched and dataset is None and ebc.job.data.format == NO_DATA:
        raise ConfigError('connect: dataset is missing; name it, as "package.module:factory", or make the module of a job file')
    side = None if dense is None else DenseSide(dense, ebc.device, ebc.without_tables)
    job = ebc.adopt(changes, is_launched=is_launched, resumes=not fresh or not is_launched)
    parts = SessionParts(
        job=job,
        device=ebc.device,
        start_child=partial(start_child, ebc, max_steps, fresh=fresh) if is_launched else None,
        dense=side,
        dense_optimizer=dense_optimizer,
        evaluate=evaluate,
        accumulate=accumulate,
    )
    return Loader(ebc, parts)


def start_child(ebc: EmbeddingBagCollection, max_steps: int | None, *, fresh: bool) -> Child:
    """A prefetcher for the module's job, which begins with the tables that were loaded, where there are any."""
    job_file, loaded = ebc.write_job_file(), ebc.loaded
    if loaded is not None:
        if not fresh:
            raise ConfigError("connect: fresh=False goes on with the tables of the newest checkpoint, but load_state_dict gave others")
        files.import_tables(job_file, loaded)
    return files.start_prefetcher(job_file, ebc.job.run_dir / files.LOG, fresh=fresh and loaded is None, max_steps=max_steps)


class Loader:
    """Iterating over it gives the batches of one epoch, and again those of the next. Use it as a context manager where the loop may be
    left before the data ends."""

    def __init__(self, ebc: EmbeddingBagCollection, parts: SessionParts) -> None:
        self._ebc = ebc
        self._job = parts.job
        self._evaluate, self._accumulate = parts.evaluate, parts.accumulate
        self._session = Session(parts)
        self._is_open = False
        self._close = weakref.finalize(self, Session.leave, self._session)

    def close(self) -> None:
        """Ends both sides, wherever they are. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """What an epoch's `for` yields; of micro-batches the most that it can be. Begins the run. Raises TypeError where the data set does
        not say how many batches it has."""
        self._open()
        return epoch_length(self._session.epoch_batches(), self._job.eval.every, self._evaluate, self._session.epoch) * self._accumulate

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Raises RowcastError where the prefetcher fails or is lost, RuntimeError where the batch before was not trained as it must be."""
        self._open()
        yield from self._micro_batches()  # of the batch in hand, where the loop was left between them
        first = self._session.peek()
        if first is None:
            raise RuntimeError(
                f"the loader has ended after {self._session.train_steps} train steps, with data.epochs = {self._job.data.epochs}; give "
                "connect epochs=N to go through the data N times"
            )
        if self._session.take_empty_rest(first):
            return  # so that what the script does behind that epoch is done
        epoch = first.header.epoch
        while (step := self._session.peek()) is not None and step.header.epoch == epoch:
            self._session.begin()
            if step.header.kind == "train" or self._evaluate:
                yield from self._micro_batches()

    def _micro_batches(self) -> Iterator[LoadedBatch]:
        while (part := self._session.next_slice()) is not None:
            assert self._session.current is not None, "a slice is of the step in hand"
            yield self._loaded(self._session.current, part)

    def _loaded(self, step: ArrivedStep, part: Slice) -> LoadedBatch:
        with torch.inference_mode(False):  # where the script is in that mode now, it may train on the batch outside of it
            batch = LoadedBatch(step, part, self._session, self._job.features)
        self._session.uses.record()
        return batch

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            if not structlog.is_configured():
                setup_logging("trainer", "warning")  # else structlog writes to the script's standard output
            warm_up_sqrt()
            self._session.open()
            self._ebc.begin(self._session)


def epoch_length(batches: tuple[int | None, int | None], eval_every: int, evaluates: bool, epoch: int) -> int:
    """`batches`: train and evaluation batches of an epoch. Raises TypeError where one that counts is unknown."""
    train, evaluation = batches
    if train is None or (evaluates and evaluation is None):
        raise TypeError(
            "the data set does not say how many batches it has: a list or a DataLoader does, and the factory may return an object with "
            "batches(split, epoch, start) and num_batches(split)"
        )
    begun, done = epoch * train, (epoch + 1) * train
    evaluations = 1 if not eval_every else done // eval_every - begun // eval_every + (done % eval_every > 0)
    return train + (evaluations * evaluation if evaluates and evaluation is not None else 0)
