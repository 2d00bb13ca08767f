"""One adopted run: a prefetcher, the engine in this process, and the step that the script has in hand.

    peek    drives the engine until the next step's rows are here, or the data has ended     (between two steps)
    begin   the script may look the step up
    finish  its compute was issued; the engine reports it when the device has done it
    stop    the steps under way are passed over, and the run ends where the script stands

All is called by the script's thread. The mail, the sender and the watch have threads of their own, which stop with the session.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.messages import StopRequest, Welcome
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
from rowcast.trainer.adopt.say import tell
from rowcast.trainer.adopt.script_state import ScriptState
from rowcast.trainer.adopt.slices import Slice
from rowcast.trainer.adopt.stateful_objects import StatefulObjects
from rowcast.trainer.adopt.stop_signals import StopSignals
from rowcast.trainer.adopt.stream_order import StreamOrder
from rowcast.trainer.adopt.telemetry import ScriptTelemetry
from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.execute.engine import TrainerEngine
from rowcast.trainer.execute.metrics import new_counters
from rowcast.trainer.execute.phases import PhaseClock
from rowcast.trainer.execute.streams import adopted_streams, on_device
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.report.report_json import Evaluation
from rowcast.trainer.run.connection import Connection, ConnectionParts

CHILD_END_S = 15.0  # for a prefetcher that knows that it is over
LOST_CHILD_S = 3.0  # for one that seems to be gone to be seen to have ended
CHECKPOINT_POLL_S = 0.02
RECORDED = {
    "train": "record(loss=...) is of a train batch: call it in the loop, before the loader is asked for the next",
    "eval": "record(logits=...) is of an evaluation batch (batch.kind): call it in the loop, before the loader is asked for the next",
}
LEFT_BETWEEN_EPOCHS = "the training script has left the loader between two epochs: one `for` loop over it is one epoch, and loader.stop() ends a run early"


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    job: Job
    device: torch.device
    start_child: Callable[[], Child] | None  # None: a prefetcher runs already, or will
    dense: StatefulObjects | None
    dense_optimizer: bool  # it must step once for each train batch
    evaluate: bool = False  # evaluation batches are yielded too
    accumulate: int = 1  # micro-batches that each batch is yielded as
    begins_with_tables: bool = False  # that the script has loaded: not with a checkpoint
    finished: Manifest | None = None  # the last checkpoint of a run that is complete: nothing is trained


class ScriptSession:
    def __init__(self, parts: SessionParts) -> None:
        self.ended = False  # everything is home and on disk, and both have said good-bye
        self.goes_on = False  # from a checkpoint, so that the script's loop may count epochs that are over
        self.metrics_address: str | None = None  # "host:port", once it is open
        self.stop_reason: str | None = None  # why the run is to end, or has ended, before its data
        self._parts = parts
        self._job = parts.job
        self._groups = group_specs(parts.job)
        self._bell = Doorbell()
        self._crew = Crew("trainer", self._bell, owns_process=False)
        self._counters = new_counters(self._groups)
        self._shown = ScriptTelemetry(parts.job, parts.device, self._counters, self._crew.dead_stage)
        self._script = ScriptState(parts.dense, parts.device)
        self._stack = ExitStack()
        self._connection: Connection | None = None
        self._hand: CurrentStep | None = None
        self._child: Child | None = None
        self._next: ArrivedStep | None = None  # taken, and not begun
        self._epoch: int | None = None  # of the last step begun
        self._last_step: int | None = None  # that was finished
        self._loss: Tensor | None = None  # of the step in hand, as far as it was recorded
        self._follows_barrier = False  # the step in hand
        self._steps = OptimizerSteps()
        self._signals = StopSignals(self.ask_to_stop)
        self._stack.callback(self._steps.close)
        self._stack.callback(LossScaling(lambda: self._hand is not None and self._hand.awaits_backward).close)
        self._directory: RunDirectory | None = None  # while it is held
        self._turn_s = time.monotonic()  # when the script was last known to have its turn
        self._script_has_turn = False
        self._pid = os.getpid()
        self._closed = False

    # from nothing to an engine

    def open(self) -> None:
        """Raises RowcastError; then everything is closed again."""
        with self._in_engine():
            if self._parts.finished is not None:
                self._open_finished(self._parts.finished)
                return
            began_s = time.monotonic()
            self._directory = self._stack.enter_context(RunDirectory(self._job.run_dir, "trainer"))
            self._directory.clear_failure()
            self._stack.callback(self._signals.close)
            self._signals.open()
            self.metrics_address = self._shown.serve(self._stack)
            if self._parts.start_child is not None:
                self._child = self._parts.start_child()
                self._stack.callback(self._child.see_out, CHILD_END_S)
            kernels = choose_kernels(self._parts.device, self._job)  # while the prefetcher prepares, too
            # where it was started here, its end says more than a note
            self._connect(kernels, None if self._child is not None else began_s)

    def _open_finished(self, last: Manifest) -> None:
        """The dense side is what it was when the script had left its loop; where it did not come so far, when the data had ended, and the
        epoch that the script had not left is left, with no batch."""
        over = run_folder.over_tensors(self._job.run_dir, last)
        tensors = run_folder.dense_tensors(self._job.run_dir, last) if over is None else over
        self._script.restore(tensors)
        self._shown.results.restore_evaluations(tensors)
        self._shown.train_steps, self.goes_on, self.ended = last.train_steps, True, True
        self.epochs.begin(last.position if over is None else None)
        self._close_evaluation()
        self._close_stack()

    def _connect(self, kernels: Kernels, began_s: float | None) -> None:
        connection = self._connection = Connection(
            ConnectionParts(
                job=self._job,
                groups=self._groups,
                mode="train",
                device=self._parts.device,
                threads=torch.get_num_threads(),
                transport=self._job.transport,
                counters=self._counters,
                health=self._shown.health,
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
        self.goes_on = welcome.first_train_step > 0
        if welcome.pairing:
            tell(f"ids come by position: {welcome.pairing}")
        self._start(connection, welcome, kernels)

    def _is_stopping(self) -> bool:
        return self.stop_reason is not None

    def _child_ended(self) -> bool:
        return self._child is not None and self._child.code is not None

    def _check_fits_script(self, welcome: Welcome) -> None:
        """Raises ConfigError."""
        if welcome.first_train_step:
            run_folder.refuse_to_go_on(
                self._job.run_dir,
                welcome.first_train_step,
                has_dense=self._parts.dense is not None,
                has_tables=self._parts.begins_with_tables,
            )
        if self._parts.evaluate and welcome.epoch_batches[1] == 0:
            raise ConfigError(
                "connect: evaluate=True, but the data set has no evaluation batches; let the factory return a function of "
                '(split, epoch) that knows the split "eval"'
            )

    def _start(self, connection: Connection, welcome: Welcome, kernels: Kernels) -> None:
        self._shown.accept(welcome)
        connection.stack.callback(self._shown.leave)
        connection.stack.enter_context(self._shown.results)

        def make_model(records: list[Tensor], clock: PhaseClock) -> tuple[ScriptState, None]:
            return self._script, None

        streams = adopted_streams(self._parts.device)
        engine = connection.start(lambda device: streams, make_model, self._shown.results)
        uses = StreamOrder(streams.compute)
        self._hand = CurrentStep(
            Embeddings(self._groups, self._job.optimizer.sparse, engine.slots.records, kernels, uses.lap),
            uses,
            self._steps,
            dense_optimizer=self._parts.dense_optimizer,
            accumulate=self._parts.accumulate,
        )
        self._shown.begin(engine, welcome, pinned=connection.has_pinned_rings)

    @property
    def _engine(self) -> TrainerEngine:
        assert self._connection is not None, "a session that was opened has an engine"
        assert self._connection.engine is not None, "a session that was opened has an engine"
        return self._connection.engine

    @property
    def hand(self) -> CurrentStep:
        assert self._hand is not None, "a session that was opened has an engine"
        return self._hand

    @property
    def current(self) -> ArrivedStep | None:
        """The step in hand."""
        return None if self._hand is None else self._hand.step

    @property
    def train_steps(self) -> int:
        """Of the run, that were finished."""
        return self._shown.train_steps

    # what the script may know

    @property
    def epochs(self) -> EpochCount:
        return self._script.epochs

    @property
    def epoch(self) -> int:
        """Of the step in hand, or of the one that was finished last; before the first that of the checkpoint, or 0."""
        return self.epochs.first if self._epoch is None else self._epoch

    def epoch_batches(self) -> tuple[int | None, int | None]:
        """Train and evaluation batches of an epoch, where the data set knows."""
        welcome = None if self._connection is None else self._connection.welcome
        if welcome is None:
            return 0, 0  # of a run that is complete
        train, evaluation = welcome.epoch_batches
        most = welcome.train_steps  # max_steps may end the run within its first epoch
        return (train if train is None or most is None else min(train, most)), evaluation

    @property
    def evaluation(self) -> Evaluation | None:
        """The last that was recorded and has ended."""
        return self._shown.results.evaluation_result

    def next_epoch(self) -> int | None:
        """Of the next `for`; None where no epoch is left. Waits for the next step."""
        if self._hand is not None and self._hand.has_slices:
            return self.epoch
        first = self.peek()
        return self.epochs.next(None if first is None else first.header.epoch)

    # step by step

    def keep_final_state(self) -> None:
        """What the script does after its last epoch is done, and connecting again finds it as it is now."""
        if self.ended and self.stop_reason is None and self._parts.dense is not None:
            run_folder.keep_over(self._job.run_dir, {**self._script.state(), **self._shown.results.state()})

    def peek(self) -> ArrivedStep | None:
        """Finishes the step in hand and waits for the next; None where the run has ended, and the session with it. Raises RowcastError."""
        self.finish()
        if not self.ended and (self._next is None or self.stop_reason is not None):
            self._script_has_turn = False
            with self._in_engine():
                if self.stop_reason is None:
                    self._next = self._await_step(unless=self._is_stopping)
                if self.stop_reason is not None and not self.ended:
                    self._stop_here()
            self._turn_s, self._script_has_turn = time.monotonic(), True
        if self._next is None or self._next.header.kind == "train":
            self._close_evaluation()
        return self._next

    def next_slice(self) -> Slice | None:
        """The next micro-batch of the step in hand is the script's now; None where it has had all."""
        return None if self._hand is None else self._hand.next_slice()

    def begin(self) -> ArrivedStep:
        """The step that `peek` has found is the script's now."""
        step, self._next = self._next, None
        assert step is not None, "peek comes before begin"
        self._follows_barrier = self._engine.barrier.stop_reason is not None
        self._engine.loop.begin(step)
        self.hand.begin(step)
        self._epoch, self._loss = step.header.epoch, None
        return step

    def finish(self) -> None:
        """Raises RuntimeError where the step was not trained as the script seems to mean it."""
        step = self.current
        if step is None:
            return
        self.hand.end()
        self._shown.train_steps += step.header.kind == "train"
        self._last_step = step.step
        self._engine.loop.finish(step, self._loss)
        self._bell.ring()

    def record(self, loss: Tensor | float | None, logits: Tensor | None) -> None:
        """Of the batch in hand. Raises RuntimeError where there is none of that kind."""
        step = self.current
        for given, kind in ((loss, "train"), (logits, "eval")):
            if given is not None and (step is None or step.header.kind != kind):
                raise RuntimeError(RECORDED[kind])
        if loss is not None:
            assert step is not None, "looked at above"
            own = torch.as_tensor(loss, dtype=torch.float32).detach().mean() * (
                self.hand.slice.size / step.header.batch_size
            )
            self._loss = own if self._loss is None else self._loss + own
        if logits is not None:
            self._script.record(logits.detach().float().reshape(-1), self.hand.labels())
        self.hand.uses.record()

    def _close_evaluation(self) -> None:
        if self._script.evaluating and (self.stop_reason is None or not self.ended):
            result = self._script.close_evaluation(self.train_steps)
            if result is not None:
                self._shown.results.evaluation(result)

    def _await_step(self, unless: Callable[[], bool]) -> ArrivedStep | None:
        """The next step; None where there is none, and the session has ended, or where `unless` says so first."""
        connection = self._connection
        if connection is None or self._closed:
            raise RuntimeError("the loader was closed; connect again to train on")
        engine, found = self._engine, list[ArrivedStep]()

        def advance() -> bool:
            self._shown.update(engine)
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
        """A script may take as long as it likes for a step: while it has its turn, that is progress."""
        if self._script_has_turn:
            self._turn_s = time.monotonic()
        waiting_for = "the training script" if self._script_has_turn else progress.waiting_for
        return replace(progress, work=progress.work + int(self._turn_s), waiting_for=waiting_for)

    # a stop

    def ask_to_stop(self, reason: str) -> None:
        """The run ends when the loader is asked next. Also called by a signal's handler."""
        self.stop_reason = self.stop_reason or reason
        self._shown.health.state = "stopping"
        self._bell.ring()

    def stop(self, reason: str) -> None:
        """Ends the run where the script stands; a step whose rows wait for their backward pass or the dense optimizer is ended first, when
        the loader is asked for the next. Raises RowcastError."""
        if self.ended:
            return
        self.ask_to_stop(reason)
        step = self.current
        if step is not None and not self.hand.is_used:
            self._next = step  # left for the run that goes on
            self.hand.drop()
        if step is None or self.current is None or self.hand.is_done:
            self.peek()

    def _stop_here(self) -> None:
        """The prefetcher is told at which step training goes on, before it hears that any step from there on is done."""
        engine = self._engine
        if self._next is None and self._last_step is None:
            self._next = self._await_step(unless=lambda: False)  # to learn which step is the first
        next_step = (
            self._next.step if self._next is not None else None if self._last_step is None else self._last_step + 1
        )
        if self.ended or next_step is None:
            return
        engine.conversation.send(StopRequest(reason=f"{self.stop_reason} in the training script", next_step=next_step))
        step, self._next = self._next, None
        while step is not None or (step := self._await_step(unless=lambda: False)) is not None:
            engine.loop.pass_over(step)
            self._bell.ring()
            step = None

    # checkpoints

    def checkpoint_here(self) -> str | None:
        """The name of the checkpoint that holds the tables as they are now, once it is on disk; None where the plans have none here. A step
        in hand that was trained is finished for it."""
        if self.current is not None and self.hand.awaits_optimizer and self._parts.dense is not None:
            raise RuntimeError("a checkpoint of dense=... belongs behind optimizer.step(): call state_dict() after it")
        if self.current is None or (self.hand.is_trained and not self.hand.has_slices):
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
        """Whether a checkpoint was taken right before the step in hand, or before the next one, which may not be on disk yet."""
        if self.ended:
            return False
        return self._follows_barrier if self.current is not None else self._engine.barrier.stop_reason is not None

    # the end

    def _end(self, connection: Connection, engine: TrainerEngine) -> None:
        end = engine.barrier.end
        assert end is not None, "the loop ends with EndOfData"
        if end.finished:
            self._close_evaluation()
        self._shown.write()
        connection.say_bye()
        self.ended = True
        self._close_stack()
        if end.finished:
            self.stop_reason = None
        elif self.stop_reason is not None:
            tell(self._stopped())
        else:
            raise RowcastError(
                f"the prefetcher was stopped ({engine.barrier.stop_reason}) after {self.train_steps} train steps; its checkpoint is in "
                f"{self._job.run_dir}: {self._how_to_go_on()}"
            )

    def _stopped(self) -> str:
        if not self.train_steps:
            return f"stopped by {self.stop_reason} before the first train step"
        return (
            f"stopped by {self.stop_reason} after {self.train_steps} train steps, in epoch {self.epoch}; the checkpoint is in "
            f"{self._job.run_dir}: {self._how_to_go_on()}"
        )

    def _how_to_go_on(self) -> str:
        if self._parts.dense is None:
            return "without connect(..., dense=(model, optimizer)) it has the tables alone, and the run cannot be continued"
        return "start the script again to go on right there"

    def leave(self) -> None:
        """Whatever the script still had to do: both processes end. Idempotent, and nothing in a process that was forked from this one."""
        if self._closed or self._pid != os.getpid():
            return
        if self._next is not None and self._epoch is not None and self._next.header.epoch != self._epoch:
            get_logger().warning(LEFT_BETWEEN_EPOCHS, epochs=self._job.data.epochs, done=self._epoch + 1)
        self._tell(RowcastError(f"the training script left its loop after {self.train_steps} train steps"))
        self._close_stack()

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Whatever mode and device the script is in. Errors close everything."""
        try:
            with torch.inference_mode(False), on_device(self._parts.device):
                yield
        except BaseException as error:  # noqa: BLE001 - whatever it is, both sides end with it
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> BaseException:
        """Closes everything; what the script is told."""
        if self._closed:
            return error
        self._tell(error)
        if isinstance(error, PeerLost) and self._child is not None and self._child.ended_within(LOST_CHILD_S):
            error = peer_failure(self._child.code or 1, self._child.obituary())
        self._close_stack()
        return error

    def _tell(self, error: BaseException) -> None:
        if self._directory is not None:
            self._directory.note_failure(error)
        if self._connection is not None:
            self._connection.tell(error)

    def _close_stack(self) -> None:
        self._closed = True
        self._next = None
        if self._hand is not None:
            self._hand.step = None
        self._stack.close()
