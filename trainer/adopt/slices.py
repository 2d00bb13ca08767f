"""A step that the script trains in slices, one micro-batch after the other, with the rows updated once.

samples of the batch     | 0 ... 99 | 100 ... 199 | 200 ... 249 |      accumulate=3: cut as torch.chunk cuts
look-up                  the whole step, once; each slice takes its bags
backward                 each slice's gradients of its bags are kept ........ the last one: update, as of one large batch
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
    """Samples `start` to `stop` of a batch."""

    index: int
    start: int
    stop: int
    is_last: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


def slices_of(batch_size: int, number: int) -> list[Slice]:
    """At most `number`, all of one size but the last: fewer of a batch that has fewer samples."""
    width = -(-batch_size // number)
    starts = range(0, batch_size, width)
    return [Slice(i, start, min(start + width, batch_size), i == len(starts) - 1) for i, start in enumerate(starts)]


class SlicedStep:
    """The look-ups of one step and the gradients of its slices so far. Every table pools: a feature has one bag a sample."""

    def __init__(
        self, embeddings: Embeddings, uses: StreamOrder, lookups: Sequence[GroupLookup], train_step: int
    ) -> None:
        self._embeddings, self._uses, self._lookups, self._train_step = embeddings, uses, lookups, train_step
        self._pooled: list[Tensor] | None = None  # f32 [G, D] a group, until the rows change
        self._grads: list[Tensor] | None = None  # f32 [G, D] a group, once a slice is trained
        self._waiting: Slice | None = None  # looked up to be trained
        self._is_updated = False

    @property
    def awaits_backward(self) -> bool:
        return self._waiting is not None

    def look_up(self, own: Slice) -> list[Embedded]:
        """f32 [size, D] of every feature, as `Embeddings` gives them; with gradients enabled the backward pass keeps the slice's, and that
        of the last slice updates the rows. Raises RuntimeError for a second one before it."""
        self._uses.gather()  # the slices may be computed on streams of their own
        if self._pooled is None:
            with torch.no_grad():
                self._pooled = self._embeddings.pool(self._lookups)
        pooled = [self._of(own, rows, lookup) for rows, lookup in zip(self._pooled, self._lookups, strict=True)]
        if torch.is_grad_enabled():
            self._expect(own)
            pooled = update_in_backward(self._embeddings.trigger, pooled, KeptSlice(self, own))
        return self._embeddings.by_feature(pooled, [replace(lookup, batch_size=own.size) for lookup in self._lookups])

    def keep(self, own: Slice, grads: Sequence[Tensor]) -> None:
        """Called in the slice's backward pass, with f32 [its bags, D] of each group."""
        if self._grads is None or self._waiting != own:
            raise RuntimeError(
                f"micro-batch {own.index} of train step {self._train_step} had its backward pass; call it once a forward"
            )
        for whole, grad, lookup in zip(self._grads, grads, self._lookups, strict=True):
            bags(whole, lookup)[:, own.start : own.stop] = grad.view(-1, own.size, grad.shape[1])
        self._waiting = None
        self._uses.record()
        if own.is_last:
            self.finish()

    def finish(self) -> None:
        """The rows are updated, if any slice was trained; one that was not has no gradient."""
        if self._grads is None or self._is_updated:
            return
        self._uses.gather()
        self._embeddings.update(self._grads, self._lookups, self._train_step)
        self._pooled, self._is_updated = None, True

    def _expect(self, own: Slice) -> None:
        if self._waiting is not None:
            raise RuntimeError(
                f"embeddings of micro-batch {own.index} of train step {self._train_step} were asked for before the backward pass of an "
                "earlier forward; call backward() once a forward, or look up under torch.no_grad()"
            )
        if self._grads is None:
            self._embeddings.expect_update(self._lookups, self._train_step)
            assert self._pooled is not None, "looked up above"
            self._grads = [torch.zeros_like(rows) for rows in self._pooled]
        self._waiting = own

    def _of(self, own: Slice, rows: Tensor, lookup: GroupLookup) -> Tensor:
        return bags(rows, lookup)[:, own.start : own.stop].reshape(-1, rows.shape[1])


@dataclass(frozen=True, slots=True)
class KeptSlice:
    """What the backward pass of a slice does."""

    step: SlicedStep
    own: Slice

    def apply(self, grads: Sequence[Tensor]) -> None:
        self.step.keep(self.own, grads)


def bags(rows: Tensor, lookup: GroupLookup) -> Tensor:
    """[F * B, D] -> [F, B, D]"""
    return rows.view(-1, lookup.batch_size, rows.shape[1])
