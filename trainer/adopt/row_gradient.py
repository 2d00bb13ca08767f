"""The gradient of an adopted table between backward and step: [V, D] to the script, kept by rows.

    ids      i64 [n]   the rows with values of their own, ascending
    values   [n, D]    theirs
    rest     [1, D]    the value of each other row: zero, unless the script has changed all of them

An elementwise operation runs on `values` and once on `rest`, so each row has torch's bits. An index adds the rows that
it names. Any other use reads a copy of all rows. A write that would change all rows is refused, at once or when an
optimizer steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import print_line

as_plain = torch._C.DisableTorchFunctionSubclass

MOST_COPIED = 2**26  # values of a gradient of which a copy of all rows is made
BLOCK_ROWS = 2**16  # that are compared at once


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def attribute_of(func: Callable[..., Any]) -> str:
    """Returns the attribute that a function gets, sets or deletes, or ""."""
    is_access = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return str(func.__self__.__name__) if is_access else ""  # type: ignore[attr-defined]


# elementwise operations with the same bits at any place of an array, by their names in ATen; with "_" appended,
# each changes its first argument
BY_VALUE = words(
    """add sub rsub mul div neg abs pow sqrt rsqrt reciprocal sign sgn exp clamp clamp_min clamp_max maximum minimum
    fmax fmin nan_to_num lerp addcmul addcdiv where masked_fill isnan isinf eq ne lt le gt ge logical_not logical_and
    logical_or bitwise_and bitwise_or bitwise_not fill copy clone _to_copy zeros_like ones_like full_like empty_like
    tanh sigmoid log log1p round floor ceil trunc hardtanh threshold remainder fmod square floor_divide true_divide"""
)
FROM_ALL = words("all any max min amax amin")  # the same for a value once as for many
SUMS = words("sum norm linalg_vector_norm")  # over rows, where all rows are too many
VIEWS = words(
    """view reshape flatten ravel t transpose permute unsqueeze squeeze expand view_as expand_as reshape_as unbind split
    chunk narrow select diagonal numpy __array__ tolist __iter__ swapaxes movedim contiguous T mT H mH"""
)
ADDS = words("add_ sub_ __iadd__ __isub__")  # what a row of zeros leaves as it is


@dataclass(eq=False, slots=True)
class Rows:
    """A gradient by rows. Tensors of the script may share its arrays."""

    name: str  # of the table
    num_rows: int
    ids: Tensor
    values: Tensor
    rest: Tensor

    def at(self, ids: Tensor) -> Tensor:
        """Returns the values of rows, [m, D]. `ids`: i64 [m]."""
        if ids is self.ids:
            return self.values
        if not len(self.ids):
            return self.rest.expand(len(ids), -1).clone()
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return torch.where((self.ids[at] == ids)[:, None], self.values[at], self.rest)

    def widen(self, ids: Tensor) -> None:
        """Gives rows values of their own. `ids`: i64 [m]."""
        union = torch.unique(torch.cat([self.ids, ids]))
        if len(union) > len(self.ids):
            self.values = self.at(union)
            self.ids = union

    def clear(self) -> None:
        self.ids, self.values = self.ids[:0], self.values[:0]
        self.rest = torch.zeros_like(self.rest)

    @property
    def is_by_rows(self) -> bool:
        """Whether all rows except `ids` are zero."""
        return len(self.ids) == self.num_rows or not bool(self.rest.any())

    def whole(self) -> Tensor:
        """Returns a copy of all rows, [V, D]."""
        if self.num_rows * self.values.shape[1] > MOST_COPIED:
            raise RowcastError(
                f"this operation needs all {self.num_rows:,} x {self.values.shape[1]:,} values of the gradient of "
                f"{self.name} at once, which rowcast does up to {MOST_COPIED:,}; use its rows, weight.grad[ids]"
            )
        whole = self.rest.expand(self.num_rows, -1).clone()
        whole[self.ids] = self.values
        return whole


class RowGradient(Tensor):
    """`weight.grad` of an adopted table, or what a script has made of one: [V, D]."""

    rows: Rows

    @staticmethod
    def __new__(cls: type["RowGradient"], rows: Rows) -> "RowGradient":
        shape, like = (rows.num_rows, rows.values.shape[1]), rows.values
        gradient: RowGradient = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        gradient.rows = rows
        return gradient

    def __init__(self, rows: Rows) -> None: ...

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        target = args[0] if args else None
        if isinstance(target, RowGradient):
            if name == "__getitem__":
                return taken(target.rows, args[1])
            if name == "__setitem__":
                return put(target.rows, *args[1:])
            if name in ("apply_", "map_", "map2_"):
                raise refused(target.rows, f"{name} calls a function for each value of the table's memory")
            if name == "__repr__":
                return f"gradient of {target.rows.num_rows:,} rows; {target.rows.ids} have {target.rows.values}"
            if (attribute_of(func) or name) in VIEWS:
                return func(read_only(target.rows.whole()), *args[1:], **kwargs)
            if name == "__reduce_ex__":
                return target.rows.whole().__reduce_ex__(*args[1:])  # type: ignore[no-untyped-call]
            if name == "__deepcopy__":
                return target.clone()
        if any(hasattr(kind, "plain") for kind in types):  # doors to whole tables
            args, kwargs = tree_map(lambda leaf: leaf.plain() if hasattr(leaf, "plain") else leaf, (args, kwargs))
        with as_plain():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        rows = next(leaf.rows for leaf in leaves if isinstance(leaf, RowGradient))
        if name in ("detach", "alias"):
            return RowGradient(args[0].rows)
        if name in ("detach_", "zero_") or (name == "fill_" and not isinstance(args[1], Tensor) and args[1] == 0):
            if name != "detach_":
                rows.clear()
            return args[0]
        if name.startswith(("_foreach_", "_amp_foreach_")):
            return of_each(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise refused(rows, f"{name} draws a number for each of its rows")
        if name.removesuffix("_") in BY_VALUE:
            return by_value(func, name, rows, args, kwargs)
        if name in FROM_ALL and len(leaves) == 1:
            return func(rows.values if len(rows.ids) == rows.num_rows else torch.cat([rows.values, rows.rest]))
        if name in SUMS and rows.is_by_rows and rows.num_rows * rows.values.shape[1] > MOST_COPIED:
            say_of_sums()
            return func(rows.values[rows.values.any(1)], *args[1:], **kwargs)  # whatever rows were foreseen
        if name.endswith("_") or func.is_view:  # a view that an operation takes may be written to
            raise refused(rows, f"{name} of it is none of the operations that go by rows")
        return func(*tree_map(copied, args), **tree_map(copied, kwargs))


def copied(leaf: Any) -> Any:
    return leaf.rows.whole() if isinstance(leaf, RowGradient) else leaf


def looked_up(leaf: Any) -> Any:
    return leaf.rows.values if isinstance(leaf, RowGradient) else leaf


def refused(rows: Rows, reason: str) -> RowcastError:
    return RowcastError(
        f"the gradient of the adopted table {rows.name} has values in the rows that were looked up, and {reason}; "
        f"change these rows, as weight.grad[ids], use the optimizer's weight_decay, or leave the table on the device "
        f"by keep=[{rows.name!r}]"
    )


@cache
def say_of_sums() -> None:
    print_line(
        f"a norm or sum over the gradient of an adopted table of more than {MOST_COPIED:,} values adds its looked-up "
        "rows alone, in another order than over the whole table: it agrees to rounding only"
    )


class Varies(Exception):
    """Raised if rows that are not looked up would get different values."""


def by_value(func: Any, name: str, rows: Rows, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    changes = name.endswith("_")
    if changes and not isinstance(args[0], RowGradient):
        return onto_plain(func, name, rows, args, kwargs)
    gradients = [leaf.rows for leaf in leaves if isinstance(leaf, RowGradient)]
    ids = rows.ids
    if any(each.ids is not ids for each in gradients[1:]):
        ids = torch.unique(torch.cat([each.ids for each in gradients]))
        if len(ids) == len(rows.ids):
            ids = rows.ids
    try:
        rest = rest_of(func, leaves, spec, changes, rows, ids)
    except Varies:
        if changes:
            raise refused(rows, f"{name} with all rows of another tensor would change every row") from None
        return func(*tree_map(copied, args), **tree_map(copied, kwargs))
    if changes:
        rows.ids, rows.values = ids, rows.at(ids)

    def of_rows(leaf: Any) -> Any:
        if isinstance(leaf, RowGradient):
            return leaf.rows.at(ids)
        return leaf[ids] if is_of_rows(leaf, rows) else leaf

    call = tree_unflatten([of_rows(leaf) for leaf in leaves], spec)
    values = func(*call[0], **call[1])
    if not changes:
        return RowGradient(Rows(rows.name, rows.num_rows, ids, values, rest))
    rows.rest = rest
    return args[0]


def is_of_rows(leaf: Any, rows: Rows) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[0] == rows.num_rows != 1


def rest_of(func: Any, leaves: list[Any], spec: Any, changes: bool, rows: Rows, ids: Tensor) -> Tensor:
    """Returns the operation's result for each row that no gradient has, [1, D]. Raises Varies."""
    if any(isinstance(leaf, Tensor) and leaf.dim() > 2 for leaf in leaves):
        raise Varies

    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, RowGradient)]
    rests = [leaf.rows.rest for leaf in leaves if isinstance(leaf, RowGradient)]
    is_one_column = all(not leaf.dim() or leaf.shape[-1] == 1 for leaf in others) and all(
        bool((rest == rest[:, :1]).all()) for rest in rests
    )

    def made_of(begin: int, end: int) -> Tensor:
        def of_part(leaf: Any) -> Any:
            if isinstance(leaf, RowGradient):
                rest = leaf.rows.rest[:, : 1 if is_one_column else None].expand(end - begin, -1)
                return rest.clone() if changes else rest
            return leaf[begin:end] if is_of_rows(leaf, rows) else leaf

        call = tree_unflatten([of_part(leaf) for leaf in leaves], spec)
        made: Tensor = func(*call[0], **call[1])
        return made

    first = 0
    if any(is_of_rows(leaf, rows) for leaf in others):
        has_own = torch.zeros(rows.num_rows, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
        first = int(has_own.to(torch.int8).argmin())
        for at in range(0, rows.num_rows, BLOCK_ROWS):
            end = min(at + BLOCK_ROWS, rows.num_rows)
            is_rest = (made_of(at, end) == made_of(first, first + 1)).all(1)
            if not bool((is_rest | has_own[at:end]).all()):
                raise Varies
    return made_of(first, first + 1).expand(1, rows.rest.shape[1])


def onto_plain(func: Any, name: str, rows: Rows, args: Any, kwargs: Any) -> Any:
    """Applies an operation with a gradient to a tensor [V, D] of the script."""
    target = args[0]
    if name in ADDS and rows.is_by_rows and target.shape[0] == rows.num_rows:
        chosen = target[rows.ids]
        func(chosen, *tree_map(looked_up, args[1:]), **kwargs)
        target[rows.ids] = chosen
        return target
    return func(*tree_map(copied, args), **tree_map(copied, kwargs))


def of_each(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation over lists, such as torch._foreach_mul_."""
    name = func.overloadpacket.__name__
    if name.startswith("_amp_foreach_"):  # looks for values that are not finite, and scales; zeros stay
        return func(*tree_map(looked_up, args), **kwargs)
    base = name.removeprefix("_foreach_")
    one = getattr(torch.ops.aten, "linalg_vector_norm" if base == "norm" else base)
    number = len(args[0])
    results = [
        one(*(arg[at] if isinstance(arg, list | tuple) else arg for arg in args), **kwargs) for at in range(number)
    ]
    return None if name.endswith("_") else results


# indices


def taken(rows: Rows, index: Any) -> Tensor:
    """`gradient[index]`: a view if the index is of numbers and slices, else a copy, as in torch."""
    first, others = split(index)
    if isinstance(first, slice) and first == slice(None):
        return read_only(rows.whole())[(first, *others)]
    ids = ids_of(first, rows.num_rows, rows.ids.device)
    if not is_basic(first):
        values = rows.at(ids.reshape(-1)).reshape(*ids.shape, -1)
        return values[(..., *others)] if others else values
    rows.widen(ids.reshape(-1))
    begin = int(torch.searchsorted(rows.ids, ids.reshape(-1)[:1])) if ids.numel() else 0
    if isinstance(first, slice):
        return rows.values[(slice(begin, begin + len(ids)), *others)]
    return rows.values[(begin, *others)]


def put(rows: Rows, index: Any, value: Any) -> None:
    """`gradient[index] = value`."""
    first, others = split(index)
    value = copied(value)
    if isinstance(first, slice) and first == slice(None):
        part = rows.values[(slice(None), *others)]
        if isinstance(value, Tensor) and value.dim() == part.dim() and value.shape[0] == rows.num_rows:
            if bool(value.index_copy(0, rows.ids, torch.zeros_like(part)).any()):
                raise refused(rows, "all rows of another tensor were written to it")
            part.copy_(value[rows.ids])
            return
        rows.rest = rows.rest.clone()
        for part in (rows.values, rows.rest):
            part[(slice(None), *others)] = value
        return
    ids = ids_of(first, rows.num_rows, rows.ids.device)
    is_number = not isinstance(value, Tensor) or value.dim() == 0
    if is_number and bool((rows.rest[(slice(None), *others)] == value).all()):
        chosen = torch.isin(rows.ids, ids.reshape(-1))
        part = rows.values[chosen]
        part[(slice(None), *others)] = value
        rows.values[chosen] = part
        return
    rows.widen(ids.reshape(-1))
    rows.values[(torch.searchsorted(rows.ids, ids.contiguous()), *others)] = value


def split(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """The index of rows, and those that follow."""
    if not isinstance(index, tuple):
        return (slice(None) if index is Ellipsis else index), ()
    if not index or index[0] is Ellipsis:
        return slice(None), index
    return index[0], index[1:]


def is_basic(first: Any) -> bool:
    """Whether torch returns a view for this index. A tensor without dimensions counts as a number."""
    return isinstance(first, int | slice) or (
        isinstance(first, Tensor) and not first.dim() and first.dtype != torch.bool
    )


def ids_of(first: Any, num_rows: int, device: torch.device) -> Tensor:
    """The rows that an index names, i64. Raises IndexError, as torch does."""
    if isinstance(first, slice):
        return torch.arange(*first.indices(num_rows), device=device)
    ids = torch.as_tensor(first, device=device).detach()
    if ids.dtype in (torch.bool, torch.uint8):
        if ids.shape != (num_rows,):
            raise IndexError(f"a mask of {list(ids.shape)} cannot choose among {num_rows} rows")
        return ids.nonzero().reshape(-1)
    ids = ids.long()
    if ids.numel() and not -num_rows <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"index out of range: there are {num_rows} rows")
    return torch.where(ids < 0, ids + num_rows, ids)


class ReadOnly(Tensor):
    """A copy of all rows where torch would give a view. Writes to it are refused, because they would be lost."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_write = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
        if is_write and isinstance(args[0], ReadOnly):
            raise RowcastError(
                f"{name} would change a copy of an adopted table's gradient, and not the gradient; change weight.grad "
                "itself, without a view of all its rows"
            )
        with as_plain():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        if type(result) is Tensor and any(shares_memory(result, arg) for arg in args if isinstance(arg, ReadOnly)):
            return result.as_subclass(ReadOnly)
        return result


def read_only(whole: Tensor) -> Tensor:
    return whole.as_subclass(ReadOnly)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are of one storage."""
    if one.layout != torch.strided or other.layout != torch.strided or one.is_meta:
        return False
    with as_plain():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
