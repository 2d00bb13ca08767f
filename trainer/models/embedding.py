"""Looks up rows by slot in the device cache, and updates them in place in the backward pass.

Defines `Sequences`: the rows of a feature that is not pooled (pooling = "none"), one per look-up, sample by sample.

    offsets         0      2 2         5
    values          a0 a1      c0 c1 c2       sample 0 has two look-ups, sample 1 none, sample 2 three
    padded(length)  .  a0 a1   .  .  .   c0 c1 c2
    mask            0  1  1    0  0  0   1  1  1

Here length = 3. Look-ups keep the order of the data, the newest last if that is ordered by time; beyond `length`
look-ups, the first ones are dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowcast.job.tables import GroupSpec
from rowcast.trainer.device.streams import Phase
from rowcast.trainer.kernels import Group, GroupLookup, Kernels, Rule, all_groups, rows_of, rule_at, torch_ops
from rowcast.trainer.kernels.torch_ops import with_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The looked-up rows of a feature that is not pooled: n look-ups of B samples.

    values: f32 [n, D], in the order of the look-ups; gradients flow to them. Or an array with an entry per look-up,
        [n, ...].
    offsets: i32 [B + 1], the start of each sample's look-ups, from 0 to n.
    """

    values: Tensor
    offsets: Tensor

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the last `length` look-ups of each sample, padded at the left with zeros, and a mask.

        length: columns of the result.

        The values are f32 [B, length, D], or [B, length, ...] of an array, the newest look-up at the right; the mask is
        bool [B, length], True at a look-up. Does not wait for the device."""
        num_samples, (num_lookups, *width) = self.offsets.shape[0] - 1, self.values.shape
        ends = self.offsets[1:].long()
        lookup = torch.arange(num_lookups, device=ends.device)
        sample = torch.searchsorted(ends, lookup, right=True)
        column = lookup - ends[sample] + length  # negative where the look-up is too old
        dropped = num_samples * length  # a position after all others, for look-ups that are too old
        position = torch.where(column < 0, dropped, sample * length + column)
        padded = self.values.new_zeros(dropped + 1, *width).index_copy(0, position, self.values)
        columns = torch.arange(length, device=ends.device)
        mask = columns >= length - self.offsets.diff()[:, None]
        return padded[:dropped].view(num_samples, length, *width), mask


# so that torch.export accepts a model with them as inputs
torch.export.register_dataclass(Sequences, serialized_type_name="rowcast.Sequences")

Embedded = Tensor | Sequences  # a feature's input to the model: f32 [B, D] if it is pooled


__all__ = ["Embeddings", "GroupLookup"]

MATRIX_ALIGNMENT = 64  # bytes
Inputs = tuple[Tensor, *tuple[Sequence[Embedded], ...]]  # dense, embeddings, and linear weights if there are any
CLOSED = (
    "the backward pass of train step {} came after the loader had ended, when its rows had left the device; call "
    "backward() before the loader is closed or asked for the next batch"
)


class Embeddings:
    """Looks up all embedding tables of a model, in the device cache's records. It holds no state."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        records: Sequence[Tensor],
        kernels: Kernels = torch_ops,
        lap: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        """`records`: f32 [num_slots, record_floats] of each group.

        Calls `lap` when the rows' update begins and ends in a backward pass."""
        pairs = zip(groups, records, strict=True)
        self._groups = [GroupRows(group, group_records, kernels) for group, group_records in pairs]
        self._places = places_of([piece for group in groups for piece in group.feature_pieces])
        # those of the job: groups share them
        self._kernels = all_groups(with_gradients(kernels, groups[0].gradients))
        self._optimizer = groups[0].optimizer
        self._newest: tuple[Sequence[GroupLookup], list[Group]] = (), []  # look-ups
        self.trigger = torch.zeros((), dtype=torch.float32, device=records[0].device, requires_grad=True)
        self._awaits_backward: PendingUpdate | None = None
        self._lap = lap

    def __call__(self, lookups: Sequence[GroupLookup], train_step: int) -> list[Embedded]:
        """Returns pooled embeddings f32 [B, D] of every feature, in the job's order; `Sequences` if it is not pooled.

        `lookups` holds one entry per group; `train_step` counts the train batches before this one (for Adam). With
        gradients enabled, the backward pass applies the row optimizer to the batch's records, so each forward needs
        exactly one backward: a second forward before it, or a second backward, raises RuntimeError. Under
        `torch.no_grad()`, this only looks up."""
        pooled = self.pool(lookups)
        pending = self.expect_update(lookups, train_step) if torch.is_grad_enabled() else None
        return self.by_feature(pooled, lookups, pending)

    def pool(self, lookups: Sequence[GroupLookup]) -> list[Tensor]:
        """f32 [G, D] of each group."""
        self._newest = lookups, self._of_step(lookups)
        return self._kernels.lookup_all(self._newest[1])

    def _of_step(self, lookups: Sequence[GroupLookup]) -> list[Group]:
        pairs = zip(self._groups, lookups, strict=True)
        return [(group.rows, lookup, group.divisors(lookup, group.bags_of(lookup))) for group, lookup in pairs]

    def expect_update(self, lookups: Sequence[GroupLookup], train_step: int) -> "PendingUpdate":
        """Announces an `update` of these look-ups. Raises RuntimeError if one is already expected."""
        if self._awaits_backward:
            raise RuntimeError(
                f"embeddings of train step {train_step} were asked for before the backward pass of an earlier forward "
                "updated their rows; call backward() once for each forward, or look up under torch.no_grad()"
            )
        self._awaits_backward = PendingUpdate(self, lookups, train_step)
        return self._awaits_backward

    def by_feature(
        self, pooled: Sequence[Tensor], lookups: Sequence[GroupLookup], pending: "PendingUpdate | None"
    ) -> list[Embedded]:
        """f32 [G, D] of each group -> the model's input for each feature, in the job's order.

        `pending`: what their backward pass does; None under `torch.no_grad()`."""
        bags = [group.bags_of(lookup) for group, lookup in zip(self._groups, lookups, strict=True)]
        values = iter(cast(Any, UpdateInBackward).apply(self.trigger, pending, bags, *pooled))
        by_group = [
            feature
            for group, group_bags, lookup in zip(self._groups, bags, lookups, strict=True)
            for feature in group.inputs(list(islice(values, len(group_bags))), lookup.sequence_offsets)
        ]
        return in_job_order(by_group, self._places)

    def finish_step(self) -> None:
        """Call after the backward pass: if the loss depends on no embedding, updates the rows with zero gradients."""
        pending = self._awaits_backward
        if pending is not None:
            zeros = [group.zeros(lookup) for group, lookup in zip(self._groups, pending.lookups, strict=True)]
            self.update(zeros, pending.lookups, pending.train_step)

    def close(self) -> None:
        """Releases records and look-ups. A later backward pass raises RuntimeError."""
        if self._awaits_backward is not None:
            self._awaits_backward.lookups = ()
        self._awaits_backward = None
        self._groups, self._newest = [], ((), [])

    def update(self, pooled_grads: Sequence[Tensor], lookups: Sequence[GroupLookup], train_step: int) -> None:
        """Reduces and applies the gradients f32 [G, D] of one forward's pooled embeddings, group by group."""
        if not self._groups:
            raise RuntimeError(CLOSED.format(train_step))
        if self._awaits_backward is None or self._awaits_backward.lookups is not lookups:
            raise RuntimeError(
                f"the rows of train step {train_step} were already updated; call backward() once for each forward"
            )
        self._awaits_backward = None
        self._lap("backward")
        newest, self._newest = self._newest, ((), [])
        groups = newest[1] if newest[0] is lookups else self._of_step(lookups)
        self._kernels.update_all(groups, pooled_grads, rule_at(self._optimizer, train_step))
        self._lap("update")


def places_of(pieces: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns for each feature, in the job's order, where its pieces are among `pieces`, in the order of their columns.
    Pieces are as in `GroupSpec.feature_pieces`."""
    places = sorted(range(len(pieces)), key=pieces.__getitem__)
    return [list(of_feature) for _, of_feature in groupby(places, key=lambda place: pieces[place][0])]


def in_job_order(by_piece: Sequence[Embedded], places: Iterable[Sequence[int]]) -> list[Embedded]:
    """Returns the model's input for each feature, with the columns of its pieces. `places`: as `places_of`."""
    return [
        by_piece[pieces[0]]
        if len(pieces) == 1
        else torch.cat([cast(Tensor, by_piece[place]) for place in pieces], dim=1)
        for pieces in places
    ]


class GroupRows:
    """Looks up and updates the records of one group."""

    def __init__(self, group: GroupSpec, records: Tensor, kernels: Kernels) -> None:
        self.dim = group.embedding_dim
        self.rows = rows_of(records, group)
        self._settings = group.optimizer
        self._num_features = group.num_features
        self._unpooled = group.unpooled_features
        self._kernels = with_gradients(kernels, group.gradients)
        means = [table.pooling == "mean" for table in group.feature_tables()]
        self._means = torch.tensor(means, device=records.device) if any(means) else None  # bool, of each feature

    def rule(self, train_step: int) -> Rule:
        return rule_at(self._settings, train_step)

    def inputs(self, values: list[Tensor], sequence_offsets: Tensor | None) -> list[Embedded]:
        """f32 [bags, D] of each feature -> the model's input for it.

        `sequence_offsets`: i32 [S, B + 1], of the features that are not pooled."""
        features: list[Embedded] = list(values)
        for feature, offsets in zip(self._unpooled, () if sequence_offsets is None else sequence_offsets, strict=True):
            features[feature] = Sequences(values=values[feature], offsets=offsets)
        return features

    def zeros(self, lookup: GroupLookup) -> Tensor:
        return torch.zeros(sum(self.bags_of(lookup)), self.dim, dtype=torch.float32, device=self.rows.weight.device)

    def divisors(self, lookup: GroupLookup, bags: Iterable[int]) -> Tensor | None:
        """Returns the look-ups of each averaged bag, at least 1; 1 for other bags. None if all are 1.

        `bags`: of each of `_means`."""
        if self._means is None or lookup.offsets is None:
            return None
        is_mean = torch.cat([mean.expand(count) for mean, count in zip(self._means, bags, strict=True)])
        return torch.where(is_mean, lookup.offsets.diff().clamp(min=1), 1).float().view(-1, 1)

    def bags_of(self, lookup: GroupLookup) -> list[int]:
        """Returns the number of bags of each feature."""
        bags = [lookup.batch_size] * self._num_features
        for feature, num_lookups in zip(self._unpooled, lookup.sequence_lookups, strict=True):
            bags[feature] = num_lookups
        return bags


@dataclass(slots=True)
class PendingUpdate:
    """The update in the backward pass of one forward."""

    embeddings: Embeddings
    lookups: Sequence[GroupLookup]
    train_step: int

    def apply(self, grads: Sequence[Tensor]) -> None:
        """`grads`: f32 [G, D] of each group's pooled embeddings."""
        self.embeddings.update(grads, self.lookups, self.train_step)
        self.lookups = ()  # a loss that the caller keeps would keep the plan's memory


class UpdateInBackward(torch.autograd.Function):
    """Cuts the groups' bags into those of features; the backward pass updates rows instead of returning gradients.

    `trigger` makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, pending: PendingUpdate | None, bags: Sequence[Sequence[int]], *pooled: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pending, ctx.counts = pending, list(map(len, bags))
        # whole tables of other ranks may leave a group no bags here
        ctx.empty = [[] if sizes else [rows.new_empty(rows.shape)] for sizes, rows in zip(bags, pooled, strict=True)]
        return tuple(chain.from_iterable(map(Tensor.split_with_sizes, pooled, bags)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        left = iter(grads)
        groups = zip(ctx.counts, ctx.empty, strict=True)
        ctx.pending.apply([joined([*islice(left, count), *empty]) for count, empty in groups])
        return (None,) * (3 + len(ctx.counts))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts [n, D] one after the other: a view if they are neighbours in one memory, otherwise a copy."""
    if all(part.is_contiguous() for part in parts) and all(follows(*pair) for pair in pairwise(parts)):
        # strides do not help: a dimension of 0 or 1 may have any
        flat = parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
        return flat.view(sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts))


def follows(part: Tensor, following: Tensor) -> bool:
    storage, others = part.untyped_storage(), following.untyped_storage()
    return (
        storage.data_ptr() == others.data_ptr()
        and storage.nbytes() == others.nbytes()
        and part.dtype == following.dtype
        and part.shape[1:] == following.shape[1:]
        and part.storage_offset() + part.numel() == following.storage_offset()
    )


def align_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Aligns a model's inputs: on the CPU, the bits of a matrix product depend on alignment and strides."""
    if torch.compiler.is_compiling():
        return inputs  # `JobModel` has aligned them
    dense, *lists = inputs
    return aligned(dense), *(
        [
            aligned(rows) if isinstance(rows, Tensor) else Sequences(values=aligned(rows.values), offsets=rows.offsets)
            for rows in embeddings
        ]
        for embeddings in lists
    )


def aligned(tensor: Tensor) -> Tensor:
    # a dimension of 1 may have any stride, and products read it
    if tensor.is_contiguous() and 1 not in tensor.shape and tensor.data_ptr() % MATRIX_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class JoinInBackward(torch.autograd.Function):
    """`split_with_sizes`, whose backward pass copies nothing if the gradients are neighbours."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return whole.split_with_sizes(sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return joined(grads), None


def cut(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns views [size, D] of each size. Only this call of `Function.apply` is typed."""
    return list(cast(Any, JoinInBackward).apply(whole, sizes))
