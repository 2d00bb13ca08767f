"""Looks up the rows of a step from all ranks and trains them, for the runner of a job and for a training script.

compute    send rows |      | pool; forward and backward of each part; reduce |           | train |
exchange             | rows |                                                 | gradients |
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from torch import Tensor

from rowcast.job.tables import GroupSpec, unpooled_places
from rowcast.protocol.parts import Belonging, Rank, part_sizes
from rowcast.trainer.device.row_moves import move
from rowcast.trainer.device.streams import Stream, Streams
from rowcast.trainer.kernels import GroupLookup, Kernels
from rowcast.trainer.models.embedding import aligned, cut, in_job_order, places_of
from rowcast.trainer.models.exchanges import Exchanges, Start
from rowcast.trainer.models.job_model import named_inputs
from rowcast.trainer.models.runner import StepInputs, step_lookups
from rowcast.trainer.models.sequences import Embedded
from rowcast.trainer.models.shared_rows import GroupShare, Memory, SharedRows, Vectors
from rowcast.trainer.models.vector_exchange import NoVectors, VectorExchange


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

    def groups(self) -> Iterator[tuple[SharedRows, GroupLookup, GroupShare, Memory]]:
        return zip(self._layer, self.lookups, self.shares, self.memory, strict=True)

    def samples(self, part: int, name: str) -> Tensor:
        """Returns dense features or labels of one of this rank's parts."""
        return aligned(self.step.arrays[name][slice_of(self.part_sizes, part)])

    def inputs(self, part: int) -> dict[str, Tensor]:
        """Returns the batch's other arrays, of one of this rank's parts."""
        own = self._of.cut(slice_of(self.part_sizes, part), partial(self._lookups, part))
        return {name: aligned(array) for name, array in own.of(self._named).items()}

    def _lookups(self, part: int, feature: str) -> slice:
        group, number = self._places[feature]
        return slice_of([own[number] for own in self.shares[group].header.sequence_lookups], part)


def slice_of(sizes: Sequence[int], part: int) -> slice:
    first = sum(sizes[:part])
    return slice(first, first + sizes[part])


class RowExchange:
    """The rows of all groups, as a rank looks them up and trains its own. For each step:

    shared = begin(step, ...)      the main thread; memory is kept until `completed`
    issue_lookup(...)              the main thread
    embeddings(shared, part)       `shared.pooled` -> the model's inputs; with autograd functions of one's own,
                                   `bags` says how to cut them and `arranged` takes the results
    shared.gradients = ...         what a backward pass gave for `shared.pooled`, zeros included
    issue_reduce(...)              the main thread
    gradients(shared)              exchanges for `Exchanges.across` or `sum`; afterwards:
    train(shared, ...)
    completed(step)                the main thread, once all this is complete

    What does not belong to the main thread is called on the compute stream, by `Stream.run`. The streams of a script
    run it at once, so a forward pass may issue the look-up and use it, and a backward pass the rest. An evaluation ends
    after its look-up. Gradients are added as they are: weigh the parts' losses, or the gradients, before."""

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
        self._layer = [SharedRows(group, own, kernels, rank) for group, own in zip(groups, records, strict=True)]
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
        for rows, _, own, memory in shared.groups():
            weight, stay = rows.rows.weight, own.stay
            moves.append(move(weight, own.send_slots[:stay], memory.received[:stay]))
            moves.append(move(weight, own.send_slots[stay:], memory.sent))
        streams.compute.gather(moves)
        exchanges = [
            self._exchanges.all_to_all(memory.received[own.stay :], memory.sent, own.to_receive, own.to_send)
            for _, _, own, memory in shared.groups()
        ]
        self._exchanges.name(f"the rows of step {shared.step.step}")
        self._exchanges.across(streams, "rows_packed", [*exchanges, *with_it], "rows_received")
        streams.compute.run(lambda: self._pool(shared))
        self._vectors.issue_forward(streams, shared)

    def _pool(self, shared: SharedStep) -> None:
        by_group = [rows.pool(memory.received, lookup, own) for rows, lookup, own, memory in shared.groups()]
        *shared.pooled, shared.for_others = map(list, zip(*by_group, strict=True))
        self._exchanges.lap("lookup")

    def embeddings(self, shared: SharedStep, part: int) -> list[Embedded]:
        """The model's input for each feature of one of this rank's parts, in the job's order."""
        pieces = zip(shared.pooled[part], self.bags(shared, part), strict=True)
        return self.arranged(shared, part, [value for piece, bags in pieces for value in cut(piece, bags)])

    def bags(self, shared: SharedStep, part: int) -> list[list[int]]:
        """The bags of each feature in each of `shared.pooled[part]`."""
        return [*(own.bags[part] for own in shared.shares), *self._vectors.bags(shared.part_sizes[part])]

    def arranged(self, shared: SharedStep, part: int, values: Iterable[Tensor]) -> list[Embedded]:
        """`values`: f32 [bags, D] of each feature, in the order of `bags`."""
        left = iter(values)
        by_group = [
            feature
            for rows, lookup, own, _ in shared.groups()
            for feature in rows.features_of(part, list(islice(left, len(rows.features))), lookup, own)
        ]
        return in_job_order([*by_group, *left], self._places)

    def issue_reduce(self, streams: Streams, shared: SharedStep) -> None:
        """Adds up `shared.gradients` for `gradients`."""
        self._vectors.issue_backward(streams, shared)
        streams.compute.run(lambda: self._reduce(shared))

    def _reduce(self, shared: SharedStep) -> None:
        by_group = zip(*shared.gradients, strict=True)
        shared.pooled, shared.gradients = [], []
        for (rows, lookup, own, memory), gradients in zip(shared.groups(), by_group, strict=True):
            rows.reduce(gradients, lookup, own, memory.back, memory.returned)
        self._exchanges.lap("backward")

    def gradients(self, shared: SharedStep) -> list[Start]:
        """Exchanges of row gradients, for `train`."""
        return [
            self._exchanges.all_to_all(memory.returned[own.stay :], memory.back, own.to_send, own.to_receive)
            for _, _, own, memory in shared.groups()
        ]

    def train(self, shared: SharedStep, train_step: int) -> None:
        for rows, _, own, memory in shared.groups():
            rows.train(memory.returned, own, train_step)
        self._exchanges.lap("update")
