"""Looks up and trains rows on several ranks: receives rows from their owners, and returns gradients to them.

    send       slots -> the rows that other ranks look up           `Memory.sent`       [sent, D]
               slots -> those that this rank looks up itself        `Memory.received`   [:stay]
    (all to all)                                                    `Memory.received`   [stay + received, D]
    pool       received rows -> pooled rows of each own part
    reduce     gradients of pooled rows -> one per received row       `Memory.back`       [received, D]
    (all to all)                                                    `Memory.returned`   [stay + sent, D]
    train      their sums, in order -> the rows of this shard

One launch looks up all parts, and one reduces them: a part's look-ups, distinct rows and bags follow those of the
previous part. If this rank owns whole tables, it also pools them for the other ranks' parts, after its own
(`vector_exchange.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import ShareHeader
from rowcast.protocol.parts import Rank
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, ExchangeArrays
from rowcast.protocol.pooled import bags_of_sources, feature_owners, features_of, numbers_of_vectors, sources_of
from rowcast.trainer.device.streams import Stream
from rowcast.trainer.kernels import DTYPES, GroupLookup, Kernels, RecordViews
from rowcast.trainer.models.embedding import GroupRows
from rowcast.trainer.models.sequences import Embedded


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShare(ExchangeArrays[Tensor]):
    """One group's exchange in a step, on the device."""

    header: ShareHeader
    part_sizes: tuple[int, ...]  # samples of each own part
    bags: list[list[int]]  # of each source (own parts first) and each of its features
    stay: int  # rows of this shard that this rank looks up: they lie first, and do not travel
    # that travel, to and from each rank
    to_send: list[int]
    to_receive: list[int]


class Reused:
    """Memory for a tensor of each step, which grows when a step needs more."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def rows(self, count: int, width: int, compute: Stream) -> Tensor:
        """Returns [count, width] with an earlier step's content, for work of that stream."""
        if len(self._flat) < count * width:
            self._flat = compute.memory_like(self._flat, count * width * 5 // 4)
        return self._flat[: count * width].view(count, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """One group's sent and received rows and gradients in a step. Those that stay are the first of what arrives."""

    sent: Tensor  # [sent, D] in the table's dtype
    received: Tensor  # [stay + received, D]
    back: Tensor  # [received, D] in the dtype of gradients
    returned: Tensor  # [stay + sent, D] in the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """One group's exchange of pooled vectors in a step, [n, D] in the dtype of gradients, and their numbers to and from
    each rank."""

    to_send: list[int]
    to_receive: list[int]
    received: Tensor  # by owner, part and feature
    back: Tensor  # their gradients
    returned: Tensor  # gradients of those sent


class SharedRows(GroupRows):
    """Looks up and trains the rows of one group, part by part."""

    def __init__(self, group: GroupSpec, records: Tensor, kernels: Kernels, rank: Rank) -> None:
        super().__init__(group, records, kernels)
        self._rank, self._numbers = rank, numbers_of_vectors(group, rank)
        self.index, self.pieces = group.index, group.feature_pieces
        sources, owners = sources_of(group, rank), feature_owners(group, rank.count)
        self._bags = lru_cache(2)(partial(bags_of_sources, group, rank))  # most batches have one size
        self.has_owner = set(owners) != {None}
        # by their number among the group's: features that own parts look up here, and those of each other owner
        self.features = sources[0].features
        others = [features_of(group, rank, owner) for owner in range(rank.count) if owner != rank.number]
        self.arriving = [features for features in others if features]
        self._unpooled = tuple(map(self.features.index, self._unpooled))
        if self._means is not None:
            means = self._means[[feature for source in sources for feature in source.features]]
            self._means = means if means.any() else None
        self._gradients, device = DTYPES[group.gradients], records.device
        self._rows_out, self._rows_in = (Reused(self.rows.weight.dtype, device) for _ in range(2))
        self._gradients_out, self._gradients_in = (Reused(self._gradients, device) for _ in range(2))
        self._vectors_in, self._vectors_back, self._vectors_returned = (
            Reused(self._gradients, device) for _ in range(3)
        )
        self._divisors: Tensor | None = None  # of the newest `pool`

    def share(
        self, arrays: Mapping[str, Tensor], header: ShareHeader, batch_size: int, part_sizes: tuple[int, ...]
    ) -> GroupShare:
        """`batch_size`: samples over all ranks."""
        to_send, to_receive, number = list(header.send_counts), list(header.receive_counts), self._rank.number
        stay, to_send[number], to_receive[number] = to_send[number], 0, 0
        return GroupShare(
            header=header,
            part_sizes=part_sizes,
            bags=self._bags(batch_size, header.sequence_lookups),
            stay=stay,
            to_send=to_send,
            to_receive=to_receive,
            **{name: arrays[f"{self.index}.{name}"] for name in EXCHANGE_ARRAYS},
        )

    def memory(self, share: GroupShare, compute: Stream) -> Memory:
        """For the exchanges of a step. Keep it until the step is complete: a larger step makes it new."""
        return Memory(
            sent=self._rows_out.rows(sum(share.to_send), self.dim, compute),
            received=self._rows_in.rows(share.stay + sum(share.to_receive), self.dim, compute),
            back=self._gradients_out.rows(sum(share.to_receive), self.dim, compute),
            returned=self._gradients_in.rows(share.stay + sum(share.to_send), self.dim, compute),
        )

    def vectors(self, batch_size: int, compute: Stream) -> Vectors:
        """As `memory`. `batch_size`: samples over all ranks."""
        to_send, to_receive = self._numbers(batch_size)
        return Vectors(
            to_send=to_send,
            to_receive=to_receive,
            received=self._vectors_in.rows(sum(to_receive), self.dim, compute),
            back=self._vectors_back.rows(sum(to_receive), self.dim, compute),
            returned=self._vectors_returned.rows(sum(to_send), self.dim, compute),
        )

    def pool(self, received: Tensor, lookup: GroupLookup, share: GroupShare) -> list[Tensor]:
        """Returns pooled rows f32 [bags, D] of each own part; then all other parts', in the dtype of gradients."""
        views = RecordViews(weight=received, master=None, states=())
        self._divisors = self.divisors(lookup, chain(*share.bags))
        pooled = self._kernels.lookup(views, lookup, self._divisors)
        sizes, own = list(map(sum, share.bags)), len(share.part_sizes)
        *of_own, of_others = pooled.split_with_sizes([*sizes[:own], sum(sizes[own:])])
        return [*of_own, of_others.to(self._gradients)]

    def features_of(self, part: int, values: list[Tensor], lookup: GroupLookup, share: GroupShare) -> list[Embedded]:
        """f32 [bags, D] of each of `features` in an own part -> the model's input for it."""
        offsets = lookup.sequence_offsets
        if offsets is not None:
            first, end = sum(share.part_sizes[:part]), sum(share.part_sizes[: part + 1])
            offsets = offsets[:, first : end + 1] - offsets[:, first : first + 1]
        return self.inputs(values, offsets)

    def reduce(
        self, pooled_grads: Sequence[Tensor], lookup: GroupLookup, share: GroupShare, back: Tensor, returned: Tensor
    ) -> None:
        """Gradients of what `pool` has returned -> one per received row, the parts added in order: to `back`, and those
        of rows that stay to `returned`. `lookup`: that of the newest `pool`."""
        gradients = self._kernels.reduce(torch.cat(list(pooled_grads)), lookup, self._divisors)
        add_levels(gradients, share.home_to, share.home_of, share.header.home_levels)
        torch.index_select(gradients, 0, share.home_roots[: share.stay], out=returned[: share.stay])
        torch.index_select(gradients, 0, share.home_roots[share.stay :], out=back)

    def train(self, returned: Tensor, share: GroupShare, train_step: int) -> None:
        """Adds the returned gradients, in the order of the ranks, and trains the rows of this shard."""
        add_levels(returned, share.to, share.of, share.header.levels)
        row_grads = returned.index_select(0, share.roots)
        self._kernels.apply(self.rows, share.own_slots, row_grads, self.rule(train_step))


def add_levels(values: Tensor, to: Tensor, of: Tensor, level_ends: Sequence[int]) -> None:
    """Adds values[to] += values[of], level by level; within a level all positions differ."""
    for start, end in pairwise((0, *level_ends)):
        if start < end:
            values.index_add_(0, to[start:end], values.index_select(0, of[start:end]))
