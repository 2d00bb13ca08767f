"""Lists the arrays of a plan with their dtypes, shapes, allowed values and the condition of their presence.

    InputSpec        for the batch, in `parts.py`                  "dense", "labels", "inputs:time", ...
    LookupArrays     for each group: the kernels' arrays           "0.slots", ...
    GroupArrays      for each group: also the cache's              "0.fetch_slots"
    ExchangeArrays   for each group, if ranks share the batch      "0.send_slots", ...

All code that packs, measures, checks or uses the arrays of a plan reads them here. To add an array to the look-ups, add
a line to `LookupArrays` and one to each of its three makers: `planner.WholeBatch`, `exchange.ShareOfBatch` and,
without a planner, `trainer/kernels/choose.py`.

A plan's headers stand here too. `StepHeader` has the numbers of a step and, as `ArraySpec`, the places of its arrays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec

from rowcast.runtime.ranges import Number, Text

A = TypeVar("A")  # a numpy array in the prefetcher, a tensor in the trainer
Dtype = Literal["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
ITEM_BYTES: dict[Dtype, int] = {dtype: int(dtype[1]) for dtype in get_args(Dtype)}


@dataclass(kw_only=True, slots=True)  # frozen, it would take twice as long to make: one a group and step
class Counts:
    """The numbers of a plan and one of its groups that decide shapes and limits."""

    samples: int
    lookups: int = 0
    unique: int = 0  # distinct rows
    bags: int = 0
    sequence_lookups: tuple[int, ...] = ()  # look-ups of each feature that is not pooled
    fetch: int = 0
    evict: int = 0
    slots: int = 0  # slots of the group on the device
    readable: int = 0  # rows that look-ups may read: all slots, or the rows received from their owners
    sources: int = 1  # as in `parts.py`: each has its own distinct rows
    exchanges: bool = False  # whether ranks divide the batch; if not, the numbers below are 0
    sent: int = 0  # rows sent to the ranks that look them up
    returned: int = 0  # received rows whose gradients go back: none in an evaluation
    trained: int = 0  # distinct rows of the shard that the whole batch trains
    home_additions: int = 0
    additions: int = 0
    present: frozenset[str] = frozenset()  # names of the optional arrays that this plan has

    @property
    def sequences(self) -> int:
        return len(self.sequence_lookups)


@dataclass(frozen=True, slots=True)
class Size:
    """A field of `Counts` plus a constant."""

    count: str
    plus: int = 0

    def __add__(self, plus: int) -> "Size":
        return Size(self.count, self.plus + plus)

    def of(self, counts: Counts) -> int:
        value: int = getattr(counts, self.count)
        return value + self.plus


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    dtype: Dtype
    shape: tuple[Size, ...]
    _: KW_ONLY
    below: Size | None = None  # values are from 0 to this - 1
    distinct: Callable[[Counts], bool] = lambda counts: False  # whether all values differ
    # values start at 0, never fall, and end at this; in two dimensions each row has a separate end
    rises_to: Size | None = None
    where: Callable[[Counts], bool] = lambda counts: True  # whether a plan has the array

    def shape_of(self, counts: Counts) -> tuple[int, ...]:
        return tuple(size.of(counts) for size in self.shape)

    def nbytes_of(self, counts: Counts) -> int:
        return math.prod(self.shape_of(counts)) * ITEM_BYTES[self.dtype] if self.where(counts) else 0

    def ends_of(self, counts: Counts) -> tuple[int, ...]:
        ends = () if self.rises_to is None else getattr(counts, self.rises_to.count)
        return ends if isinstance(ends, tuple) else (ends,)


def is_present(array: str) -> Callable[[Counts], bool]:
    return lambda counts: array in counts.present


OPTIONAL = ("order", "offsets", "weights")  # arrays that a plan has or not by its look-ups alone


def is_arranged(counts: Counts) -> bool:
    return "order" not in counts.present


def always(counts: Counts) -> bool:
    return True


def in_one_source(counts: Counts) -> bool:
    return counts.sources == 1


exchanges, has_sequences = attrgetter("exchanges"), attrgetter("sequences")
B, N, U, G = map(Size, ("samples", "lookups", "unique", "bags"))
S, L = map(Size, ("sequences", "sequence_lookups"))
FETCH, SLOTS = map(Size, ("fetch", "slots"))
READABLE, SENT, RETURNED, TRAINED = map(Size, ("readable", "sent", "returned", "trained"))
HOME_ADDITIONS, ADDITIONS = map(Size, ("home_additions", "additions"))


@dataclass(kw_only=True, slots=True)  # not frozen, as `Counts`
class LookupArrays(Generic[A]):
    """N look-ups of U distinct rows in G bags, feature-major.

    A pooled feature has B bags, one per sample. Each of the S features with pooling = "none" has one bag per look-up,
    and `sequence_offsets` divides these into samples. Without such features G is F * B.

    If ranks divide the batch, B is the number of samples in this rank's parts. Look-ups, rows and bags are ordered by
    source (`parts.py`): its parts, then those for which it pools the tables that it owns. "Slots" are positions among
    the received rows: two sources may look up the same one.

    If every bag of a whole batch holds one look-up, and no table has more than 65,536, a plan has `order` instead of
    `slots` and `bag_order`, and the trainer makes these two (`protocol/plan.py`).
    """

    # look-ups by row, counted from their table's first: a permutation of each table's look-ups
    order: Annotated[A | None, ArrayLayout("u2", (N,), where=is_present("order"))] = None
    # slot of each look-up
    slots: Annotated[A | None, ArrayLayout("i4", (N,), below=READABLE, where=is_arranged)] = None
    # slot of each distinct row, by ascending key
    unique_slots: Annotated[A, ArrayLayout("i4", (U,), below=READABLE, distinct=in_one_source)]
    # start of each distinct row's look-ups in bag_order
    segment_offsets: Annotated[A, ArrayLayout("i4", (U + 1,), rises_to=N)]
    # the bag of each look-up, grouped by row, in look-up order within a row
    bag_order: Annotated[A | None, ArrayLayout("i4", (N,), below=G, where=is_arranged)] = None
    # the look-up of each entry of bag_order; only with weights
    lookup_order: Annotated[A | None, ArrayLayout("i4", (N,), below=N, where=is_present("weights"))] = None
    # bag boundaries in slots; None: every bag holds one look-up
    offsets: Annotated[A | None, ArrayLayout("i4", (G + 1,), rises_to=N, where=is_present("offsets"))] = None
    # weight of each look-up; None: all are 1
    weights: Annotated[A | None, ArrayLayout("f4", (N,), where=is_present("weights"))] = None
    # start of each sample's look-ups among those of its feature
    sequence_offsets: Annotated[A | None, ArrayLayout("i4", (S, B + 1), rises_to=L, where=has_sequences)] = None

    def named(self) -> dict[str, Any]:
        """Returns the arrays of this class that are present, by name."""
        arrays = {name: getattr(self, name) for name in LOOKUP_ARRAYS}
        return {name: array for name, array in arrays.items() if array is not None}


@dataclass(kw_only=True, slots=True)
class GroupArrays(LookupArrays[A]):
    """The arrays of the kernels and the cache."""

    # slots of the fetched rows, by ascending key; victims leave the first of them
    fetch_slots: Annotated[A, ArrayLayout("i4", (FETCH,), below=SLOTS, distinct=always)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeArrays(Generic[A]):
    """The rows that a rank sends, and the order in which it adds gradients (a diagram is in
    `prefetcher/planner/exchange.py`)."""

    # slots of the rows for rank 0, then for rank 1, ..., each by ascending key
    send_slots: Annotated[A, ArrayLayout("i4", (SENT,), below=SLOTS, where=exchanges)]
    # row gradients of this rank's sources, one after another: gradient[home_to] += gradient[home_of], level by level
    home_to: Annotated[A, ArrayLayout("i4", (HOME_ADDITIONS,), below=U, where=exchanges)]
    home_of: Annotated[A, ArrayLayout("i4", (HOME_ADDITIONS,), below=U, where=exchanges)]
    # position of each received row's sum after that, in the order of the received rows
    home_roots: Annotated[A, ArrayLayout("i4", (RETURNED,), below=U, where=exchanges)]
    # the same for the gradients that return, laid out as the rows that were sent
    to: Annotated[A, ArrayLayout("i4", (ADDITIONS,), below=SENT, where=exchanges)]
    of: Annotated[A, ArrayLayout("i4", (ADDITIONS,), below=SENT, where=exchanges)]
    roots: Annotated[A, ArrayLayout("i4", (TRAINED,), below=SENT, where=exchanges)]
    # slot of each row that these sums train, by ascending key
    own_slots: Annotated[A, ArrayLayout("i4", (TRAINED,), below=SLOTS, distinct=always, where=exchanges)]


def layouts(arrays: type) -> dict[str, ArrayLayout]:
    """Returns the layouts of a class's array fields, in order."""
    hints = get_type_hints(arrays, include_extras=True)
    by_name = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: layout for name, layout in by_name.items() if isinstance(layout, ArrayLayout)}


LOOKUP_ARRAYS = layouts(LookupArrays)
GROUP_ARRAYS = layouts(GroupArrays)
EXCHANGE_ARRAYS = layouts(ExchangeArrays)


MAX_DIMENSIONS = 8  # dimensions of an array
ALIGNMENT = 64


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of one array in a plan's block of arrays."""

    name: Text  # "dense", "labels", "<group>.slots", ...
    dtype: Dtype
    shape: tuple[Number, ...]
    offset: Number  # bytes into the block, a multiple of 64


def check_specs(specs: Sequence[ArraySpec], arrays_bytes: int) -> None:
    for spec in specs:
        if len(spec.shape) > MAX_DIMENSIONS:
            raise ValueError(f"array {spec.name} has {len(spec.shape)} dimensions")
        nbytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        if spec.offset % ALIGNMENT != 0:
            raise ValueError(f"array {spec.name} at {spec.offset} is not aligned to {ALIGNMENT}")
        if spec.offset + nbytes > arrays_bytes:
            raise ValueError(
                f"array {spec.name} of {nbytes} bytes at {spec.offset} does not fit a block of {arrays_bytes}"
            )
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two arrays of a block have one name")


class GroupHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a `GroupPlan`; its arrays are in the block (`plan_layout.py`)."""

    num_lookups: Number
    num_unique: Number
    num_fetch: Number
    num_evict: Number
    num_dirty: Number
    fill_after: Number | None
    # for each feature that is not pooled, the last of its `sequence_offsets`
    sequence_lookups: tuple[Number, ...] = ()

    def check(self, plan: int) -> None:
        in_sequences, lookups, after = sum(self.sequence_lookups), self.num_lookups, self.fill_after
        if self.num_unique > lookups:
            raise ValueError(f"{lookups} look-ups cannot touch {self.num_unique} rows")
        if in_sequences > lookups:
            raise ValueError(f"{in_sequences} look-ups of sequences are among {lookups}")
        if self.num_evict > self.num_fetch:
            raise ValueError(f"{self.num_evict} victims make room for {self.num_fetch} rows")
        if self.num_dirty > self.num_evict:
            raise ValueError(f"{self.num_dirty} of {self.num_evict} victims are dirty")
        if self.num_evict != 0 and after is None:
            raise ValueError("victims are evicted without a plan to fill after")
        if after is not None and after >= plan:
            raise ValueError(f"plan {plan} is filled after plan {after}")


class ShareHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's exchange of a group's rows with the others, counted in rows, additions and look-ups."""

    send_counts: tuple[Number, ...]  # of send_slots, for each rank
    receive_counts: tuple[Number, ...]  # rows from each rank
    num_own: Number  # distinct rows of this shard that the whole batch looks up
    home_levels: tuple[Number, ...]  # additions of home_to up to the end of each level
    levels: tuple[Number, ...]  # additions of to up to the end of each level
    sequence_lookups: tuple[tuple[Number, ...], ...]  # for each part here, one number per feature that is not pooled


class BatchShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a batch that ranks divide; `StepHeader.batch_size` counts the samples of this rank's parts."""

    batch_size: Number  # samples of the batch over all ranks
    groups: tuple[ShareHeader, ...]


class StepHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepPlan` without its arrays."""

    step: Number
    kind: Literal["train", "eval"]
    train_step: Number
    epoch: Number
    batch_size: Number
    groups: tuple[GroupHeader, ...]
    arrays: tuple[ArraySpec, ...]
    arrays_bytes: Number  # of the plan's block, up to the end of this step's arrays
    share: BatchShare | None = None  # None: the batch is not divided

    def check(self) -> None:
        shares = () if self.share is None else self.share.groups
        require(
            self.share is None or len(shares) == len(self.groups),
            f"{len(shares)} of {len(self.groups)} groups are shared by ranks",
        )
        check_specs(self.arrays, self.arrays_bytes)

    def num_rows(self, group: int) -> int:
        """Returns the batch's distinct rows of a group that this rank owns."""
        return self.groups[group].num_unique if self.share is None else self.share.groups[group].num_own


def check_steps(plan: int, steps: Sequence[StepHeader]) -> None:
    """Checks the steps of a plan: they follow each other, and the first has the plan's move."""
    first = steps[0]
    for number, step in enumerate(steps):
        step.check()
        here, there = (step.step, step.kind, len(step.groups)), (first.step + number, first.kind, len(first.groups))
        require(here == there, f"plan {plan} has {here} (step, kind, groups) instead of {there}")
        for group in step.groups:
            moves = number == 0 or not group.num_fetch
            require(moves, f"step {step.step} of plan {plan} fetches {group.num_fetch} rows of its own")
            group.check(plan)


class RowSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive rows of one group, in the order of the plan's move."""

    group: Number
    start: Number  # first row of the span in the move
    count: Number
    offset: Number  # bytes into the piece's payload, a multiple of 64


class ArraySpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive bytes of the plan's block of arrays, at the start of the piece's payload."""

    offset: Number  # bytes into the block
    nbytes: Number
