"""Looks up the rows of a step from all ranks and trains them, for the runner of a job and for a training script.

compute    send rows |      | pool; forward and backward of each part; reduce |           | train |
exchange             | rows |                                                 | gradients |

Looks up and trains rows on several ranks: receives rows from their owners, and returns gradients to them.

    send       slots -> the rows that other ranks look up           `Memory.sent`       [sent, D]
               slots -> those that this rank looks up itself        `Memory.received`   [:stay]
    (all to all)                                                    `Memory.received`   [stay + received, D]
    pool       received rows -> pooled rows of each own part
    reduce     gradients of pooled rows -> one per received row       `Memory.back`       [received, D]
    (all to all)                                                    `Memory.returned`   [stay + sent, D]
    train      their sums, in order -> the rows of this shard

One launch looks up all parts, and one reduces them: a part's look-ups, distinct rows and bags follow those of the
previous part. If this rank owns whole tables, it also pools them for the other ranks' parts, after its own.

Exchanges pooled vectors of tables that one rank owns whole: their owner looks them up for the parts of all.

    compute    send rows |      | pool |         | parts; pack |           | reduce |           | train |
    exchange             | rows |      | vectors |             | gradients |        | gradients |
                                                                 of vectors          of rows

`protocol/parts.py` decides which rank pools which features, and how many vectors travel.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice, pairwise

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec, unpooled_places
from rowcast.protocol.parts import (
    Belonging,
    Rank,
    bags_of_sources,
    feature_owners,
    features_of,
    numbers_of_vectors,
    part_sizes,
    sources_of,
)
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, ExchangeArrays, ShareHeader
from rowcast.trainer.device.streams import Stream, Streams, Work, move
from rowcast.trainer.kernels import DTYPES, GroupLookup, Kernels, RecordViews
from rowcast.trainer.models.embedding import Embedded, GroupRows, aligned, cut, in_job_order, places_of
from rowcast.trainer.models.exchanges import Exchanges, Start
from rowcast.trainer.models.job_model import named_inputs
from rowcast.trainer.models.runner import StepInputs, step_lookups


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivedShare(ExchangeArrays[Tensor]):
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
    """One group's sent and received rows and gradients in a step. Rows that stay come first among those received."""

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
        # numbers within the group: features that own parts look up here, and those of each other owner
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
    ) -> ArrivedShare:
        """`batch_size`: samples over all ranks."""
        to_send, to_receive, number = list(header.send_counts), list(header.receive_counts), self._rank.number
        stay, to_send[number], to_receive[number] = to_send[number], 0, 0
        return ArrivedShare(
            header=header,
            part_sizes=part_sizes,
            bags=self._bags(batch_size, header.sequence_lookups),
            stay=stay,
            to_send=to_send,
            to_receive=to_receive,
            **{name: arrays[f"{self.index}.{name}"] for name in EXCHANGE_ARRAYS},
        )

    def memory(self, share: ArrivedShare, compute: Stream) -> Memory:
        """Returns memory for the exchanges of a step. Keep it until the step is complete: a larger step replaces it."""
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

    def pool(self, received: Tensor, lookup: GroupLookup, share: ArrivedShare) -> list[Tensor]:
        """Returns pooled rows f32 [bags, D] of each own part; then all other parts', in the dtype of gradients."""
        views = RecordViews(weight=received, master=None, states=())
        self._divisors = self.divisors(lookup, chain(*share.bags))
        pooled = self._kernels.lookup(views, lookup, self._divisors)
        sizes, num_parts = list(map(sum, share.bags)), len(share.part_sizes)
        *of_own, of_others = pooled.split_with_sizes([*sizes[:num_parts], sum(sizes[num_parts:])])
        return [*of_own, of_others.to(self._gradients)]

    def features_of(self, part: int, values: list[Tensor], lookup: GroupLookup, share: ArrivedShare) -> list[Embedded]:
        """f32 [bags, D] of each of `features` in an own part -> the model's input for it."""
        offsets = lookup.sequence_offsets
        if offsets is not None:
            first, end = sum(share.part_sizes[:part]), sum(share.part_sizes[: part + 1])
            offsets = offsets[:, first : end + 1] - offsets[:, first : first + 1]
        return self.inputs(values, offsets)

    def reduce(
        self, pooled_grads: Sequence[Tensor], lookup: GroupLookup, share: ArrivedShare, back: Tensor, returned: Tensor
    ) -> None:
        """Reduces gradients of the rows that `pool` returned to one per received row, adding parts in order: in `back`,
        or in `returned` for rows that stay. `lookup`: that of the newest `pool`."""
        gradients = self._kernels.reduce(torch.cat(list(pooled_grads)), lookup, self._divisors)
        add_levels(gradients, share.home_to, share.home_of, share.header.home_levels)
        torch.index_select(gradients, 0, share.home_roots[: share.stay], out=returned[: share.stay])
        torch.index_select(gradients, 0, share.home_roots[share.stay :], out=back)

    def train(self, returned: Tensor, share: ArrivedShare, train_step: int) -> None:
        """Adds the returned gradients, in the order of the ranks, and trains the rows of this shard."""
        add_levels(returned, share.to, share.of, share.header.levels)
        row_grads = returned.index_select(0, share.roots)
        self._kernels.apply(self.rows, share.own_slots, row_grads, self.rule(train_step))


def add_levels(values: Tensor, to: Tensor, of: Tensor, level_ends: Sequence[int]) -> None:
    """Adds values[to] += values[of], level by level; within a level all positions differ."""
    for start, end in pairwise((0, *level_ends)):
        if start < end:
            values.index_add_(0, to[start:end], values.index_select(0, of[start:end]))


class NoVectors:
    """Used by `RowExchange` if every table is divided by rows: no vectors travel."""

    def __init__(self, layer: Sequence[SharedRows], exchanges: Exchanges) -> None:
        self.pieces: list[tuple[int, int]] = []  # whose vectors arrive, in the order of `bags`

    def begin(self, shared: "SharedStep", compute: Stream) -> None:
        """Sets `shared.vectors`: memory, as `SharedStep.memory`."""

    def issue_forward(self, streams: Streams, shared: "SharedStep") -> None:
        """Sends the vectors of other ranks' parts; those that arrive follow in `shared.pooled`."""

    def bags(self, size: int) -> list[list[int]]:
        """Returns the bags of each feature in each such piece. `size`: samples of the part."""
        return []

    def issue_backward(self, streams: Streams, shared: "SharedStep") -> None:
        """Sends the gradients of these pieces back. Arriving ones are further gradients of the group."""


class VectorExchange(NoVectors):
    """A part has one piece for each group and other owner, in this order."""

    def __init__(self, layer: Sequence[SharedRows], exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._layer = layer
        self._pooling = [rows for rows in layer if rows.has_owner]
        self._taking = [rows for rows in self._pooling if rows.arriving]
        self.pieces = [rows.pieces[feature] for rows in self._taking for feature in chain(*rows.arriving)]

    def begin(self, shared: "SharedStep", compute: Stream) -> None:
        shared.vectors = [rows.vectors(shared.batch_size, compute) for rows in self._layer]

    def issue_forward(self, streams: Streams, shared: "SharedStep") -> None:
        self._exchanges.name(f"the pooled vectors of step {shared.step.step}")
        exchanges = [partial(self._send, shared, rows.index) for rows in self._pooling]
        self._exchanges.across(streams, "vectors_packed", exchanges, "vectors_received")
        streams.compute.run(lambda: self._take(shared))

    def _send(self, shared: "SharedStep", group: int) -> Work:
        vectors = shared.vectors[group]
        return self._exchanges.all_to_all(
            vectors.received, shared.for_others[group], vectors.to_receive, vectors.to_send
        )()

    def _take(self, shared: "SharedStep") -> None:
        for rows in self._taking:
            sizes = [len(features) * size for features in rows.arriving for size in shared.part_sizes]
            pieces = shared.vectors[rows.index].received.float().split_with_sizes(sizes)
            for part, pooled in enumerate(shared.pooled):
                pooled += pieces[part :: len(shared.pooled)]

    def bags(self, size: int) -> list[list[int]]:
        return [[size] * len(features) for rows in self._taking for features in rows.arriving]

    def issue_backward(self, streams: Streams, shared: "SharedStep") -> None:
        streams.compute.run(lambda: self._pack(shared))
        self._exchanges.name(f"the gradients of pooled vectors of step {shared.step.step}")
        of_groups = [shared.vectors[rows.index] for rows in self._pooling]
        exchanges = [
            self._exchanges.all_to_all(one.returned, one.back, one.to_send, one.to_receive) for one in of_groups
        ]
        self._exchanges.across(streams, "vector_gradients_packed", exchanges, "vector_gradients_received")

    def _pack(self, shared: "SharedStep") -> None:
        num_groups = len(self._layer)
        taken = chain(*zip(*(gradients[num_groups:] for gradients in shared.gradients), strict=True))
        for rows in self._taking:
            pieces = list(islice(taken, len(rows.arriving) * len(shared.part_sizes)))
            torch.cat(pieces, out=shared.vectors[rows.index].back)
        # returned gradients are treated as one more part, which is reduced last
        returned = [vectors.returned for vectors in shared.vectors]
        shared.gradients = [*(gradients[:num_groups] for gradients in shared.gradients), returned]


class SharedStep:
    """This rank's view of a step with a divided batch. `RowExchange.begin` makes it."""

    def __init__(
        self,
        step: StepInputs,
        layer: Sequence[SharedRows],
        compute: Stream,
        rank: Rank,
        of: Belonging,
        places: dict[str, tuple[int, int]],
    ) -> None:
        """`places`: as `unpooled_places`."""
        assert step.header.share is not None, f"step {step.step} was planned as a whole batch"
        self.step = step
        self.batch_size = step.header.share.batch_size  # of all ranks
        self.part_sizes = tuple(part_sizes(self.batch_size, rank))
        self.lookups = step_lookups(step)
        self.shares = [
            rows.share(step.arrays, header, self.batch_size, self.part_sizes)
            for rows, header in zip(layer, step.header.share.groups, strict=True)
        ]
        self.memory = [rows.memory(share, compute) for rows, share in zip(layer, self.shares, strict=True)]
        # of each part here, pieces f32 [bags, D] of pooled rows: one for each group, then what other owners have pooled
        self.pooled: list[list[Tensor]] = []
        self.gradients: list[list[Tensor]] = []  # of these
        self.for_others: list[Tensor] = []  # [bags, D] of each group, what was pooled for parts of other ranks
        self._layer, self._of, self._places = layer, of, places
        self._named = named_inputs(step.arrays)

        self.vectors: list[Vectors] = []  # of each group, if a rank owns a whole table

    def groups(self) -> Iterator[tuple[SharedRows, GroupLookup, ArrivedShare, Memory]]:
        return zip(self._layer, self.lookups, self.shares, self.memory, strict=True)

    def samples(self, part: int, name: str) -> Tensor:
        """Returns dense features or labels of one of this rank's parts."""
        return aligned(self.step.arrays[name][slice_of(self.part_sizes, part)])

    def inputs(self, part: int) -> dict[str, Tensor]:
        """Returns the batch's other arrays, of one of this rank's parts."""
        cut_of_part = self._of.cut(slice_of(self.part_sizes, part), partial(self._lookups, part))
        return {name: aligned(array) for name, array in cut_of_part.of(self._named).items()}

    def _lookups(self, part: int, feature: str) -> slice:
        group, number = self._places[feature]
        return slice_of([of_features[number] for of_features in self.shares[group].header.sequence_lookups], part)


def slice_of(sizes: Sequence[int], part: int) -> slice:
    first = sum(sizes[:part])
    return slice(first, first + sizes[part])


class RowExchange:
    """Looks up the rows of all groups on a rank, and trains the rank's own. For each step:

    shared = begin(step, ...)      the main thread; memory is kept until `completed`
    issue_lookup(...)              the main thread
    embeddings(shared, part)       `shared.pooled` -> the model's inputs; with autograd functions of one's own,
                                   `bags` says how to cut them and `arranged` takes the results
    shared.gradients = ...         what a backward pass gave for `shared.pooled`, zeros included
    issue_reduce(...)              the main thread
    gradients(shared)              exchanges for `Exchanges.across` or `sum`; afterwards:
    train(shared, ...)
    completed(step)                the main thread, once all this is complete

    All other calls are made on the compute stream, by `Stream.run`. The streams of a script
    run it at once, so a forward pass may issue the look-up and use it, and a backward pass the rest. An evaluation ends
    after its look-up. Gradients are added unweighted: weight the parts' losses, or the gradients, first."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        records: Sequence[Tensor],
        kernels: Kernels,
        rank: Rank,
        of: Belonging,
        exchanges: Exchanges,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        self._layer = [
            SharedRows(group, group_records, kernels, rank)
            for group, group_records in zip(groups, records, strict=True)
        ]
        has_owner = any(rows.has_owner for rows in self._layer)
        self._vectors = (VectorExchange if has_owner else NoVectors)(self._layer, exchanges)
        pooled_here = [rows.pieces[feature] for rows in self._layer for feature in rows.features]
        self._places = places_of(pooled_here + self._vectors.pieces)
        self._step_parts = rank, of, unpooled_places(groups)
        self._exchanges = exchanges
        self._in_use: dict[int, list[object]] = {}  # by exchanges of steps that are not complete

    def begin(self, step: StepInputs, compute: Stream) -> SharedStep:
        shared = SharedStep(step, self._layer, compute, *self._step_parts)
        self._vectors.begin(shared, compute)
        self._in_use[step.step] = [shared.memory, shared.vectors]
        return shared

    def completed(self, step: int) -> None:
        del self._in_use[step]

    def issue_lookup(self, streams: Streams, shared: SharedStep, with_it: Sequence[Start] = ()) -> None:
        """Fills `shared.pooled`. `with_it`: exchanges of the same time."""
        moves = []
        for rows, _, share, memory in shared.groups():
            weight, stay = rows.rows.weight, share.stay
            moves.append(move(weight, share.send_slots[:stay], memory.received[:stay]))
            moves.append(move(weight, share.send_slots[stay:], memory.sent))
        streams.compute.gather(moves)
        exchanges = [
            self._exchanges.all_to_all(memory.received[share.stay :], memory.sent, share.to_receive, share.to_send)
            for _, _, share, memory in shared.groups()
        ]
        self._exchanges.name(f"the rows of step {shared.step.step}")
        self._exchanges.across(streams, "rows_packed", [*exchanges, *with_it], "rows_received")
        streams.compute.run(lambda: self._pool(shared))
        self._vectors.issue_forward(streams, shared)

    def _pool(self, shared: SharedStep) -> None:
        by_group = [rows.pool(memory.received, lookup, share) for rows, lookup, share, memory in shared.groups()]
        *shared.pooled, shared.for_others = map(list, zip(*by_group, strict=True))
        self._exchanges.lap("lookup")

    def embeddings(self, shared: SharedStep, part: int) -> list[Embedded]:
        """The model's input for each feature of one of this rank's parts, in the job's order."""
        pieces = zip(shared.pooled[part], self.bags(shared, part), strict=True)
        return self.arranged(shared, part, [value for piece, bags in pieces for value in cut(piece, bags)])

    def bags(self, shared: SharedStep, part: int) -> list[list[int]]:
        """The bags of each feature in each of `shared.pooled[part]`."""
        return [*(share.bags[part] for share in shared.shares), *self._vectors.bags(shared.part_sizes[part])]

    def arranged(self, shared: SharedStep, part: int, values: Iterable[Tensor]) -> list[Embedded]:
        """`values`: f32 [bags, D] of each feature, in the order of `bags`."""
        left = iter(values)
        by_group = [
            feature
            for rows, lookup, share, _ in shared.groups()
            for feature in rows.features_of(part, list(islice(left, len(rows.features))), lookup, share)
        ]
        return in_job_order([*by_group, *left], self._places)

    def issue_reduce(self, streams: Streams, shared: SharedStep) -> None:
        """Sums `shared.gradients` for `gradients`."""
        self._vectors.issue_backward(streams, shared)
        streams.compute.run(lambda: self._reduce(shared))

    def _reduce(self, shared: SharedStep) -> None:
        by_group = zip(*shared.gradients, strict=True)
        shared.pooled, shared.gradients = [], []
        for (rows, lookup, share, memory), gradients in zip(shared.groups(), by_group, strict=True):
            rows.reduce(gradients, lookup, share, memory.back, memory.returned)
        self._exchanges.lap("backward")

    def gradients(self, shared: SharedStep) -> list[Start]:
        """Exchanges of row gradients, for `train`."""
        return [
            self._exchanges.all_to_all(memory.returned[share.stay :], memory.back, share.to_send, share.to_receive)
            for _, _, share, memory in shared.groups()
        ]

    def train(self, shared: SharedStep, train_step: int) -> None:
        for rows, _, share, memory in shared.groups():
            rows.train(memory.returned, share, train_step)
        self._exchanges.lap("update")
