"""Runs an adopted script's session: a prefetcher, the engine in this process, and the script's current step.

    peek    drives the engine until the next step's rows are here or the data has ended      (between two steps)
    begin   the script may look up the step
    finish  the step's compute was issued; the engine reports it when the device has completed it
    stop    ends the run at the script's current step; steps on their way are passed over

The script's thread calls all of these. The mail, the sender and the watch have threads of their own, which stop with
the session.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from traceback import clear_frames

import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.messages import PlanHeader, StopRequest, Welcome
from rowcast.protocol.peer_watch import ProcessProgress
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.child import Child
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError, peer_failure
from rowcast.runtime.process import Crew
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.adopt import run_folder
from rowcast.trainer.adopt.current_step import CurrentStep
from rowcast.trainer.adopt.epoch_count import EpochCount
from rowcast.trainer.adopt.loss_scaling import LossScaling
from rowcast.trainer.adopt.optimizer_steps import OptimizerSteps
from rowcast.trainer.adopt.script_state import ScriptState
from rowcast.trainer.adopt.slices import Slice
from rowcast.trainer.adopt.stateful_objects import StatefulObjects
from rowcast.trainer.adopt.stderr import print_line
from rowcast.trainer.adopt.stop_signals import StopSignals
from rowcast.trainer.adopt.stream_order import StreamOrder
from rowcast.trainer.adopt.telemetry import ScriptTelemetry
from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.execute.engine import TrainerEngine
from rowcast.trainer.execute.metrics import new_counters
from rowcast.trainer.execute.phases import PhaseClock
from rowcast.trainer.execute.streams import adopted_streams, on_device, release_memory
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.report.report_json import Evaluation
from rowcast.trainer.run.connection import Connection, ConnectionParts

CHILD_END_S = 15.0  # a prefetcher that was asked to end may take this long
LOST_CHILD_S = 3.0  # a prefetcher that seems lost may take this long to be seen to have ended
CHECKPOINT_POLL_S = 0.02
WRONG_KIND = {
    "train": "record(loss=...) takes the loss of a train batch: call it in the loop, before the loader is asked for "
    "the next batch",
    "eval": "record(logits=...) takes the logits of an evaluation batch (batch.kind): call it in the loop, before the "
    "loader is asked for the next batch",
}
LEFT_BETWEEN_EPOCHS = (
    "the training script has left the loader between two epochs: one `for` loop over it is one epoch, and "
    "loader.stop() ends a run early"
)


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    job: Job
    device: torch.device
    start_child: Callable[[], Child] | None  # None: the user starts the prefetcher
    dense: StatefulObjects | None
    dense_optimizer: bool  # a dense optimizer must step once for each train batch
    evaluate: bool = False  # evaluation batches are yielded too
    accumulate: int = 1  # micro-batches per batch
    begins_with_tables: bool = False  # the run begins with tables that the script has loaded, not with a checkpoint
    finished: Manifest | None = None  # the last checkpoint of a complete run, of which nothing is left to train


class ScriptSession:
    def __init__(self, parts: SessionParts) -> None:
        self.ended = False  # all rows are home and on disk, and both processes have said good-bye
        self.resumes = False  # the run continues from a checkpoint, so the script may count epochs that are complete
        self.metrics_address: str | None = None  # "host:port", once it is open
        self.stop_reason: str | None = None  # why the run is to end, or has ended, before its data does
        self._parts = parts
        self._job = parts.job
        self._groups = group_specs(parts.job)
        self._bell = Doorbell()
        self._crew = Crew("trainer", self._bell, owns_process=False)
        self._counters = new_counters(self._groups)
        self._telemetry = ScriptTelemetry(parts.job, parts.device, self._counters, self._crew.dead_stage)
        self._script_state = ScriptState(parts.dense, parts.device, parts.job.data.columns.labels)
        self._stack = ExitStack()
        self._connection: Connection | None = None
        self._current: CurrentStep | None = None
        self._child: Child | None = None
        self._next: ArrivedStep | None = None  # taken and not begun
        self._epoch: int | None = None  # the epoch of the newest step that was begun
        self._last_step: int | None = None  # the newest step that was finished
        self._loss: Tensor | None = None  # sum of the losses recorded for the current step
        self._follows_barrier = False  # a barrier came right before the current step
        self._optimizer_steps = OptimizerSteps()
        self._signals = StopSignals(self.ask_to_stop)
        self._stack.callback(self._optimizer_steps.close)
        self._stack.callback(LossScaling(lambda: self._current is not None and self._current.awaits_backward).close)
        self._directory: RunDirectory | None = None  # while this process holds its lock
        self._script_ran_s = time.monotonic()  # when the script was last known to run
        self._script_runs = False  # False: the session works, and the script waits for it
        self._pid = os.getpid()
        self._closed = False

    # opening

    def open(self) -> None:
        """Starts the prefetcher and the engine. Raises RowcastError after closing everything."""
        with self._in_engine():
            if self._parts.finished is not None:
                self._open_finished(self._parts.finished)
                return
            began_s = time.monotonic()
            self._directory = self._stack.enter_context(RunDirectory(self._job.run_dir, "trainer"))
            self._directory.clear_failure()
            self._stack.callback(self._signals.close)
            self._signals.open()
            self.metrics_address = self._telemetry.serve(self._stack)
            if self._parts.start_child is not None:
                self._child = self._parts.start_child()
                self._stack.callback(self._child.terminate, CHILD_END_S)
            kernels = choose_kernels(self._parts.device, self._job)  # while the prefetcher prepares as well
            # the exit of a child says more than the failure that it notes
            self._connect(kernels, None if self._child is not None else began_s)

    def _open_finished(self, last: Manifest) -> None:
        """Restores the state that the script had after its loop, or if there is none, the state at the end of the data.

        In the second case the script has not left its last epoch, which it then leaves without a batch.
        """
        final = run_folder.final_tensors(self._job.run_dir, last)
        tensors = run_folder.dense_tensors(self._job.run_dir, last) if final is None else final
        self._script_state.restore(tensors)
        self._telemetry.results.restore_evaluations(tensors)
        self._telemetry.train_steps, self.resumes, self.ended = last.train_steps, True, True
        self.epochs.begin(last.position if final is None else None)
        self._close_evaluation()
        self._close_stack()

    def _connect(self, kernels: Kernels, began_s: float | None) -> None:
        connection = self._connection = Connection(
            ConnectionParts(
                job=self._job,
                groups=self._groups,
                folder=self._job.run_dir,
                mode="train",
                device=self._parts.device,
                threads=torch.get_num_threads(),
                transport=self._job.transport,
                counters=self._counters,
                health=self._telemetry.health,
                bell=self._bell,
                crew=self._crew,
                began_s=began_s,
                adjust_progress=self._adjust_progress,
            )
        )
        self._stack.enter_context(connection)
        welcome = connection.meet(self._is_stopping, gone=self._child_ended)
        if welcome is None and self.stop_reason is not None:
            raise KeyboardInterrupt
        if welcome is None:
            raise PeerLost("the prefetcher was stopped before the run had begun")
        self._check_fits_script(welcome)
        self.epochs.begin(welcome.start)
        self.resumes = welcome.first_train_step > 0
        if welcome.pairing:
            print_line(f"ids come by position: {welcome.pairing}")
        self._start(connection, welcome, kernels)

    def _is_stopping(self) -> bool:
        return self.stop_reason is not None

    def _child_ended(self) -> bool:
        return self._child is not None and self._child.code is not None

    def _check_fits_script(self, welcome: Welcome) -> None:
        """Raises ConfigError."""
        if welcome.first_train_step:
            run_folder.refuse_to_resume(
                self._job.run_dir,
                welcome.first_train_step,
                has_dense=self._parts.dense is not None,
                has_tables=self._parts.begins_with_tables,
            )
        if self._parts.evaluate and welcome.epoch_batches[1] == 0:
            raise ConfigError(
                "connect: evaluate=True, but the data set has no evaluation batches; let the factory return a function "
                'of (split, epoch) that knows the split "eval"'
            )

    def _start(self, connection: Connection, welcome: Welcome, kernels: Kernels) -> None:
        self._telemetry.accept(welcome)
        connection.stack.callback(self._telemetry.leave)
        connection.stack.enter_context(self._telemetry.results)

        def make_model(records: list[Tensor], clock: PhaseClock) -> tuple[ScriptState, None]:
            return self._script_state, None

        streams = adopted_streams(self._parts.device)
        engine = connection.start(lambda device: streams, make_model, self._telemetry.results)
        stream_order = StreamOrder(streams.compute)
        self._current = CurrentStep(
            Embeddings(self._groups, self._job.optimizer.sparse, engine.slots.records, kernels, stream_order.lap),
            stream_order,
            self._optimizer_steps,
            dense_optimizer=self._parts.dense_optimizer,
            accumulate=self._parts.accumulate,
        )
        self._telemetry.begin(engine, welcome, pinned=connection.has_page_locked_rings)

    @property
    def _engine(self) -> TrainerEngine:
        assert self._connection is not None, "open has made an engine"
        assert self._connection.engine is not None, "open has made an engine"
        return self._connection.engine

    @property
    def current(self) -> CurrentStep:
        assert self._current is not None, "open has made an engine"
        return self._current

    @property
    def step(self) -> ArrivedStep | None:
        """The script's current step, begun and not finished."""
        return None if self._current is None else self._current.step

    @property
    def train_steps(self) -> int:
        return self._telemetry.train_steps

    # what the script may ask

    @property
    def epochs(self) -> EpochCount:
        return self._script_state.epochs

    @property
    def epoch(self) -> int:
        """The epoch of the newest step that was begun; before the first one, that of the checkpoint, or 0."""
        return self.epochs.first if self._epoch is None else self._epoch

    def epoch_batches(self) -> tuple[int | None, int | None]:
        """Train and evaluation batches per epoch; None for a number that the data set does not know."""
        welcome = None if self._connection is None else self._connection.welcome
        if welcome is None:
            return 0, 0  # the run is complete
        train, evaluation = welcome.epoch_batches
        most = welcome.train_steps  # max_steps may end the run within its first epoch
        return (train if train is None or most is None else min(train, most)), evaluation

    @property
    def evaluation(self) -> Evaluation | None:
        return self._telemetry.results.evaluation_result

    def next_epoch(self) -> int | None:
        """The epoch of the next `for`; None if no epoch is left. Waits for the next step."""
        if self._current is not None and self._current.has_slices:
            return self.epoch
        first = self.peek()
        return self.epochs.next(None if first is None else first.epoch)

    # step by step

    def keep_final_state(self) -> None:
        """Saves the state that the script has after its last epoch, so that connecting again restores it."""
        if self.ended and self.stop_reason is None and self._parts.dense is not None:
            tensors = {**self._script_state.state(), **self._telemetry.results.state()}
            run_folder.keep_final(self._job.run_dir, tensors)

    def peek(self) -> PlanHeader | None:
        """Finishes the current step and waits for the next one; None after the end of the run, which ends the session.

        Raises RowcastError.
        """
        self.finish()
        if not self.ended and (self._next is None or self.stop_reason is not None):
            if self._connection is None or self._closed:
                raise RuntimeError("the loader was closed; connect again to continue training")
            self._script_runs = False
            with self._in_engine():
                if self.stop_reason is None:
                    self._next = self._await_step(unless=self._is_stopping)
                if self.stop_reason is not None and not self.ended:
                    self._stop_here()
            self._script_ran_s, self._script_runs = time.monotonic(), True
            if self._closed:
                release_memory(self._parts.device)  # here, where no call holds the engine any more
        if self._next is None or self._next.header.kind == "train":
            self._close_evaluation()
        return None if self._next is None else self._next.header

    def next_slice(self) -> Slice | None:
        """Gives the script the next micro-batch of the current step; None after the last one."""
        return None if self._current is None else self._current.next_slice()

    def begin(self) -> ArrivedStep:
        """Gives the script the step that `peek` has found."""
        step, self._next = self._next, None
        assert step is not None, "peek comes before begin"
        self._follows_barrier = self._engine.barrier.stop_reason is not None
        self._engine.loop.begin(step)
        self.current.begin(step)
        self._epoch, self._loss = step.header.epoch, None
        return step

    def finish(self) -> None:
        """Raises RuntimeError if the script did not train the step as it seems to intend."""
        step = self.step
        if step is None:
            return
        with on_device(self._parts.device):
            self.current.end()
            self._telemetry.train_steps += step.header.kind == "train"
            self._last_step = step.step
            self._engine.loop.finish(step, self._loss)

    def record(self, loss: Tensor | float | None, logits: Tensor | None) -> None:
        """Records results of the current batch. Raises RuntimeError if there is no batch of that kind."""
        step = self.step
        for given, kind in ((loss, "train"), (logits, "eval")):
            if given is not None and (step is None or step.header.kind != kind):
                raise RuntimeError(WRONG_KIND[kind])
        if loss is not None:
            assert step is not None, "checked above"
            share = self.current.slice.size / step.header.batch_size
            weighted = torch.as_tensor(loss, dtype=torch.float32).detach().mean() * share
            self._loss = weighted if self._loss is None else self._loss + weighted
        if logits is not None:
            labels = self.current.labels()
            self._script_state.record(logits.detach().float().reshape(labels.shape), labels)
        self.current.stream_order.record()

    def _close_evaluation(self) -> None:
        if self._script_state.evaluating and (self.stop_reason is None or not self.ended):
            result = self._script_state.close_evaluation(self.train_steps)
            if result is not None:
                self._telemetry.results.evaluation(result)

    def _await_step(self, unless: Callable[[], bool]) -> ArrivedStep | None:
        """The next step; None if the run has ended, which ends the session, or as soon as `unless` returns True."""
        connection = self._connection
        assert connection is not None, "peek comes after open"
        engine, found = self._engine, list[ArrivedStep]()

        def advance() -> bool:
            self._telemetry.update(engine)
            if engine.loop.advance():
                return True
            found.extend(filter(None, [engine.loop.take()]))
            return bool(found)

        connection.drive(advance, until=lambda: bool(found) or engine.finished or unless())
        if found:
            return found[0]
        if engine.finished:
            self._end(connection, engine)
        return None

    def _adjust_progress(self, progress: ProcessProgress) -> ProcessProgress:
        """A script may take as long as it needs for a step, so the time in which it runs counts as progress."""
        if self._script_runs:
            self._script_ran_s = time.monotonic()
        waiting_for = "the training script" if self._script_runs else progress.waiting_for
        return replace(progress, work=progress.work + int(self._script_ran_s), waiting_for=waiting_for)

    # stopping

    def ask_to_stop(self, reason: str) -> None:
        """Ends the run when the loader is asked for the next batch. Signal handlers call this too."""
        self.stop_reason = self.stop_reason or reason
        self._telemetry.health.state = "stopping"
        self._bell.ring()

    def stop(self, reason: str) -> None:
        """Ends the run at the script's current step. Raises RowcastError.

        A step that still needs its backward pass or the dense optimizer is finished first; the run then ends when the
        loader is asked for the next batch.
        """
        if self.ended:
            return
        self.ask_to_stop(reason)
        step = self.step
        if step is not None and not self.current.is_used:
            self._next = step  # the resumed run begins with it
            self.current.drop()
        if step is None or self.step is None or self.current.is_done:
            self.peek()

    def _stop_here(self) -> None:
        """Sends the step at which training is to continue, before the prefetcher hears that a later step is done."""
        engine = self._engine
        if self._next is None and self._last_step is None:
            self._next = self._await_step(unless=lambda: False)  # only its number tells which step is the first
        next_step = (
            self._next.step if self._next is not None else None if self._last_step is None else self._last_step + 1
        )
        if self.ended or next_step is None:
            return
        engine.conversation.send(StopRequest(reason=f"{self.stop_reason} in the training script", next_step=next_step))
        step, self._next = self._next, None
        while step is not None or (step := self._await_step(unless=lambda: False)) is not None:
            engine.loop.pass_over(step)
            step = None

    # checkpoints

    def checkpoint_here(self) -> str | None:
        """Waits for the checkpoint of the tables as they are now and returns its name; None if none is planned here.

        Finishes the current step first if it was trained.
        """
        if self.step is not None and self.current.awaits_optimizer and self._parts.dense is not None:
            raise RuntimeError("a checkpoint with dense=... comes after optimizer.step(): call state_dict() after it")
        if self.step is None or (self.current.is_trained and not self.current.has_slices):
            self.peek()
        while (found := run_folder.checkpoint_of(self._job.run_dir, self._run_id, self.train_steps)) is None:
            if not self._is_being_written():
                return None
            self._crew.check()
            time.sleep(CHECKPOINT_POLL_S)
        return found

    @property
    def _run_id(self) -> str | None:
        if self._parts.finished is not None:
            return self._parts.finished.run_id
        welcome = None if self._connection is None else self._connection.welcome
        return None if welcome is None else welcome.run_id

    def _is_being_written(self) -> bool:
        """Whether a barrier came right before the current or next step, so its checkpoint may not be on disk yet."""
        if self.ended:
            return False
        return self._follows_barrier if self.step is not None else self._engine.barrier.stop_reason is not None

    # the end

    def _end(self, connection: Connection, engine: TrainerEngine) -> None:
        end = engine.barrier.end
        assert end is not None, "the loop ends with EndOfData"
        if end.finished:
            self._close_evaluation()
        self._telemetry.write()
        connection.say_bye()
        self.ended = True
        self._close_stack()
        if end.finished:
            self.stop_reason = None
        elif self.stop_reason is not None:
            print_line(self._stop_sentence())
        else:
            raise RowcastError(
                f"the prefetcher was stopped ({engine.barrier.stop_reason}) after {self.train_steps} train steps; its "
                f"checkpoint is in {self._job.run_dir}: {self._how_to_continue()}"
            )

    def _stop_sentence(self) -> str:
        if not self.train_steps:
            return f"stopped by {self.stop_reason} before the first train step"
        return (
            f"stopped by {self.stop_reason} after {self.train_steps} train steps, in epoch {self.epoch}; the "
            f"checkpoint is in {self._job.run_dir}: {self._how_to_continue()}"
        )

    def _how_to_continue(self) -> str:
        if self._parts.dense is None:
            return (
                "without connect(..., dense=(model, optimizer)) it holds only the tables, and the run cannot be "
                "continued"
            )
        return "start the script again to continue from there"

    def leave(self) -> None:
        """Ends the run, wherever the script is. Idempotent; does nothing in a process forked from this one."""
        if self._closed or self._pid != os.getpid():
            return
        if self._next is not None and self._epoch is not None and self._next.header.epoch != self._epoch:
            get_logger().warning(LEFT_BETWEEN_EPOCHS, epochs=self._job.data.epochs, done=self._epoch + 1)
        self._report_failure(RowcastError(f"the training script left its loop after {self.train_steps} train steps"))
        self._close_stack()
        release_memory(self._parts.device)

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Runs the engine outside the script's inference mode and on the job's device. An error closes everything."""
        try:
            with torch.inference_mode(False), on_device(self._parts.device):
                yield
        except BaseException as error:  # noqa: BLE001 - any error ends the run
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> BaseException:
        """Closes everything; returns the error to raise in the script."""
        found = error
        if not self._closed:
            self._report_failure(error)
            if isinstance(error, PeerLost) and self._child is not None and self._child.ended_within(LOST_CHILD_S):
                found = peer_failure(self._child.code or 1, self._child.describe_exit())
            self._close_stack()
        for raised in (error, self._crew.error):
            if raised is not None:
                clear_frames(raised.__traceback__)  # a notebook keeps the last error, and with it what its frames hold
        release_memory(self._parts.device)
        return found

    def _report_failure(self, error: BaseException) -> None:
        if self._directory is not None:
            self._directory.note_failure(error)
        if self._connection is not None:
            self._connection.send_failure(error)

    def _close_stack(self) -> None:
        """Ends everything. What the script may do afterwards needs no rows, so nothing of them stays on the device."""
        self._closed = True
        self._next = None
        if self._current is not None:
            self._current.close()
        with on_device(self._parts.device):
            self._stack.close()
