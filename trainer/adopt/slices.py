"""Trains a step in slices, the micro-batches, and updates its rows once.

samples of the batch     | 0 ... 99 | 100 ... 199 | 200 ... 249 |      accumulate=3: cut as torch.chunk cuts
look-up                  the whole step, once; each slice takes its bags
backward                 each slice keeps the gradients of its bags; the last one updates the rows, as one large batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowcast.trainer.adopt.stream_order import StreamOrder
from rowcast.trainer.models.embedding import Embeddings, GroupLookup, update_in_backward
from rowcast.trainer.models.sequences import Embedded


@dataclass(frozen=True, slots=True)
class Slice:
    """Samples `start` to `stop` - 1 of a batch."""

    index: int
    start: int
    stop: int
    is_last: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


def slices_of(batch_size: int, number: int) -> list[Slice]:
    """Returns at most `number` slices, of equal size except the last; a small batch has fewer."""
    width = -(-batch_size // number)
    starts = range(0, batch_size, width)
    return [Slice(i, start, min(start + width, batch_size), i == len(starts) - 1) for i, start in enumerate(starts)]


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
        self._is_updated = False

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
        pooled = [self._bags_of(part, rows, lookup) for rows, lookup in zip(self._pooled, self._lookups, strict=True)]
        if torch.is_grad_enabled():
            self._expect(part)
            pooled = update_in_backward(self._embeddings.trigger, pooled, SliceUpdate(self, part))
        return self._embeddings.by_feature(pooled, [replace(lookup, batch_size=part.size) for lookup in self._lookups])

    def keep(self, part: Slice, grads: Sequence[Tensor]) -> None:
        """Called in the slice's backward pass, with gradients f32 [its bags, D] of each group."""
        if self._grads is None or self._waiting != part:
            raise RuntimeError(
                f"micro-batch {part.index} of train step {self._train_step} expects no backward pass; call backward() "
                "once for each forward"
            )
        for whole, grad, lookup in zip(self._grads, grads, self._lookups, strict=True):
            bags(whole, lookup)[:, part.start : part.stop] = grad.view(-1, part.size, grad.shape[1])
        self._waiting, self._is_kept = None, True
        self._stream_order.record()
        if part.is_last:
            self.finish()

    def finish(self) -> None:
        """Updates the rows if any slice was trained; a slice that was not trained has no gradient."""
        if self._grads is None or self._is_updated:
            return
        self._stream_order.gather()
        self._embeddings.update(self._grads, self._lookups, self._train_step)
        self._pooled, self._is_updated = None, True

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

    def _bags_of(self, part: Slice, rows: Tensor, lookup: GroupLookup) -> Tensor:
        return bags(rows, lookup)[:, part.start : part.stop].reshape(-1, rows.shape[1])


@dataclass(frozen=True, slots=True)
class SliceUpdate:
    """Implements `embedding.Pending` for one slice."""

    step: SlicedStep
    part: Slice

    def apply(self, grads: Sequence[Tensor]) -> None:
        self.step.keep(self.part, grads)


def bags(rows: Tensor, lookup: GroupLookup) -> Tensor:
    """[F * B, D] -> [F, B, D]"""
    return rows.view(-1, lookup.batch_size, rows.shape[1])
