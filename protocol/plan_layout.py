"""Lists the arrays of a plan with their dtypes, shapes, allowed values and the condition of their presence.

    InputSpec        for the batch, in `parts.py`                  "dense", "labels", "inputs:time", ...
    LookupArrays     for each group: the kernels' arrays           "0.slots", ...
    GroupArrays      for each group: also the cache's              "0.fetch_slots"
    ExchangeArrays   for each group, if ranks share the batch      "0.send_slots", ...

All code that packs, measures, checks or uses the arrays of a plan reads them here. To add an array to the look-ups, add
a line to `LookupArrays` and one to each of its three makers: `planner.WholeBatch`, `exchange.ShareOfBatch` and,
without a planner, `trainer/kernels/lookups.py`.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_type_hints

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
    `slots` and `bag_order`, and the trainer makes these two (`protocol/arrange.py`).
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
    found = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: layout for name, layout in found.items() if isinstance(layout, ArrayLayout)}


LOOKUP_ARRAYS = layouts(LookupArrays)
GROUP_ARRAYS = layouts(GroupArrays)
EXCHANGE_ARRAYS = layouts(ExchangeArrays)
