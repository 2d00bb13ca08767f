"""Tracks the script's current step: the look-ups left, and whether the script trained it correctly.

    begin   next_slice   (look up, backward) ...   next_slice   (look up, backward)   end

A step is trained in slices, the micro-batches, and its rows are updated once:

samples of the batch     | 0 ... 99 | 100 ... 199 | 200 ... 249 |      accumulate=3: cut as torch.chunk cuts
look-up                  the whole step, once; each slice takes its bags
backward                 each slice keeps the gradients of its bags; the last one updates the rows, as one large batch

The script may change its stream from batch to batch. `*` is an event recorded on torch's current stream:

loader's stream          wait for the rows ... copy of the batch *          wait for all * -> the step's event
script's stream                                      wait for that *, look up *  update *

This code neither drives the engine nor waits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rowcast.protocol.messages import StepHeader
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.adopt.connect.batch import Slice, slices_of
from rowcast.trainer.device.streams import Event, Lap, Stream
from rowcast.trainer.models.embedding import Embeddings, GroupLookup
from rowcast.trainer.models.runner import step_lookups
from rowcast.trainer.models.sequences import Embedded
from rowcast.trainer.step.cache import Step

ROWS_KEEP_THEIRS = (
    "the script has changed its optimizer's learning rate, which the rows do not follow: give the "
    "EmbeddingBagCollection a schedule in train steps, as "
    "optimizer={..., 'schedule': {'kind': 'cosine', 'decay_steps': N}}"
)
ACCUMULATED = (
    "two train batches were looked up without a step of the dense optimizer between them: rows are updated in every "
    "backward pass, so accumulated gradients would train them more often than the dense weights; use larger batches, "
    "which connect(..., accumulate=k) yields as k micro-batches each, or connect(..., dense_optimizer=False) if no "
    "torch.optim optimizer is used. If a guard such as one on clip_grad_norm_ left out the step, the rows are trained "
    "already: test the loss before backward() and call loader.skip(), or end the run"
)
NO_TRAIN_BATCH = "loader.skip() leaves out the train batch that the loader has yielded last; there is none"
TOO_LATE = (
    "the backward pass of train step {} has trained its rows, so loader.skip() cannot leave it out: a guard on a "
    "gradient norm (clip_grad_norm_) comes too late; test the loss before backward(), or end the run, which continues "
    "from its last checkpoint"
)
SKIPPED = "train step {} was left out by loader.skip(); do not look it up again, and go on with the loader's next batch"
CHECKPOINTED = (
    "torch.utils.checkpoint looks up train step {} again in its backward pass, and its rows would be trained twice; "
    "look up outside the checkpoint, or give it use_reentrant=True"
)
STEPPED_WITHIN = (
    "an optimizer has stepped between two micro-batches of train step {}: with accumulate={} the gradients of all of "
    "them make one step; call optimizer.step() and zero_grad() if batch.is_last"
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


class SharedLookup:
    """One look-up for all collections, in any order: the first that is called looks up, the others take theirs."""

    def __init__(self, collections: Sequence[str]) -> None:
        self._names = list(collections)
        self.waiting: list[str] = []  # the collections that have not taken their features
        self._found: Sequence[Embedded] = ()
        self._mode = False  # whether torch was in inference mode

    def open(self, collection: str, mode: bool, found: Sequence[Embedded]) -> None:
        self.waiting = [name for name in self._names if name != collection]
        self._found, self._mode = found if self.waiting else (), mode

    def take(self, collection: str, mode: bool) -> Sequence[Embedded] | None:
        """None: the collection has to look up."""
        if collection not in self.waiting or mode != self._mode:
            return None
        found = self._found
        self.waiting.remove(collection)
        if not self.waiting:
            self.close()
        return found

    def close(self) -> None:
        self.waiting, self._found = [], ()


class SlicedStep:
    """Looks up one step and collects its slices' gradients. Every table pools, so a feature has one bag per sample."""

    def __init__(
        self, embeddings: Embeddings, stream_order: StreamOrder, lookups: Sequence[GroupLookup], train_step: int
    ) -> None:
        self._embeddings, self._stream_order = embeddings, stream_order
        self._lookups, self._train_step = lookups, train_step
        self._pooled: list[Tensor] | None = None  # f32 [G, D] of each group, until the rows change
        self._grads: list[Tensor] | None = None  # f32 [G, D] of each group, once a slice is trained
        self._waiting: Slice | None = None  # the slice whose backward pass is expected
        self._is_kept = False  # the gradients of a slice

    @property
    def awaits_backward(self) -> bool:
        return self._waiting is not None

    def look_up(self, part: Slice) -> list[Embedded]:
        """Returns f32 [size, D] of every feature, like `Embeddings`.

        With gradients enabled, the backward pass keeps the slice's gradients, and that of the last slice updates the
        rows. Raises RuntimeError if a different slice's backward pass is expected."""
        self._stream_order.gather()  # the script may compute each slice on a different stream
        if self._pooled is None:
            with torch.no_grad():
                self._pooled = self._embeddings.pool(self._lookups)
        pairs = zip(self._pooled, self._lookups, strict=True)
        pooled = [bags_of(part, rows, lookup).reshape(-1, rows.shape[1]) for rows, lookup in pairs]
        pending = None
        if torch.is_grad_enabled():
            self._expect(part)
            pending = SliceUpdate(self, part)
        lookups = [replace(lookup, batch_size=part.size) for lookup in self._lookups]
        return self._embeddings.by_feature(pooled, lookups, pending)

    def keep(self, part: Slice, grads: Sequence[Tensor]) -> None:
        """Called in the slice's backward pass, with gradients f32 [its bags, D] of each group."""
        if self._grads is None or self._waiting != part:
            raise RuntimeError(
                f"micro-batch {part.index} of train step {self._train_step} expects no backward pass; call backward() "
                "once for each forward"
            )
        for whole, grad, lookup in zip(self._grads, grads, self._lookups, strict=True):
            bags_of(part, whole, lookup)[:] = grad.view(-1, part.size, grad.shape[1])
        self._waiting, self._is_kept = None, True
        self._stream_order.record()
        if part.is_last:
            self.finish()

    def finish(self) -> None:
        """Updates the rows, once, if any slice was trained; a slice that was not trained has no gradient."""
        grads, self._grads = self._grads, None
        if grads is not None:
            self._stream_order.gather()
            self._embeddings.update(grads, self._lookups, self._train_step)
            self._pooled = None

    def skip(self) -> bool:
        """Expects no backward pass of the waiting slice. Returns whether others have had theirs."""
        self._waiting = None
        if not self._is_kept:
            self._grads = None
        return self._is_kept

    def close(self) -> None:
        """Ends the step. A loss that the script keeps holds this object, but not the step's memory."""
        self._lookups, self._pooled, self._grads = (), None, None

    def _expect(self, part: Slice) -> None:
        if self._waiting is not None:
            raise RuntimeError(
                f"embeddings of micro-batch {part.index} of train step {self._train_step} were asked for before the "
                "backward pass of an earlier forward; call backward() once for each forward, or look up under "
                "torch.no_grad()"
            )
        if self._grads is None:
            self._embeddings.expect_update(self._lookups, self._train_step)
            assert self._pooled is not None, "looked up above"
            self._grads = [torch.zeros_like(rows) for rows in self._pooled]
        self._waiting = part


@dataclass(frozen=True, slots=True)
class SliceUpdate:
    """Implements `embedding.Pending` for one slice."""

    step: SlicedStep
    part: Slice

    def apply(self, grads: Sequence[Tensor]) -> None:
        self.step.keep(self.part, grads)


def bags_of(part: Slice, rows: Tensor, lookup: GroupLookup) -> Tensor:
    """A view [F, size, D] of the slice's bags in [F * B, D]."""
    return rows.view(-1, lookup.batch_size, rows.shape[1])[:, part.start : part.stop]


class CurrentStep:
    def __init__(
        self,
        embeddings: Embeddings,
        stream_order: StreamOrder,
        optimizer_steps: OptimizerSteps,
        collections: Sequence[str],
        *,
        dense_optimizer: bool,
        accumulate: int,
    ) -> None:
        """`collections`: a name of each. `dense_optimizer`: it must step once for each train batch."""
        self.step: Step | None = None  # begun and not finished
        self.slice = Slice(0, 0, 0, is_last=True)  # the last one given to the script
        self.is_trained = False  # a look-up of the step trains its rows
        self.is_skipped = False  # the script has left out the slice
        self.stream_order = stream_order
        self._embeddings, self._optimizer_steps = embeddings, optimizer_steps
        self._dense_optimizer, self._accumulate = dense_optimizer, accumulate
        self._slices: deque[Slice] = deque()  # the next slices
        self._sliced: SlicedStep | None = None  # None: the step has one slice
        self._shared = SharedLookup(collections)
        self._is_slice_trained = False
        self._is_looked_up = False
        # the count of `optimizer_steps` at three moments:
        self._count_at_begin = 0  # when this step began
        self._count_at_training: int | None = None  # at the newest look-up that trains rows, of any step
        self._count_at_eval: int | None = None  # at this step's first look-up in eval mode with gradients enabled

    @property
    def awaits_backward(self) -> bool:
        """Whether the newest look-up that trains rows has had no backward pass."""
        return self._embeddings.awaits_backward if self._sliced is None else self._sliced.awaits_backward

    @property
    def awaits_optimizer(self) -> bool:
        return self.is_trained and self._dense_optimizer and self._count_at_training == self._optimizer_steps.count

    @property
    def is_done(self) -> bool:
        """Whether all its micro-batches, backward passes and optimizer steps are done."""
        return not (self._slices or self.awaits_backward or self.awaits_optimizer)

    @property
    def is_used(self) -> bool:
        return self._is_looked_up or self._optimizer_steps.count > self._count_at_begin

    @property
    def has_slices(self) -> bool:
        return self.step is not None and bool(self._slices)

    def begin(self, step: Step) -> None:
        self._slices = deque(slices_of(step.header.batch_size, self._accumulate))
        is_whole = len(self._slices) == 1
        lookups, train_step = step_lookups(step), step.header.train_step
        self._sliced = None if is_whole else SlicedStep(self._embeddings, self.stream_order, lookups, train_step)
        self.is_trained = self._is_slice_trained = self._is_looked_up = self.is_skipped = False
        self._count_at_begin, self._count_at_eval = self._optimizer_steps.count, None
        self.step = step

    def next_slice(self) -> Slice | None:
        """Gives the script the next micro-batch; None after the last one.

        Raises RuntimeError if the previous one awaits its backward pass."""
        if self.step is None or not self._slices:
            return None
        self._require_backward(self.step)
        self._is_slice_trained = self.is_skipped = False
        self.slice = self._slices.popleft()
        return self.slice

    def look_up(self, collection: str, *, trains: bool) -> Sequence[Embedded]:
        """Looks up the current slice, by feature of the job; if it trains, its backward pass trains the rows.

        The first collection looks up for all. Raises RuntimeError if it must not train."""
        assert self.step is not None, "the module looks up the current step"
        header, mode = self.step.header, torch.is_inference_mode_enabled()
        if self.is_skipped:
            raise RuntimeError(SKIPPED.format(header.train_step))
        if torch.is_grad_enabled() and not trains and header.kind == "train" and self._count_at_eval is None:
            self._count_at_eval = self._optimizer_steps.count  # right for predictions, wrong for training
        self._is_looked_up = True
        if trains and not self.awaits_backward:
            self._shared.close()  # what another collection has looked up was trained already
        is_shared = trains or header.kind == "eval"  # others of a train batch may come before or after its training
        found = self._shared.take(collection, mode) if is_shared else None
        if found is not None:
            return found
        if trains:
            self._mark_trained(header)
        with torch.set_grad_enabled(trains):
            if self._sliced is not None:
                found = self._sliced.look_up(self.slice)
            else:
                found = self._embeddings(step_lookups(self.step), header.train_step)
        if is_shared:
            self._shared.open(collection, mode, found)
        return found

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
        if self._is_slice_trained and not self.awaits_backward:
            raise RuntimeError(
                f"the rows of train step {header.train_step} were updated already; train on each batch once"
            )
        if self._dense_optimizer and not self.is_trained and self._count_at_training == count:
            raise RuntimeError(ACCUMULATED)
        if self._dense_optimizer and self.is_trained and self._count_at_training != count:
            raise RuntimeError(STEPPED_WITHIN.format(header.train_step, self._accumulate))
        self.is_trained, self._is_slice_trained, self._count_at_training = True, True, count

    def skip(self) -> None:
        """Leaves out the current slice: nothing of it is trained. Raises RuntimeError if its rows are."""
        step = self.step
        if step is None or step.header.kind == "eval":
            raise RuntimeError(NO_TRAIN_BATCH)
        if self._is_slice_trained and not self.awaits_backward:
            raise RuntimeError(TOO_LATE.format(step.header.train_step))
        if self._sliced is None or not self._sliced.skip():
            self._embeddings.give_up()
            if self.is_trained:
                self.is_trained, self._count_at_training = False, None
        self._shared.close()
        self._is_slice_trained, self._is_looked_up, self.is_skipped = False, True, True

    def end(self) -> None:
        """Ends the step: orders all its work before later work on the current stream.

        Raises RuntimeError if the script did not train the step as it seems to intend."""
        step = self.step
        assert step is not None, "end comes after begin"
        self._require_backward(step)
        is_stepped = self._count_at_eval is not None and self._count_at_eval < self._optimizer_steps.count
        if is_stepped and not self.is_trained and self._dense_optimizer:
            raise RuntimeError(FORGOTTEN.format(step.header.train_step))
        if self._sliced is not None:
            self._sliced.finish()
        self.drop()

    def drop(self) -> None:
        self._let_go()
        self.stream_order.gather()

    def close(self) -> None:
        """Ends the session: neither this object nor a graph kept by the script holds rows after it."""
        self._let_go()
        self._embeddings.close()

    def _let_go(self) -> None:
        if self._sliced is not None:
            self._sliced.close()
        self._shared.close()
        self.step, self._sliced = None, None

    def _require_backward(self, step: Step) -> None:
        if self.awaits_backward:
            raise RuntimeError(
                f"the embeddings of train step {step.header.train_step} have had no backward pass; call backward() "
                "once for each forward, look up under torch.no_grad(), or leave the batch out by loader.skip()"
            )
        if self._is_slice_trained and self._shared.waiting:
            raise RuntimeError(
                f"train step {step.header.train_step} has not looked up the collection of table "
                f"{self._shared.waiting[0]}, whose rows were trained with those of the others: call all collections of "
                "connect before backward()"
            )
        self._shared.close()
