"""Looks up and trains rows on several ranks: receives rows from their owners, and returns gradients to them.

    send       slots -> the rows that other ranks look up           `Memory.sent`       [sent, D]
    (all to all)                                                    `Memory.received`   [received, D]
    pool       received rows -> pooled rows of each own part
    reduce     gradients of pooled rows -> one per received row       `Memory.back`       [received, D]
    (all to all)                                                    `Memory.returned`   [sent, D]
    train      their sums, in order -> the rows of this shard

One launch looks up all parts, and one reduces them: a part's look-ups, distinct rows and bags follow those of the
previous part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import ShareHeader
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, ExchangeArrays
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews
from rowcast.trainer.models.embedding import GroupRows
from rowcast.trainer.models.sequences import Embedded


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShare(ExchangeArrays[Tensor]):
    """One group's exchange in a step, on the device."""

    header: ShareHeader
    part_sizes: tuple[int, ...]  # samples of each own part

    @property
    def received(self) -> int:
        return sum(self.header.receive_counts)

    @property
    def sent(self) -> int:
        return sum(self.header.send_counts)


def group_share(arrays: dict[str, Tensor], group: int, header: ShareHeader, part_sizes: tuple[int, ...]) -> GroupShare:
    own = {name: arrays[f"{group}.{name}"] for name in EXCHANGE_ARRAYS}
    return GroupShare(header=header, part_sizes=part_sizes, **own)


class Reused:
    """Memory for a tensor of each step, which grows when a step needs more."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def rows(self, count: int, width: int) -> Tensor:
        """Returns [count, width] with an earlier step's content."""
        if len(self._flat) < count * width:
            self._flat = torch.empty(count * width * 5 // 4, dtype=self._flat.dtype, device=self._flat.device)
        return self._flat[: count * width].view(count, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """One group's sent and received rows and gradients in a step."""

    sent: Tensor  # [sent, D] in the table's dtype
    received: Tensor  # [received, D]
    back: Tensor  # f32 [received, D]
    returned: Tensor  # f32 [sent, D]


class SharedRows(GroupRows):
    """Looks up and trains the rows of one group, part by part."""

    def __init__(self, group: GroupSpec, records: Tensor, kernels: Kernels) -> None:
        super().__init__(group, records, kernels)
        dtype, device = self.rows.weight.dtype, records.device
        self._rows_out, self._rows_in = Reused(dtype, device), Reused(dtype, device)
        self._gradients_out, self._gradients_in = Reused(torch.float32, device), Reused(torch.float32, device)

    def memory(self, share: GroupShare) -> Memory:
        return Memory(
            sent=self._rows_out.rows(share.sent, self.dim),
            received=self._rows_in.rows(share.received, self.dim),
            back=self._gradients_out.rows(share.received, self.dim),
            returned=self._gradients_in.rows(share.sent, self.dim),
        )

    def pool(self, received: Tensor, lookup: GroupLookup, share: GroupShare) -> list[Tensor]:
        """Returns f32 [G, D] of each part of this rank."""
        views = RecordViews(weight=received, master=None, states=())
        pooled = self._kernels.lookup(views, lookup, self.divisors(lookup, chain(*self._bags(share))))
        return list(pooled.split_with_sizes([sum(bags) for bags in self._bags(share)]))

    def features_of(self, part: int, pooled: Tensor, lookup: GroupLookup, share: GroupShare) -> list[Embedded]:
        """f32 [G, D] of an own part -> the model's input for each of the group's features."""
        offsets = lookup.sequence_offsets
        if offsets is not None:
            first, end = sum(share.part_sizes[:part]), sum(share.part_sizes[: part + 1])
            offsets = offsets[:, first : end + 1] - offsets[:, first : first + 1]
        return self.cut(pooled, self._bags(share)[part], offsets)

    def reduce(self, pooled_grads: Sequence[Tensor], lookup: GroupLookup, share: GroupShare, back: Tensor) -> None:
        """Gradients f32 [G, D] of each part's pooled rows -> one per received row, the parts added in order."""
        divisors = self.divisors(lookup, chain(*self._bags(share)))
        gradients = self._kernels.reduce(torch.cat(list(pooled_grads)), lookup, divisors)
        add_levels(gradients, share.home_to, share.home_of, share.header.home_levels)
        torch.index_select(gradients, 0, share.home_roots, out=back)

    def train(self, returned: Tensor, share: GroupShare, train_step: int) -> None:
        """Adds the returned gradients, in the order of the ranks, and trains the rows of this shard."""
        add_levels(returned, share.to, share.of, share.header.levels)
        row_grads = returned.index_select(0, share.roots)
        self._kernels.apply(self.rows, share.own_slots, row_grads, self.rule(train_step))

    def _bags(self, share: GroupShare) -> list[list[int]]:
        """The number of bags of each own part and feature."""
        return list(starmap(self.num_bags, zip(share.part_sizes, share.header.sequence_lookups, strict=True)))


def add_levels(values: Tensor, to: Tensor, of: Tensor, level_ends: Sequence[int]) -> None:
    """Adds values[to] += values[of], level by level; within a level all positions differ."""
    for start, end in pairwise((0, *level_ends)):
        if start < end:
            values.index_add_(0, to[start:end], values.index_select(0, of[start:end]))
