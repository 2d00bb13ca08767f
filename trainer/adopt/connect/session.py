"""Runs the steps of an adopted script, over the engine of its `ScriptRun`.

    peek    drives the engine until the next step's rows have arrived or the data has ended      (between two steps)
    begin   the script may look up the step
    finish  the step's compute was issued; the engine reports it when the device has completed it
    stop    ends the run at the script's current step; later steps are passed over

The script's thread calls all of these.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from rowcast.job.optimizers import LearningRateSchedule
from rowcast.protocol.messages import StepHeader, StopRequest
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.adopt.connect import run_folder
from rowcast.trainer.adopt.connect.current_step import CurrentStep, OptimizerSteps, StreamOrder
from rowcast.trainer.adopt.connect.script_run import ScriptRun, SessionParts
from rowcast.trainer.adopt.connect.script_state import EpochCount, ScriptState
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.step.cache import Step
from rowcast.trainer.step.memory import Slots

CHECKPOINT_POLL_S = 0.02
NO_EVAL_BATCH = (
    "record(logits=...) takes predictions of an evaluation batch (batch.kind): call it in the loop, before the loader "
    "is asked for the next batch"
)
LEFT_BETWEEN_EPOCHS = (
    "the training script has left the loader between two epochs: one `for` loop over it is one epoch, and "
    "loader.stop() ends a run early"
)
SCALED = (
    "a GradScaler scales this loss, but rows are updated in its backward pass, before the scale is divided out again: "
    "use torch.autocast(..., dtype=torch.bfloat16), which needs no scaler, or GradScaler(enabled=False)"
)
_torch_scale = GradScaler.scale
_awaiting: list[Callable[[], bool]] = []  # of each open session, whether a look-up of it awaits its backward pass


class ScriptSession:
    def __init__(self, parts: SessionParts) -> None:
        self.run = ScriptRun(parts)
        self._parts, self._job = parts, parts.job
        self._script_state = ScriptState(parts.dense, parts.device, parts.job)
        self._current: CurrentStep | None = None
        self._next: Step | None = None  # received and not begun
        self._epoch: int | None = None  # the epoch of the newest step that was begun
        self._next_step: int | None = None  # where the run continues if it stops now; None before the first `peek`
        self._follows_barrier = False  # a barrier came right before the current step
        sparse = self._job.optimizer.sparse
        self._optimizer_steps = OptimizerSteps(sparse.lr, rows_follow=sparse.schedule != LearningRateSchedule())
        self.run.stack.callback(self._optimizer_steps.close)
        self.run.stack.enter_context(
            refusing_scaled_losses(lambda: self._current is not None and self._current.awaits_backward)
        )

    def open(self) -> None:
        """Starts the prefetcher and the engine. Raises RowcastError after closing everything."""
        with self.run.in_engine():
            if self._parts.finished is not None:
                self._open_finished(self._parts.finished)
                return
            welcome = self.run.open()
            self.epochs.begin(welcome.start)
            slots = self.run.start(welcome, self._script_state).slots
            stream_order = StreamOrder(slots.streams.compute)
            self._current = CurrentStep(
                self._look_ups(slots, stream_order),
                stream_order,
                self._optimizer_steps,
                dense_optimizer=self._parts.dense_optimizer,
            )
            self.run.stack.callback(self._let_go)

    def _look_ups(self, slots: Slots, stream_order: StreamOrder) -> Embeddings:
        return Embeddings(self.run.groups, slots.records, self.run.kernels, stream_order.lap)

    def _open_finished(self, last: Manifest) -> None:
        """Restores the script's state after its loop or, if there is none, the state at the end of the data.

        In the second case the script has not left its last epoch; it then leaves it without a batch."""
        run = self.run
        final = run_folder.final_tensors(self._job.run_dir, last)
        tensors = run_folder.dense_tensors(self._job.run_dir, last) if final is None else final
        self._script_state.restore(tensors)
        run.results.restore_evaluations(tensors)
        run.train_steps, run.resumes, run.ended = last.train_steps, True, True
        self.epochs.begin(last.position if final is None else None)
        self._close_evaluation()
        run.close()

    def _let_go(self) -> None:
        """Frees the rows on the device: the script needs none after the end."""
        self._next = None
        self.current.close()

    @property
    def current(self) -> CurrentStep:
        assert self._current is not None, "open has made an engine"
        return self._current

    @property
    def step(self) -> Step | None:
        """The script's current step, begun and not finished."""
        return None if self._current is None else self._current.step

    @property
    def train_steps(self) -> int:
        return self.run.train_steps

    @property
    def epochs(self) -> EpochCount:
        return self._script_state.epochs

    @property
    def epoch(self) -> int:
        """The epoch of the newest step that was begun; before the first one, that of the checkpoint, or 0."""
        return self.epochs.first if self._epoch is None else self._epoch

    def next_epoch(self) -> int | None:
        """The epoch of the next `for`; None if no epoch is left. Waits for the next step."""
        first = self.peek()
        return self.epochs.next(None if first is None else first.epoch)

    def keep_final_state(self) -> None:
        """Saves the script's state after its last epoch, so that connecting again restores it."""
        if self.run.ended and self.run.stop_reason is None and self._parts.dense is not None:
            tensors = {**self._script_state.state(), **self.run.results.state()}
            run_folder.keep_final(self.run.own_job.run_dir, tensors)

    def peek(self) -> StepHeader | None:
        """Finishes the current step and waits for the next one; None after the end of the run. Raises RowcastError."""
        self.finish()
        run = self.run
        if not run.ended and (self._next is None or run.stop_reason is not None):
            if run.closed:
                raise RuntimeError("the loader was closed; connect again to continue training")
            with run.in_engine():
                if run.stop_reason is None:
                    self._next = self._await_step(unless=lambda: run.stop_reason is not None)
                if run.stop_reason is not None and not run.ended:
                    self._stop_here()
        if self._next is None or self._next.header.kind == "train":
            self._close_evaluation()
        return None if self._next is None else self._next.header

    def begin(self) -> None:
        """Gives the script the step that `peek` has found."""
        step, self._next = self._next, None
        assert step is not None, "peek comes before begin"
        self._follows_barrier = self.run.engine.barrier.stop_reason is not None
        self.run.engine.loop.begin(step)
        self.current.begin(step)
        self._epoch = step.header.epoch

    def finish(self) -> None:
        """Raises RuntimeError if the script did not train the step as it seems to intend."""
        step = self.step
        if step is None:
            return
        with on_device(self._parts.device):
            self.current.end()
            self.run.train_steps += step.header.kind == "train"
            self._next_step = step.step + 1
            self.run.engine.loop.finish(step, None)

    def record(self, logits: Tensor) -> None:
        """Records predictions for the current evaluation batch. Raises RuntimeError if there is none."""
        step = self.step
        if step is None or step.header.kind != "eval":
            raise RuntimeError(NO_EVAL_BATCH)
        labels = step.arrays["labels"]
        self._script_state.record(logits.detach().float().reshape(labels.shape), labels)
        self.current.stream_order.record()

    def _close_evaluation(self) -> None:
        if self._script_state.evaluating and (self.run.stop_reason is None or not self.run.ended):
            result = self._script_state.close_evaluation(self.train_steps)
            if result is not None:
                self.run.results.evaluation(result)

    def _await_step(self, unless: Callable[[], bool] = lambda: False) -> Step | None:
        """The next step; None if the run has ended, which ends the session, or as soon as `unless` returns True."""
        engine, found = self.run.engine, list[Step]()

        def advance() -> bool:
            if engine.loop.advance():
                return True
            found.extend(filter(None, [engine.loop.take()]))
            return bool(found)

        self.run.connection.drive(advance, until=lambda: bool(found) or engine.loop.finished or unless())
        if found:
            self._next_step = found[0].step
            return found[0]
        if engine.loop.finished:
            if engine.barrier.end is not None and engine.barrier.end.finished:
                self._close_evaluation()
            self.run.end(self.epoch)
        return None

    # stopping

    def stop(self, reason: str) -> None:
        """Ends the run at the script's current step. Raises RowcastError.

        A step that still needs its backward pass or the dense optimizer is finished first; the run then ends at the
        loader's next batch."""
        if self.run.ended:
            return
        self.run.ask_to_stop(reason)
        step = self.step
        if step is not None and not self.current.is_used:
            self._next = step  # the resumed run begins with it
            self.current.drop()
        if step is None or self.step is None or self.current.is_done:
            self.peek()

    def _stop_here(self) -> None:
        """Sends the step where training will continue, before the PlanDone of its plan."""
        run = self.run
        if self._next_step is None:
            self._next = self._await_step()  # its number is needed: it is the first untrained step
        if run.ended or self._next_step is None:
            return
        reason = f"{run.stop_reason} in the training script"
        run.engine.conversation.send(StopRequest(reason=reason, next_step=self._next_step))
        while (step := self._next or self._await_step()) is not None:
            self._next = None
            run.engine.loop.pass_over(step)

    def leave(self) -> None:
        """Ends the run at any point of the script. Idempotent; does nothing in a process forked from this one."""
        if self.run.is_left:
            return
        if self._next is not None and self._epoch is not None and self._next.header.epoch != self._epoch:
            get_logger().warning(LEFT_BETWEEN_EPOCHS, epochs=self._job.data.epochs, done=self._epoch + 1)
        self.run.leave()

    # checkpoints

    def checkpoint_here(self) -> str | None:
        """Waits for the checkpoint of the tables as they are now and returns its name; None if none is planned here.

        Finishes the current step first if it was trained."""
        if self.step is not None and self.current.awaits_optimizer and self._parts.dense is not None:
            raise RuntimeError("a checkpoint with dense=... comes after optimizer.step(): call state_dict() after it")
        if self.step is None or self.current.is_trained:
            self.peek()
        # right behind a barrier, the checkpoint may not be on disk yet
        in_step = self.step is not None
        is_expected = not self.run.ended and (
            self._follows_barrier if in_step else self.run.engine.barrier.stop_reason is not None
        )
        while (found := run_folder.checkpoint_of(self._job.run_dir, self.run.run_id, self.train_steps)) is None:
            if not is_expected:
                return None
            self.run.crew.check()
            time.sleep(CHECKPOINT_POLL_S)
        return found


@contextmanager
def refusing_scaled_losses(awaits_backward: Callable[[], bool]) -> Iterator[None]:
    """Makes `torch.amp.GradScaler.scale` refuse a loss whose backward pass is awaited: it updates rows before the
    scaler divides its factor out."""
    _awaiting.append(awaits_backward)
    GradScaler.scale = _checked_scale  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _awaiting.remove(awaits_backward)
        if not _awaiting:
            GradScaler.scale = _torch_scale  # type: ignore[method-assign]


def _checked_scale(scaler: GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled() and any(awaits_backward() for awaits_backward in _awaiting):
        raise RuntimeError(SCALED)
    return _torch_scale(scaler, outputs)
