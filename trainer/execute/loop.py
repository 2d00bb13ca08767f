"""The trainer's main loop: fill, compute, report, in the order of the plans. It decides nothing and never waits for the device.

`advance` is the loop's body. Every result is read when its event has happened: on a device that is about a step later.

Where somebody else's code computes the steps (`trainer/adopt/`), `attend` is the body, without the steps:

    attend ... attend    take -> begin -> (look-up to update, on the compute stream) -> finish    attend ...
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rowcast.protocol.messages import EndOfData, Flush, Released, Restore, StepDone
from rowcast.protocol.packing import dense_stamp
from rowcast.protocol.transport.ring import RingReader, release
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import NonFiniteLoss
from rowcast.trainer.execute.cache import ArrivedStep, DeviceCache
from rowcast.trainer.execute.metrics import StallReason, TrainerCounters
from rowcast.trainer.execute.phases import PhaseClock
from rowcast.trainer.execute.sender import Sender
from rowcast.trainer.execute.streams import Event, Streams
from rowcast.trainer.models.dense_state import Gathering, Tensors, pack, readable, unpack
from rowcast.trainer.models.evaluate import EvalCounts, EvalResult
from rowcast.trainer.report.report_json import Evaluation


class Steps(Protocol):
    """Computes steps; each call issues work on the compute stream and reads nothing."""

    def train(self, step: ArrivedStep, loss: Tensor) -> None:
        """Look-up to update; the mean loss goes to `loss`, a scalar on the host."""

    def evaluate(self, step: ArrivedStep) -> None:
        """Look-up and forward; predictions are added to the metrics of the evaluation."""

    def close_evaluation(self) -> EvalCounts:
        """Issues the copy of the evaluation's counts to the host, and starts new ones."""


class ModelState(Protocol):
    """What a checkpoint keeps of the model."""

    def state(self) -> Tensors:
        """The model's part of the dense side of a checkpoint; every step issued is complete."""

    def restore(self, tensors: Tensors) -> bool:
        """Goes on from a `state`, before the first step. Whether the loop has an evaluation in progress to close."""


class Results(Protocol):
    """Where results go, in order."""

    def loss(self, train_step: int, loss: np.float32) -> None: ...

    def evaluation(self, result: Evaluation) -> None: ...

    def state(self) -> Tensors:
        """All losses and the last evaluation, for a checkpoint."""

    def restore(self, tensors: Tensors) -> None: ...


@dataclass(slots=True, kw_only=True)
class Issued:
    """A step on its way through the device, or the close of an evaluation."""

    event: Event
    step: ArrivedStep | None
    evaluation: list[EvalCounts] | None  # filled when the close runs
    train_steps: int  # before it, or before the close of the evaluation
    loss: Tensor | None
    began_s: float
    waited_s: float
    counts: bool = True  # otherwise the step was passed over, and nothing was computed


class TrainingLoop:
    """`accept_flush`, `accept_restore` and `accept_end` are called by the mail's thread, `advance` by the main thread."""

    def __init__(
        self,
        depth: int,
        cache: DeviceCache,
        sender: Sender,
        streams: Streams,
        model: ModelState,
        steps: Steps | None,
        counters: TrainerCounters,
        clock: PhaseClock,
        results: Results,
        ring: RingReader,
        restore_bytes: int,
        first_train_step: int,
        send: Callable[[Released], None],
    ) -> None:
        """`ring` is the one that the dense side comes in, where the run goes on from a checkpoint: `restore_bytes` are above 0 then, and
        `first_train_step` counts the train steps before it. Without `steps` the loop is only attended."""
        self.first_step_s: float | None = None  # by the performance counter
        self.step_begun: int | None = None
        self.step_done: int | None = None
        self.end: EndOfData | None = None
        self.checkpoints = 0  # that were begun
        # what the barrier is for that follows the newest step; None before it comes
        self.stop_reason: str | None = None
        self._cache = cache
        self._sender = sender
        self._streams = streams
        self._model = model
        self._own_steps = steps
        self._counters = counters
        self._clock = clock
        self._results = results
        self._ring = ring
        self._restoring = Gathering() if restore_bytes else None
        self._restores: deque[Restore] = deque()
        self._send = send
        pinned = streams.device.type == "cuda"
        self._losses = [torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=pinned) for _ in range(depth + 2)]
        self._issued: deque[Issued] = deque()
        self._flushes: deque[Flush] = deque()
        self._saving: Flush | None = None
        self._evaluating = False
        self._train_steps = first_train_step
        self._began_s = 0.0  # the step that was begun last, by the performance counter
        self._waited_s = 0.0  # for the rows of the next step

    @property
    def finished(self) -> bool:
        """No step follows, and every result was delivered."""
        return self.end is not None and not self._issued and not self._must_close(self.end)

    @property
    def has_checkpoint(self) -> bool:
        """Whether one is known to be on the disk: the next barrier and the end both wait for it."""
        return self.checkpoints > (1 if self.end is None else 0)

    @property
    def waiting_for(self) -> str:
        if self._issued:
            return "the device"
        if self._restoring is not None:
            return "the checkpoint's dense side"
        return "the barrier" if self._saving is not None or self._flushes else "rows"

    def accept_flush(self, message: Flush) -> None:
        self._flushes.append(message)

    def accept_restore(self, message: Restore) -> None:
        self._restores.append(message)

    def accept_end(self, message: EndOfData) -> None:
        self.end = message

    def advance(self) -> bool:
        return self._serve() or self._issue_next() or self._at_barrier()

    def attend(self) -> bool:
        """All of `advance` but the steps themselves."""
        return self._serve() or self._at_barrier()

    def _serve(self) -> bool:
        """What comes before the next step: where anything was done others have work now, and on a CPU the step would keep this thread
        from waking them."""
        if self._restoring is not None:
            return self._restore_next(self._restoring)
        collected = self._collect()
        moved = self._cache.advance()
        return collected or moved

    def idled(self, seconds: float) -> None:
        """The main thread had nothing to do for so long. Before the first step that is start-up, and no stall."""
        if self.step_begun is None:
            return
        reason: StallReason = "results" if self._issued else "rows" if self.stop_reason is None else "barrier"
        self._counters.stalled(reason, seconds)
        if reason == "rows":
            self._waited_s += seconds

    def _restore_next(self, gathering: Gathering) -> bool:
        if not self._restores:
            return False
        message = self._restores.popleft()
        content = gathering.add(message, self._ring.view(message.payload, dense_stamp(message.piece)).data)
        release(self._ring, message.payload, self._send)
        if content is not None:
            tensors = unpack(content)
            with readable():
                self._evaluating = self._model.restore(tensors)
            crash_point("model restored")
            with readable():
                self._results.restore(tensors)
            self._streams.settle()
            self._restoring = None
        return True

    # issuing

    @property
    def _steps(self) -> Steps:
        assert self._own_steps is not None, "a loop without steps of its own is attended, not advanced"
        return self._own_steps

    def _issue_next(self) -> bool:
        step = self.take()
        if step is None:
            return False
        crash_point("step not begun")
        if self._evaluating and step.header.kind == "train":
            self._close_evaluation()
        self.begin(step)
        self.finish(step, self._run(step))
        return True

    def take(self) -> ArrivedStep | None:
        """The next step, once its rows are on their way to their slots. Whoever takes it begins and finishes it before taking another."""
        return None if self._restoring is not None else self._cache.take_filled()

    def begin(self, step: ArrivedStep) -> None:
        """From now on the compute stream may look up and update the step's rows."""
        self._began_s = time.perf_counter()
        self._streams.compute.wait(step.filled[-1], "filled")
        self.first_step_s = self.first_step_s or self._began_s
        self.step_begun = step.step
        self.stop_reason = None

    def finish(self, step: ArrivedStep, loss: Tensor | None) -> None:
        """Look-up to update were issued to the compute stream; `loss` is where the mean loss will be, None where nobody tells."""
        event = self._streams.compute.record()
        waited_s, self._waited_s = self._waited_s, 0.0
        self._cache.issued(step.step, event)
        self._issued.append(
            Issued(
                event=event,
                step=step,
                evaluation=None,
                train_steps=step.header.train_step,
                loss=loss,
                began_s=self._began_s,
                waited_s=waited_s,
            )
        )

    def pass_over(self, step: ArrivedStep) -> None:
        """A step that the script has begun, or not even that, where the run stops before it: its rows are as they were."""
        self.begin(step)
        self.finish(step, None)
        self._issued[-1].counts = False

    def _run(self, step: ArrivedStep) -> Tensor | None:
        """Look-up to update as one closure; where the loss will be."""
        if step.header.kind == "eval":
            self._evaluating = True
            self._streams.compute.run(lambda: self._evaluate(step))
            return None
        loss = self._losses[step.step % len(self._losses)]
        self._train_steps = step.header.train_step + 1
        self._streams.compute.run(lambda: self._steps.train(step, loss))
        return loss

    def _evaluate(self, step: ArrivedStep) -> None:
        with self._counters.shown("evaluate", step.step):
            self._steps.evaluate(step)

    def _close_evaluation(self) -> None:
        closed: list[EvalCounts] = []
        self._streams.compute.run(lambda: closed.append(self._steps.close_evaluation()))
        self._evaluating = False
        self._issued.append(
            Issued(
                event=self._streams.compute.record(),
                step=None,
                evaluation=closed,
                train_steps=self._train_steps,
                loss=None,
                began_s=time.perf_counter(),
                waited_s=0.0,
            )
        )

    # results

    def _collect(self) -> bool:
        if not self._issued or not self._streams.done(self._issued[0].event, "results"):
            return False
        issued = self._issued.popleft()
        if issued.evaluation is not None:
            self._finish_evaluation(issued.train_steps, issued.evaluation[0].result())
        if issued.step is not None:
            self._finish_step(issued, issued.step)
        return True

    def _finish_evaluation(self, train_steps: int, result: EvalResult) -> None:
        if result.logloss is not None:
            self._results.evaluation(
                Evaluation(train_step=train_steps, auc=result.auc, logloss=result.logloss, accuracy=result.accuracy)
            )

    def _finish_step(self, issued: Issued, step: ArrivedStep) -> None:
        loss = None
        if issued.loss is not None:
            loss = np.float32(issued.loss.item())
            if not math.isfinite(loss):
                raise NonFiniteLoss(
                    f"the loss of train step {issued.train_steps} is {loss}: training diverged; lower optimizer.sparse.lr or dense.lr"
                )
            self._results.loss(issued.train_steps, loss)
        crash_point("step computed")
        self._cache.completed(step.step)
        self._clock.complete(step.step)
        self.step_done = step.step
        if issued.counts:
            self._counters.step_done(step.header, None if loss is None else float(loss))
        step_s = time.perf_counter() - issued.began_s
        self._counters.show("step", step.header.kind, step_s, step.step)
        self._sender.finish(
            StepDone(step=step.step, rank=0, waited_s=issued.waited_s, step_s=step_s), step.asked.checksums
        )

    # barriers

    def _at_barrier(self) -> bool:
        """Every step before a barrier is complete when its `Flush` arrives."""
        if self._saving is not None and not self._issued and not self._cache.flushing:
            crash_point("dense side not packed")
            with self._counters.shown("pack"):
                self._sender.send_dense(self._saving.barrier, pack({**self._model.state(), **self._results.state()}))
            self._saving = None
            return True
        if self.end is not None and self._must_close(self.end):
            self._close_evaluation()
            return True
        if not self._flushes:
            return False
        message = self._flushes.popleft()
        self.stop_reason = message.reason
        self._cache.flush(message)
        if message.piece == message.num_pieces - 1 and message.checkpoint:
            self._saving = message
            self.checkpoints += 1
        return True

    def _must_close(self, end: EndOfData) -> bool:
        """The data has ended in an evaluation, which is whole then; one that a stop cuts short goes on after it."""
        return end.finished and self._evaluating
