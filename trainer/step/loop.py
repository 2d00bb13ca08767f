"""Executes steps in the order of their plans, in the trainer's main loop, without waiting for the device.

The life of plan p and of its steps s; `TrainingLoop.advance` is the code:

    thread  function                what it moves                                 to
    mail    cache.accept            PlanReady(p), arrays checked               -> the main thread
    main    cache.copy_in_next      rows of plan p, from the ring              -> fill staging
            cache.release_copied    Released                                   -> the prefetcher
            cache.fill_next         victims of plan p, from their slots        -> evict staging, the sender
                                    rows of plan p, from fill staging          -> those slots
    sender  advance                 victims of plan p, from evict staging      -> the back ring
                                    RowsBack(p)                                -> the prefetcher
    main    take, begin             step s may use its rows                    -> the compute stream
            _compute                look-up, forward, backward, update         -> slots, losses
            finish                  the event of step s                        -> the main thread
            _report_complete        its loss, once the event has happened      -> results, the sender
    sender  advance                 PlanDone(p), after its last step           -> the prefetcher

With a training script (`trainer/adopt/`), the script does the work between `begin` and `finish`:

    advance ...    take -> begin -> (look-up to update, on the compute stream) -> finish    advance ...
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rowcast.protocol.conversation import ProcessProgress
from rowcast.protocol.messages import PlanDone, StopRequest
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import Diverged
from rowcast.runtime.stages import IDLE_WAIT_S, Period
from rowcast.trainer.device.streams import Event, PhaseClock, Shown, Streams, ignore
from rowcast.trainer.models.evaluate import EvalCounts
from rowcast.trainer.step.barrier import TrainerBarrier, TrainerState, TrainingState
from rowcast.trainer.step.cache import ArrivedPlan, DeviceCache, Step
from rowcast.trainer.step.metrics import StallReason


class Steps(Protocol):
    """Computes steps. Every call issues work, the last of it on the compute stream, and reads no result."""

    def issue_train(self, streams: Streams, step: Step, loss: Tensor) -> None:
        """Issues look-up to update; writes the mean loss to `loss`, f32 [] on the host, before `completed` returns."""

    def issue_evaluate(self, streams: Streams, step: Step, shown: Shown) -> None:
        """Issues look-up and forward, under `shown`; adds the predictions to the metrics of the evaluation."""

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        """Issues the copy of the evaluation's counts to the host, into `closed`, and resets them."""

    def completed(self, step: int) -> None:
        """Called when all work of the step is complete, before its PlanDone."""


@dataclass(slots=True, kw_only=True)
class Closing:
    """The close of an evaluation, issued to the device."""

    computed: Event = field(init=False)
    counts: list[EvalCounts]  # filled when the close runs
    train_steps: int  # before it


class TrainingLoop:
    """Runs on the main thread."""

    def __init__(
        self,
        cache: DeviceCache,
        barrier: TrainerBarrier,
        training: TrainingState,
        steps: Steps | None,
        clock: PhaseClock,
        send: Callable[[StopRequest], None],
    ) -> None:
        """`steps`: None if a training script computes them. `clock` times the steps' stream."""
        # called when all work of a step is complete, before its PlanDone
        self.completed: Callable[[int], None] = ignore if steps is None else steps.completed
        self.first_step_s: float | None = None  # time.perf_counter() at the start of the first step
        self.step_begun: int | None = None
        self.step_done: int | None = None
        self.period = Period()  # of steps
        self._cache = cache
        self._barrier = barrier
        self._sender, self._counters = cache.sender, cache.counters
        self._streams = streams = cache.slots.streams
        self._training = training
        self._computed_by = steps
        self._clock = clock
        self._send = send
        self.ended_by = ""  # why training has ended before its data
        pinned = streams.device.type == "cuda"
        self._new_loss = partial(torch.zeros, (), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._losses: list[Tensor] = []  # belongs to no step
        self._taken: deque[Step] = deque()  # of a plan whose rows are on their way to their slots
        self._issued: deque[Step | Closing] = deque()

    @property
    def finished(self) -> bool:
        return self._barrier.state is TrainerState.ENDED and not self._issued

    @property
    def look_s(self) -> float:
        """How long the idle main thread may wait: less if the next turn may depend on an event of the device."""
        open_work = bool(self._issued) or self._cache.is_copying or self._barrier.awaits_state
        return self.period.look_s if self._streams.copy_in.is_device and open_work else IDLE_WAIT_S

    @property
    def waiting_for(self) -> str:
        barrier = self._barrier
        if self._issued:
            return "the device"
        if barrier.state is TrainerState.RESTORING:
            return "the checkpoint's model state"
        is_open = barrier.flushes or barrier.state not in (TrainerState.RUNNING, TrainerState.ENDED)
        return "the barrier" if is_open else "rows"

    def progress(self) -> ProcessProgress:
        """For the prefetcher, from the thread that sends heartbeats."""
        return ProcessProgress(
            step_begun=self.step_begun,
            step_done=self.step_done,
            work=self._counters.total("rows_written_back"),
            waiting_for=self.waiting_for,
            ended=self._barrier.end is not None,
        )

    def advance(self) -> bool:
        """Does what can be done now without waiting for the device; returns whether it did anything.

        Read from top to bottom, it is the life of a step. One turn works on several steps: while step p computes, rows
        of step p + 1 enter their slots, and rows of step p + 2 leave the ring.
        """
        if self._barrier.state is TrainerState.RESTORING:  # before the first step
            return self._barrier.advance()
        copied_in = self._cache.copy_in_next()
        released = self._cache.release_copied()
        filled = self._cache.fill_next()  # its victims leave first: from here on the sender sends them home
        moved = copied_in or released or filled
        # if rows moved, other threads now have work; on a CPU the step would delay waking them
        if not moved and not self._is_closing:
            moved = self._close_evaluation() or self._compute_next() or self._barrier.advance()
        reported = self._report_complete()
        return moved or reported

    def idled(self, seconds: float) -> None:
        """Counts `seconds` without work for the main thread. Idle time before the first step is start-up, not a
        stall."""
        if self.step_begun is None:
            return
        at_barrier = self._barrier.stop_reason is not None
        reason: StallReason = "results" if self._issued else "barrier" if at_barrier else "rows"
        self._counters.stalled(reason, seconds)

    # issuing

    @property
    def _steps(self) -> Steps:
        assert self._computed_by is not None, "a training script computes the steps"
        return self._computed_by

    def take(self) -> Step | None:
        """Returns the next step once its rows are on their way; begin and finish it before calling this again."""
        if not self._taken and (plan := self._cache.take_filled()) is not None:
            self._taken.extend(plan.steps)
        return self._taken.popleft() if self._taken else None

    def begin(self, step: Step) -> None:
        """Allows the compute stream to look up and update the step's rows."""
        step.began_s = time.perf_counter()
        self._streams.compute.wait(step.plan.filled[-1], "filled")
        self.first_step_s = self.first_step_s or step.began_s
        self.step_begun = step.step
        self._barrier.stop_reason = None

    def finish(self, step: Step, loss: Tensor | None) -> None:
        """Called after look-up to update were issued to the compute stream. `loss` will hold the mean loss;
        None if it is unknown."""
        if step.header.kind == "train":
            self._training.train_steps = step.header.train_step + 1
        step.loss, step.computed = loss, self._streams.compute.record()
        if step.ends_plan:
            self._cache.issued(step.plan)
        self._issued.append(step)

    def pass_over(self, step: Step) -> None:
        """Completes a step without computing it, because the run stops before it. Its rows do not change."""
        trained = self._training.train_steps
        self.begin(step)
        self.finish(step, None)
        self._training.train_steps, step.counts = trained, False

    def _compute_next(self) -> bool:
        step = None if self._computed_by is None else self.take()
        if step is None:
            return False
        crash_point("step not begun")
        if self._training.ended_by:
            # steps after the end of training are passed over; the prefetcher hears of it before their first PlanDone
            if not self.ended_by:
                self.ended_by = self._training.ended_by
                self._send(StopRequest(reason=self.ended_by, next_step=step.step, finished=True))
            self.pass_over(step)
            return True
        self.begin(step)  # the compute stream waits until the rows are in their slots
        loss = self._compute(step)
        self.finish(step, loss)
        return True

    def _compute(self, step: Step) -> Tensor | None:
        """Issues look-up to update; returns the tensor that the loss will be written to."""
        if step.header.kind == "eval":
            self._training.evaluating = True
            self._steps.issue_evaluate(self._streams, step, lambda: self._counters.shown("evaluate", step.step))
            return None
        loss = self._losses.pop() if self._losses else self._new_loss()
        self._steps.issue_train(self._streams, step, loss)
        return loss

    @property
    def _is_closing(self) -> bool:
        """Whether the next step must wait for the result of an evaluation, which may end training or make the next
        checkpoint the best one."""
        return bool(self._issued) and isinstance(self._issued[-1], Closing)

    def _close_evaluation(self) -> bool:
        """Closes the evaluation once it is over; returns whether it did. One that a stop interrupts continues in the
        next attempt."""
        following = None if self._taken else self._cache.next_filled
        is_over = self._barrier.evaluated or (following is not None and following.move.kind == "train")
        if not self._training.evaluating or not is_over:
            return False
        closing = Closing(counts=[], train_steps=self._training.train_steps)
        self._steps.issue_close(self._streams, closing.counts)
        closing.computed = self._streams.compute.record()
        self._training.evaluating = False
        self._issued.append(closing)
        return True

    # results

    def _report_complete(self) -> bool:
        """Reports every complete step: on a CPU each one before the next is issued."""
        reported = False
        while self._issued and self._streams.done(self._issued[0].computed, "results"):
            done, reported = self._issued.popleft(), True
            if isinstance(done, Closing):
                job = self._training.job
                result = done.counts[0].result(done.train_steps, job.data.columns.labels, job.eval.ranks)
                if result is not None:
                    self._training.evaluated(result)
            else:
                self._report_step(done)
        return reported

    def _report_step(self, step: Step) -> None:
        loss = None
        if step.counts:
            self.completed(step.step)
        if step.loss is not None:
            loss = np.float32(step.loss.item())
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss of train step {step.header.train_step} is {loss}: training diverged; lower "
                    "optimizer.sparse.lr or dense.lr"
                )
            self._training.results.loss(step.header.train_step, loss)
            self._losses.append(step.loss)
        crash_point("step computed")
        self._clock.complete(step.step)
        self.step_done = step.step
        if step.counts:
            self._counters.step_done(step.header, None if loss is None else float(loss))
        now_s = time.perf_counter()
        self.period.ended(now_s)
        self._counters.show("step", step.header.kind, now_s - step.began_s, step.step)
        if step.ends_plan:
            self._report_plan(step.plan)

    def _report_plan(self, plan: ArrivedPlan) -> None:
        self._cache.completed(plan)
        counted = [step.header for step in plan.steps if step.counts]
        if counted:
            self._counters.plan_done(plan.move, counted)
        self._sender.finish(PlanDone(plan=plan.plan, rank=self._counters.rank))
