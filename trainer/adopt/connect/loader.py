"""Connects a training script to its data: `rowcast.connect` and the loader of its batches, with rows on the device.

The run starts with the first batch; until then, tables can be loaded. It ends with the data, with an error, when the
loader is closed or collected, and with the script. A prefetcher that the loader started ends with it.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import environ
from typing import Any, Self

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.training_identity import first_of, num_parts, setting_differences
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.children import Child
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import pair_folder
from rowcast.runtime.telemetry.logs import open_missing_descriptors, print_line, setup_logging
from rowcast.trainer.adopt.connect import run_folder, table_files
from rowcast.trainer.adopt.connect.batch import LoadedBatch
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from rowcast.trainer.adopt.connect.rank_session import RankSession
from rowcast.trainer.adopt.connect.script_run import SessionParts
from rowcast.trainer.adopt.connect.script_state import ScriptObjects
from rowcast.trainer.adopt.connect.session import ScriptSession
from rowcast.trainer.adopt.connect.settings import ScriptTables
from rowcast.trainer.device.cuda import warm_up_sqrt
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.models.model_state import Stateful
from rowcast.trainer.run.launch import Launch, check_launch, rank_in_log


def connect(
    ebc: EmbeddingBagCollection,
    dataset: str,
    *,
    epochs: int | None = None,
    options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    save_every: int | str | None = None,
    evaluate: bool = False,
    dense: Sequence[Stateful] | None = None,
    dense_optimizer: bool = True,
    fresh: bool = False,
    **others: Any,
) -> "Loader":
    """Connects `ebc` to a data set and returns the loader of its batches.

    ebc: the module that looks up the batches; it can be connected once.
    dataset: a `data.format` of a job file, usually "package.module:factory"; a prefetcher is started for it.
    epochs: how many times the run reads the data (`data.epochs`).
    options: keyword arguments for the data factory (`data.options`).
    max_steps: train steps after which the run ends.
    save_every: the interval between checkpoints: a number of train steps, a time such as "10m" (the default) or
    "epoch".
        Without `dense`, the default is one checkpoint at the end.
    evaluate: yields evaluation batches too.
    dense: the model, its optimizer and other objects with state, which checkpoints save. With it, connecting again
        continues the run in the run directory from its newest checkpoint.
    dense_optimizer: whether a torch.optim optimizer steps once per batch; if so, this is checked.
    fresh: begins a new run, which replaces the one in the run directory.

    Raises ConfigError.
    """
    table_files.refuse_within_prefetcher()
    open_missing_descriptors()
    if not isinstance(dataset, str):
        raise ConfigError(
            f"connect: dataset = {dataset!r} is not a name; the prefetcher, another process, imports what "
            '"package.module:factory" names'
        )
    max_steps = None if max_steps is None else whole("max_steps", max_steps)
    if others or not isinstance(ebc, EmbeddingBagCollection) or ebc.shared.is_connected:
        raise ConfigError(
            "connect takes one EmbeddingBagCollection or EmbeddingCollection without a loader, and the arguments of "
            "docs/connect.md; for several collections or accumulated gradients use rowcast.adopt (docs/adopt.md)"
        )
    given = {"data.format": dataset, "data.epochs": epochs, "data.options": options, "checkpoint.every": save_every}
    changes = {name: value for name, value in given.items() if value is not None}
    tables = ebc.shared
    launch = tables.launch
    check_group(launch)
    if dense is None and save_every is None and "every" not in tables.content.get("checkpoint", {}):
        changes["checkpoint.every"] = 0  # no run can continue from a checkpoint without the script's objects
    if launch.world_size > 1 and "count" not in tables.content.get("ranks", {}):
        changes |= {"ranks.count": launch.world_size, "ranks.per_host": launch.local_world_size}
    objects = None if dense is None else ScriptObjects(dense, tables.device, tables.without_tables)
    job = tables.adopt(changes, resumes=not fresh)
    check_launch(launch, job.ranks)
    if job.ranks.num_parts > launch.world_size:
        raise ConfigError(
            f"connect: ranks.parts = {job.ranks.num_parts}, but a training script computes one part "
            "on each rank; remove ranks.parts"
        )
    newest = run_folder.newest_run(job.run_dir)
    continued = None if fresh else newest
    finished = None
    if continued is not None:
        refuse_to_resume(tables, continued, objects)
        finished = continued if run_folder.is_complete(job, continued, max_steps) else None
    if launch.rank == 0:
        print_line(start_sentence(job, newest, fresh=fresh, is_finished=finished is not None))
    parts = SessionParts(
        job=job,
        device=tables.device,
        launch=launch,
        # of several ranks on a host, the first starts the prefetchers of all
        start_child=partial(start_child, tables, max_steps, fresh=fresh) if launch.local_rank == 0 else None,
        dense=objects,
        dense_optimizer=dense_optimizer,
        evaluate=evaluate,
        begins_with_tables=tables.loaded is not None,
        said_steps=0 if continued is None else continued.train_steps,
        finished=finished,
    )
    return Loader(tables, parts)


def whole(name: str, value: Any) -> int:
    """Returns an integer, of Python or NumPy. Raises ConfigError."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"connect: {name} = {value!r} must be a whole number of at least 1")
    return int(value)


def check_group(launch: Launch) -> None:
    """Raises ConfigError if the script has a process group that is not of torchrun's ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_world_size() != launch.world_size:
        raise ConfigError(
            f"torch.distributed has {dist.get_world_size()} ranks, but WORLD_SIZE is {launch.world_size}; start the "
            "script by torchrun, which sets it, and make one process group of all its ranks"
        )
    if dist.get_rank() != launch.rank:
        raise ConfigError(
            f"this process is rank {dist.get_rank()} of torch.distributed, but RANK = {launch.rank}; let "
            "init_process_group() take the rank that torchrun sets"
        )


def require_group(launch: Launch, device: torch.device) -> None:
    """Raises ConfigError unless the script has a process group of its ranks, for the device of its rows."""
    check_group(launch)
    if launch.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"WORLD_SIZE = {launch.world_size}, but this script has no process group, on which its ranks exchange rows "
            "and gradients; call torch.distributed.init_process_group() before the loader yields a batch"
        )
    if launch.world_size > 1 and device.type not in dist.get_backend_config():
        raise ConfigError(
            f"this script's process group has no backend for its rows on the {device.type} "
            f'({dist.get_backend_config()}); call init_process_group("cpu:gloo,cuda:nccl")'
        )


def refuse_to_resume(tables: ScriptTables, newest: Manifest, objects: ScriptObjects | None) -> None:
    """Raises ConfigError if this script cannot continue the run in its run directory."""
    was, now = num_parts(newest.job), tables.job.ranks.num_parts
    ranks = [f"it is started on {now} ranks, and was on {was} (start {was}, as by --nproc-per-node {was})"]
    differences = ranks if was != now else list(setting_differences(newest.job, tables.job))
    if differences:
        raise ConfigError(run_folder.ANOTHER_JOB.format(tables.job.run_dir, newest.train_steps, first_of(differences)))
    run_folder.refuse_to_resume(
        tables.job.run_dir, newest.train_steps, has_dense=objects is not None, has_tables=tables.loaded is not None
    )


def start_sentence(job: Job, newest: Manifest | None, *, fresh: bool, is_finished: bool) -> str:
    """Writes the line that `connect` prints. `newest`: the newest checkpoint of the run in the run directory."""
    checkpoints = f"checkpoints are made {job.checkpoint.described}"
    if newest is None:
        return f"begins a new run in {job.run_dir}; {checkpoints}"
    if fresh:
        return (
            f"begins a new run in {job.run_dir}, whose first checkpoint replaces the run of {newest.train_steps} train "
            f"steps there; {checkpoints}"
        )
    if is_finished:
        return (
            f"the run in {job.run_dir} is complete after {newest.train_steps} train steps, and nothing is trained; a "
            "larger epochs=N trains it further, and fresh=True begins a new one"
        )
    return (
        f"continues the run in {job.run_dir} after {newest.train_steps} train steps, in epoch {newest.position.epoch}; "
        f"{checkpoints} (fresh=True begins a new run)"
    )


def start_child(tables: ScriptTables, max_steps: int | None, *, fresh: bool) -> Child:
    """Starts a prefetcher for the job, which begins with the loaded tables if there are any; of several ranks, those of
    this host."""
    job_file, run_dir, loaded, launch = tables.write_job_file(), tables.job.run_dir, tables.loaded, tables.launch
    of_host = range(launch.rank, launch.rank + launch.local_world_size)
    table_files.await_release(pair_folder(run_dir, rank, launch.world_size) for rank in of_host)
    if launch.rank == 0:
        table_files.await_release([run_dir])
    # loaded tables begin a new run only if no train step would be lost
    is_new = fresh or (loaded is not None and not run_folder.may_hold_training(run_dir))
    host = launch.rank // launch.local_world_size
    given = {"--host": host or None, "--max-steps": max_steps, "--from": loaded}
    options = [f"{name}={value}" for name, value in given.items() if value is not None] + ["--fresh"] * is_new
    log = tables.folder / table_files.LOG
    return table_files.start_prefetcher(job_file, log, options, is_tied=launch.world_size > 1)


class Loader:
    """Yields batches whose rows are on the device; made by `rowcast.connect`. Each `for` loop over it is one epoch.

    Use it as a context manager if the loop may end before the data does."""

    def __init__(self, tables: ScriptTables, parts: SessionParts) -> None:
        self._tables = tables
        self._parts, self._job = parts, parts.job
        self._session = ScriptSession(parts) if parts.launch.world_size == 1 else RankSession(parts)
        self._is_open = False
        self._num_loops = 0  # `for` loops over the loader
        self._counts_epochs = False  # the script loops over `epochs`
        self._close = weakref.finalize(self, ScriptSession.leave, self._session)

    def close(self) -> None:
        """Ends the run and its prefetcher at once; rows trained since the last checkpoint are lost. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def epochs(self) -> Iterator[int]:
        """The epochs that are left, counted from 0: `for epoch in loader.epochs`, around `for batch in loader`.

        A resumed run begins with the epoch of its checkpoint. Raises RuntimeError if an epoch was passed without a
        `for` loop over the loader, and what the loader raises."""
        self._open()
        self._counts_epochs = True
        while (epoch := self._session.next_epoch()) is not None:
            num_loops = self._num_loops
            yield epoch
            if num_loops == self._num_loops and self._session.run.stop_reason is None:
                raise RuntimeError(
                    f"epoch {epoch} was passed without a `for batch in loader`: only that trains it; loader.stop() "
                    "ends a run"
                )
        self._session.keep_final_state()

    @property
    def stopped(self) -> str | None:
        """Why the run ends or ended before its data: the reason given to `stop`, or a signal's name."""
        return self._session.run.stop_reason

    def stop(self, reason: str = "loader.stop()") -> None:
        """Ends the run at the current batch, with a checkpoint for a later run to continue from.

        If the batch still needs optimizer.step(), the loop ends after that. Then the loader yields no batches, and
        `state_dict()` holds the whole tables.

        reason: a few words for the log."""
        self._open()
        self._session.stop(reason)

    def record(self, *, logits: Tensor) -> None:
        """Records predictions for the current evaluation batch, from which `evaluation` is computed.

        logits: f32 [B], or [B, T] with several labels; labels are 0 or 1. Raises RuntimeError outside of an evaluation
        batch."""
        self._session.record(logits)

    @property
    def evaluation(self) -> Evaluation | None:
        """The figures of the newest evaluation with recorded logits; complete after the `for` loop."""
        return self._session.run.results.evaluation_result

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Yields the batches of one epoch.

        Raises RowcastError if the prefetcher fails or is lost, RuntimeError if the last batch was trained incorrectly
        or the script loops over more epochs than it asked for.
        """
        self._open()
        self._num_loops += 1
        first = self._session.peek()
        if self._session.epochs.consume_finished(None if first is None else first.epoch):
            return  # an empty loop, so that the script does what it does after that epoch
        if first is None:
            if not self._session.run.resumes and self._session.run.stop_reason is None:  # a resumed run has fewer left
                raise RuntimeError(
                    f"the loader has ended after {self._session.train_steps} train steps, with data.epochs = "
                    f"{self._job.data.epochs}; give connect epochs=N to go through the data N times, and write "
                    "`for epoch in loader.epochs`, which ends with them"
                )
            return
        epoch = first.epoch
        if self._num_loops == 1 and epoch and not self._counts_epochs:
            print_line(
                f"this first `for` is the rest of epoch {epoch}, counted from 0; `for epoch in loader.epochs` counts "
                "on from there"
            )
        while (step := self._session.peek()) is not None and step.epoch == epoch:
            self._session.begin()
            if step.kind == "train" or self._parts.evaluate:
                yield self._loaded()
        if self._session.run.stop_reason is None:
            self._session.epochs.end(epoch)

    def _loaded(self) -> LoadedBatch:
        step = self._session.step
        assert step is not None, "begun"
        # the script may be in inference mode now and still train on the batch outside it
        with torch.inference_mode(False), on_device(self._tables.device):
            batch = LoadedBatch(step, self._session, self._job.features)
            self._session.current.stream_order.drawn()
        return batch

    def _open(self) -> None:
        if not self._is_open:
            require_group(self._parts.launch, self._tables.device)
            self._is_open = True
            if not structlog.is_configured():
                # otherwise structlog writes to the script's standard output
                setup_logging("trainer", "warning", rank=rank_in_log(environ))
            warm_up_sqrt()
            self._session.open()
            self._tables.session = self._session
