"""`rowcast.connect`: the loader of a training script, whose batches' rows are on the device when it yields them.

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
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.child import Child
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.adopt import run_folder
from rowcast.trainer.adopt import table_files as files
from rowcast.trainer.adopt.batch import LoadedBatch
from rowcast.trainer.adopt.module import EmbeddingBagCollection
from rowcast.trainer.adopt.say import tell
from rowcast.trainer.adopt.session import ScriptSession, SessionParts
from rowcast.trainer.adopt.settings import NO_DATA
from rowcast.trainer.adopt.slices import Slice
from rowcast.trainer.adopt.stateful_objects import Stateful, StatefulObjects
from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.kernels.optim import warm_up_sqrt
from rowcast.trainer.report.report_json import Evaluation
from rowcast.trainer.run.trainer_run import refuse_several_ranks


def connect(
    ebc: EmbeddingBagCollection,
    dataset: str | None = None,
    *,
    epochs: int | None = None,
    options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    save_every: int | str | None = None,
    evaluate: bool = False,
    dense: Sequence[Stateful] | None = None,
    dense_optimizer: bool = True,
    accumulate: int = 1,
    fresh: bool = False,
) -> "Loader":
    """The loader of `ebc`'s batches.

    `dataset` is what `data.format` of a job file takes, most often "package.module:factory"; a prefetcher is started for it, with `epochs`
    and `options` of the factory. Without it, the prefetcher of `ebc`'s job file is one that runs already. `max_steps` train steps end the
    run. `evaluate`: yield evaluation batches too. `dense`: the model, its optimizer and whatever else has state, to be saved with the
    checkpoints; a run that the run directory holds then goes on from its newest, and `fresh` begins a new one in its place. Checkpoints
    are made every `save_every`: a number of train steps, a time such as "10m" (the default), or "epoch"; without `dense`, which a run
    needs to go on, at the end only. `dense_optimizer`: that torch.optim steps once a batch, which is checked. `accumulate`: each batch of
    the data set is yielded as so many micro-batches, whose gradients make one step. Raises ConfigError.
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
    if not is_launched and (changes or max_steps is not None or fresh):
        raise ConfigError(
            "connect: without a dataset the prefetcher runs already, so its job file and its own options say everything but evaluate and "
            "dense; give a dataset to have one started"
        )
    if is_launched and dataset is None and ebc.job.data.format == NO_DATA:
        raise ConfigError(
            'connect: dataset is missing; name it, as "package.module:factory", or make the module of a job file'
        )
    if is_launched and dense is None and save_every is None and not ebc.says("checkpoint", "every"):
        changes["checkpoint.every"] = 0  # no run goes on from a checkpoint without the dense side
    side = None if dense is None else StatefulObjects(dense, ebc.device, ebc.without_tables)
    job = ebc.adopt(changes, is_launched=is_launched, resumes=not fresh)
    newest = run_folder.newest_run(job.run_dir)
    finished = None
    if is_launched and newest is not None and not fresh:
        refuse_to_go_on(ebc, newest, side)
        finished = newest if run_folder.is_complete(job, newest, max_steps) else None
    if is_launched:
        tell(begun(job, newest, fresh=fresh, is_finished=finished is not None))
    parts = SessionParts(
        job=job,
        device=ebc.device,
        start_child=partial(start_child, ebc, max_steps, fresh=fresh) if is_launched else None,
        dense=side,
        dense_optimizer=dense_optimizer,
        evaluate=evaluate,
        accumulate=accumulate,
        begins_with_tables=ebc.loaded is not None,
        finished=finished,
    )
    return Loader(ebc, parts)


def refuse_to_go_on(ebc: EmbeddingBagCollection, newest: Manifest, side: StatefulObjects | None) -> None:
    """Raises ConfigError where the run that is there cannot go on with this script."""
    if run_folder.is_of_another_job(ebc.job, newest):
        raise ConfigError(run_folder.ANOTHER_JOB.format(ebc.job.run_dir, newest.train_steps))
    run_folder.refuse_to_go_on(
        ebc.job.run_dir, newest.train_steps, has_dense=side is not None, has_tables=ebc.loaded is not None
    )


def begun(job: Job, newest: Manifest | None, *, fresh: bool, is_finished: bool) -> str:
    """What `connect` says at once. `newest`: of the run that the directory holds."""
    checkpoints = f"checkpoints are made {job.checkpoint.described}"
    if newest is None:
        return f"begins a new run in {job.run_dir}; {checkpoints}"
    if fresh:
        return (
            f"begins a new run in {job.run_dir}, whose first checkpoint replaces the run of {newest.train_steps} train steps there; "
            f"{checkpoints}"
        )
    if is_finished:
        return (
            f"the run in {job.run_dir} is complete after {newest.train_steps} train steps, and nothing is trained; a larger epochs=N "
            "trains it further, and fresh=True begins a new one"
        )
    return (
        f"continues the run in {job.run_dir} after {newest.train_steps} train steps, in epoch {newest.position.epoch}; {checkpoints} "
        "(fresh=True begins a new run)"
    )


def start_child(ebc: EmbeddingBagCollection, max_steps: int | None, *, fresh: bool) -> Child:
    """A prefetcher for the module's job, which begins with the tables that were loaded, where there are any."""
    job_file = ebc.write_job_file()
    files.await_release(ebc.job.run_dir)
    # where no train step is lost by it
    is_new = fresh or (ebc.loaded is not None and not run_folder.may_hold_training(ebc.job.run_dir))
    return files.start_prefetcher(
        job_file, ebc.job.run_dir / files.LOG, files.run_options(fresh=is_new, max_steps=max_steps, loaded=ebc.loaded)
    )


class Loader:
    """Iterating over it gives the batches of one epoch, and again those of the next. Use it as a context manager where the loop may be
    left before the data ends."""

    def __init__(self, ebc: EmbeddingBagCollection, parts: SessionParts) -> None:
        self._ebc = ebc
        self._job = parts.job
        self._evaluate, self._accumulate = parts.evaluate, parts.accumulate
        self._session = ScriptSession(parts)
        self._is_open = False
        self._asked = 0  # how often the loader was iterated over
        self._counts_epochs = False  # the script goes through `epochs`
        self._close = weakref.finalize(self, ScriptSession.leave, self._session)

    def close(self) -> None:
        """Ends both sides, wherever they are. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """What an epoch's `for` yields; of micro-batches the most that it can be. Begins the run. Raises TypeError where the data set does
        not say how many batches it has."""
        self._open()
        return (
            epoch_length(self._session.epoch_batches(), self._job.eval.every, self._evaluate, self._session.epoch)
            * self._accumulate
        )

    @property
    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0 on, of a new run and of one that goes on: `for epoch in loader.epochs` around `for batch in
        loader`. It ends with the run. Raises as the loader does."""
        self._open()
        self._counts_epochs = True
        while (epoch := self._session.next_epoch()) is not None:
            asked = self._asked
            yield epoch
            if asked == self._asked and self._session.stop_reason is None:
                raise RuntimeError(
                    f"epoch {epoch} was passed without a `for batch in loader`: only that trains it; loader.stop() ends a run"
                )
        self._session.keep_final_state()

    @property
    def metrics_address(self) -> str | None:
        """`host:port` of /metrics, /healthz and /readyz while the run lasts: `metrics.trainer` of the job, by default any free port."""
        return self._session.metrics_address

    @property
    def stopped(self) -> str | None:
        """Why the run ends, or has ended, before its data: what `stop` was given, or a signal's name."""
        return self._session.stop_reason

    def stop(self, reason: str = "loader.stop()") -> None:
        """Ends the run where the script stands, with a checkpoint that a later run goes on from; `state_dict()` is whole then. Where
        optimizer.step() is still to come for the batch in hand, the loop ends behind it. Iterating gives nothing any more."""
        self._open()
        self._session.stop(reason)

    def record(self, *, loss: Tensor | float | None = None, logits: Tensor | None = None) -> None:
        """Of the batch in hand, for /metrics, losses.f32 and the run's report. `loss`: the mean over the samples of a train batch (of a
        micro-batch, over its own); give it for every one or for none. `logits` f32 [B]: what the model says to an evaluation batch whose
        labels are 0 or 1; `evaluation` is made of them. Raises RuntimeError."""
        self._session.record(loss, logits)

    @property
    def evaluation(self) -> Evaluation | None:
        """AUC, log loss and accuracy of the last evaluation whose logits were recorded: that of this epoch behind its `for`."""
        return self._session.evaluation

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Raises RowcastError where the prefetcher fails or is lost, RuntimeError where the batch before was not trained as it must be."""
        self._open()
        self._asked += 1
        yield from self._micro_batches()  # of the batch in hand, where the loop was left between them
        first = self._session.peek()
        if self._session.epochs.consume_finished(None if first is None else first.header.epoch):
            return  # so that what the script does behind that epoch is done
        if first is None:
            self._refuse_more()
            return
        epoch = first.header.epoch
        if self._asked == 1 and epoch and not self._counts_epochs:
            tell(
                f"this first `for` is the rest of epoch {epoch}, counted from 0; `for epoch in loader.epochs` counts on from there"
            )
        while (step := self._session.peek()) is not None and step.header.epoch == epoch:
            self._session.begin()
            if step.header.kind == "train" or self._evaluate:
                yield from self._micro_batches()
        if self._session.stop_reason is None:
            self._session.epochs.end(epoch)

    def _refuse_more(self) -> None:
        """A run that goes on has fewer epochs left than the script may count; otherwise the script counts more than it has asked for."""
        if self._session.goes_on or self._session.stop_reason is not None:
            return
        raise RuntimeError(
            f"the loader has ended after {self._session.train_steps} train steps, with data.epochs = {self._job.data.epochs}; give connect "
            "epochs=N to go through the data N times, and write `for epoch in loader.epochs`, which ends with them"
        )

    def _micro_batches(self) -> Iterator[LoadedBatch]:
        while (part := self._session.next_slice()) is not None:
            assert self._session.current is not None, "a slice is of the step in hand"
            yield self._loaded(self._session.current, part)

    def _loaded(self, step: ArrivedStep, part: Slice) -> LoadedBatch:
        # where the script is in that mode now, it may train on the batch outside of it
        with torch.inference_mode(False):
            batch = LoadedBatch(step, part, self._session, self._job.features)
        self._session.hand.uses.record()
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
