"""Tracks the step that the script is at, and whether the script trained it correctly.

    begin   look up   backward   end

The script may change its stream from batch to batch. `*` is an event recorded on torch's current stream:

loader's stream          wait for the rows ... copy of the batch *          wait for all * -> the step's event
script's stream                                      wait for that *, look up *  update *

This code neither drives the engine nor waits.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rowcast.protocol.messages import StepHeader
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.device.streams import Event, Lap, Stream
from rowcast.trainer.models.embedding import Embedded, Embeddings
from rowcast.trainer.models.runner import step_lookups
from rowcast.trainer.step.cache import Step

ROWS_KEEP_THEIRS = (
    "the script has changed its optimizer's learning rate, which the rows do not follow: give the "
    "EmbeddingBagCollection a schedule in train steps, as "
    "optimizer={..., 'schedule': {'kind': 'cosine', 'decay_steps': N}}"
)
ACCUMULATED = (
    "two train batches were looked up without a step of the dense optimizer between them: rows are updated in every "
    "backward pass, so accumulated gradients would train them more often than the dense weights; use larger batches, "
    "or connect(..., dense_optimizer=False) if no torch.optim optimizer is used. If a guard such as one on "
    "clip_grad_norm_ left out the step, the rows are trained already: end the run, which continues from its last "
    "checkpoint, or use rowcast.adopt, under which a script leaves out what it wants (docs/adopt.md)"
)
CHECKPOINTED = (
    "torch.utils.checkpoint looks up train step {} again in its backward pass, and its rows would be trained twice; "
    "look up outside the checkpoint, or give it use_reentrant=True"
)
FORGOTTEN = (
    "train step {} was looked up in eval mode alone, and an optimizer has stepped: its rows were not trained; call "
    "model.train() before it, or look up under torch.no_grad() if the rows should stay as they are"
)


class OptimizerSteps:
    """Counts the steps of every torch.optim optimizer of this process, until it is closed."""

    def __init__(self, rows_lr: float, *, rows_follow: bool) -> None:
        """`rows_follow`: whether the rows have a schedule of their own, so that other learning rates are right."""
        self.count = 0
        self._rows_lr, self._warns = rows_lr, not rows_follow
        self._first = WeakKeyDictionary[Optimizer, list[Any]]()  # learning rates at each optimizer's first step
        self.close = register_optimizer_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        self.count += 1
        if self._warns:
            rates = [group.get("lr") for group in optimizer.param_groups]
            if self._first.setdefault(optimizer, rates) != rates:
                self._warns = False
                get_logger().warning(ROWS_KEEP_THEIRS, rows_lr=self._rows_lr)


class StreamOrder:
    """Orders the work issued for the current step; `compute` is torch's current stream at each call."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute
        self._issued: list[Event] = []
        self._drawn: Event  # of the batch

    def drawn(self) -> None:
        """Call on the loader's stream, which has waited for the rows, once the batch is there."""
        self.record()
        self._drawn = self._issued[-1]

    def await_batch(self) -> None:
        """Makes the current stream wait for what the loader's did for the batch, with exchanges between ranks."""
        self._compute.wait(self._drawn, "filled")

    def record(self) -> None:
        """Call after issuing work on the step's rows or arrays to the current stream."""
        self._issued.append(self._compute.record())

    def lap(self, lap: Lap) -> None:
        """Records the update of the rows, which runs in the backward pass, on the stream of its forward."""
        if lap == "update":
            self.record()

    def gather(self) -> None:
        """Makes the current stream wait for all recorded work."""
        issued, self._issued = self._issued, []
        for event in issued:
            self._compute.wait(event, "used")


class CurrentStep:
    def __init__(
        self,
        embeddings: Embeddings,
        stream_order: StreamOrder,
        optimizer_steps: OptimizerSteps,
        *,
        dense_optimizer: bool,
    ) -> None:
        """`dense_optimizer`: it must step once for each train batch."""
        self.step: Step | None = None  # begun and not finished
        self.is_trained = False  # a look-up of the step trains its rows
        self.stream_order = stream_order
        self._embeddings, self._optimizer_steps = embeddings, optimizer_steps
        self._dense_optimizer = dense_optimizer
        self._is_looked_up = False
        # the count of `optimizer_steps` at three moments:
        self._count_at_begin = 0  # when this step began
        self._count_at_training: int | None = None  # at the newest look-up that trains rows, of any step
        self._count_at_eval: int | None = None  # at this step's first look-up in eval mode with gradients enabled

    @property
    def awaits_backward(self) -> bool:
        """Whether the newest look-up that trains rows has had no backward pass."""
        return self._embeddings.awaits_backward

    @property
    def awaits_optimizer(self) -> bool:
        return self.is_trained and self._dense_optimizer and self._count_at_training == self._optimizer_steps.count

    @property
    def is_done(self) -> bool:
        """Whether its backward pass and optimizer step are done."""
        return not (self.awaits_backward or self.awaits_optimizer)

    @property
    def is_used(self) -> bool:
        return self._is_looked_up or self._optimizer_steps.count > self._count_at_begin

    def begin(self, step: Step) -> None:
        self.is_trained = self._is_looked_up = False
        self._count_at_begin, self._count_at_eval = self._optimizer_steps.count, None
        self.step = step

    def look_up(self, *, trains: bool) -> Sequence[Embedded]:
        """Looks up the current step, by feature of the job; if it trains, its backward pass trains the rows.

        Raises RuntimeError if it must not train."""
        assert self.step is not None, "the module looks up the current step"
        header = self.step.header
        if torch.is_grad_enabled() and not trains and header.kind == "train" and self._count_at_eval is None:
            self._count_at_eval = self._optimizer_steps.count  # right for predictions, wrong for training
        self._is_looked_up = True
        if trains:
            self._mark_trained(header)
        with torch.set_grad_enabled(trains):
            return self._embeddings(step_lookups(self.step), header.train_step)

    def _mark_trained(self, header: StepHeader) -> None:
        """Notes that the next look-up trains the rows. Raises RuntimeError if it must not."""
        count = self._optimizer_steps.count
        if header.kind == "eval":
            raise RuntimeError(
                "this is an evaluation batch, whose rows may not change: call model.eval(), or look up under "
                "torch.no_grad()"
            )
        if self.awaits_backward and torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(CHECKPOINTED.format(header.train_step))
        if self.is_trained and not self.awaits_backward:
            raise RuntimeError(
                f"the rows of train step {header.train_step} were updated already; train on each batch once"
            )
        if self._dense_optimizer and not self.is_trained and self._count_at_training == count:
            raise RuntimeError(ACCUMULATED)
        self.is_trained, self._count_at_training = True, count

    def end(self) -> None:
        """Ends the step: orders all its work before later work on the current stream.

        Raises RuntimeError if the script did not train the step as it seems to intend."""
        step = self.step
        assert step is not None, "end comes after begin"
        if self.awaits_backward:
            raise RuntimeError(
                f"the embeddings of train step {step.header.train_step} have had no backward pass; call backward() "
                "once for each forward, or look up under torch.no_grad()"
            )
        is_stepped = self._count_at_eval is not None and self._count_at_eval < self._optimizer_steps.count
        if is_stepped and not self.is_trained and self._dense_optimizer:
            raise RuntimeError(FORGOTTEN.format(step.header.train_step))
        self.drop()

    def drop(self) -> None:
        self.step = None
        self.stream_order.gather()

    def close(self) -> None:
        """Ends the session: neither this object nor a graph kept by the script holds rows after it."""
        self.step = None
        self._embeddings.close()
