"""All rows of an adopted table in one array of the host: what `weight.data`, `state_dict()` and `optimizer.state` show.

There is one array for each field (the weights, and each state of the optimizer), made at first use. A view of it is a
view of the table: each use first brings the array up to date, and writes to it change the table. An array can have two
other owners:

    another tensor of the script   `weight.data = tensor`: its memory becomes the table's; the earlier array is the
                                   script's alone
    NumPy, whose uses nobody sees  written before the next look-up, it counts; later arrays are read-only; as long as
                                   one lives, each step brings it up to date
"""

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.row_gradient import ADDS, RowGradient, Rows, as_plain, copied, looked_up, shares_memory

if TYPE_CHECKING:
    from rowcast.trainer.adopt.rows import Home  # it makes the fields


class WholeField:
    """One field of all rows. `array`: [V, D] on the host, once it is needed."""

    def __init__(self, keeper: "Home", name: str) -> None:
        self.keeper: Home | None = keeper  # None if the table has another array now
        self.name = name
        self.array: Tensor | None = None
        self.is_stale = np.zeros(0, np.bool_)  # rows written since; of all rows once there is an array
        self.steps = 0  # that the rows have had
        self.version = 0  # of the array, as it was left
        self.checksum: int | None = None  # of the array as it was left, while others may change it unseen
        self.door: Callable[[], object] = lambda: None  # that optimizer.state has; None once it is gone
        self.memories: list[Callable[[], object]] = []  # that NumPy has; None once it is gone

    def tensor(self) -> Tensor:
        """Returns the array, up to date."""
        if self.keeper is not None:
            self.keeper.refresh(self)
        assert self.array is not None, "it is made at the first use"
        return self.array

    def view(self) -> "WholeView":
        return view_of(self.tensor(), self)

    def is_changed(self) -> bool:
        """Whether torch has changed the array since it was left."""
        return self.array is not None and self.array._version != self.version

    def is_changed_unseen(self) -> bool:
        """Whether others have changed it."""
        return self.checksum is not None and self.checksum != self.sum()

    def note_left(self) -> None:
        """Notes the array as rowcast leaves it."""
        assert self.array is not None
        self.version = self.array._version
        if self.checksum is not None:
            self.checksum = self.sum() if self.is_in_numpy() else None

    def sum(self) -> int:
        assert self.array is not None
        return zlib.crc32(self.array.numpy().tobytes())

    def is_in_numpy(self) -> bool:
        self.memories = [memory for memory in self.memories if memory() is not None]
        return bool(self.memories)


class WholeView(Tensor):
    """The array of a field, or a view of it."""

    field: WholeField

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        views = [leaf for leaf in leaves if isinstance(leaf, WholeView)]
        for view in views:
            if view.field.keeper is not None:
                view.field.keeper.refresh(view.field)
        first: Any = args[0] if args else None
        if isinstance(first, WholeView):
            if name in ("numpy", "__array__"):
                return in_numpy(first, *args[1:], **kwargs)
            if name == "detach_":
                return first
            if name == "__dlpack__":
                lend(first)
            if name == "__get__" and func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return view_of(first.plain().detach(), first.field)  # .data would hide what the script changes
            if name == "__reduce_ex__":
                return first.plain().__reduce_ex__(*args[1:])  # type: ignore[no-untyped-call]
            if name == "__deepcopy__":
                return first.plain().clone()
        gradients = [leaf for leaf in leaves if isinstance(leaf, RowGradient)]
        if gradients:
            is_sum = name in ADDS and isinstance(first, WholeView) and first.shape == gradients[0].shape
            if is_sum and first.field.keeper is not None:
                return by_rows(first.field.keeper, func, first, gradients[0].rows, args, kwargs)
            args, kwargs = tree_map(copied, (args, kwargs))
        with as_plain():
            result = func(*args, **kwargs)
        return tree_map(lambda leaf: seen(leaf, views), result)

    def plain(self) -> Tensor:
        """The same memory, as torch's own tensor."""
        with as_plain():
            return self.as_subclass(Tensor)


def view_of(plain: Tensor, field: WholeField) -> WholeView:
    view: WholeView = plain.as_subclass(WholeView)
    view.field = field
    return view


def seen(result: Any, views: list[WholeView]) -> Any:
    """Makes a tensor that shares memory with a view a view, too."""
    if type(result) is Tensor:
        for view in views:
            if shares_memory(result, view):
                return view_of(result, view.field)
    return result


def by_rows(keeper: "Home", func: Any, target: WholeView, rows: Rows, args: Any, kwargs: Any) -> WholeView:
    """A script that steps by hand: `weight.data.add_(weight.grad, alpha=-lr)`."""
    if not rows.is_by_rows:
        raise RowcastError(
            f"the gradient of the adopted table {keeper.name} has values in all of its rows, and adding it would "
            "change them all; leave the rows that were not looked up at zero"
        )

    def change(chosen: Tensor) -> None:
        others = tree_map(looked_up, (args[1:], kwargs))
        func(chosen, *others[0], **others[1])

    say_of_hand(keeper.name)
    keeper.change_rows(target.field, rows.ids, change)
    return target


@cache
def say_of_hand(table: str) -> None:
    print_line(f"{table} is changed by hand, without an optimizer: its rows are not read ahead for that")


# NumPy


class NumpyMemory:
    """Memory of NumPy arrays, which lives as long as one of them."""

    def __init__(self, tensor: Tensor, *, writeable: bool) -> None:
        self.tensor = tensor
        self.__array_interface__ = {**tensor.numpy().__array_interface__}
        self.__array_interface__["data"] = (tensor.data_ptr(), not writeable)


class ReadOnlyRows(np.ndarray[Any, Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.flags.writeable:
            raise RowcastError(
                "this array shows an adopted table that was looked up before, and rowcast would not see the change; "
                "write `with torch.no_grad(): weight[...] = ...`, or change a copy of it"
            )
        super().__setitem__(index, value)


def in_numpy(view: WholeView, dtype: Any = None, **options: Any) -> npt.NDArray[Any]:
    field, keeper = view.field, view.field.keeper
    writeable = keeper is None or not keeper.is_sealed
    memory = NumpyMemory(view.plain().detach(), writeable=writeable)
    field.memories.append(weakref.ref(memory))
    if writeable and field.checksum is None:
        field.checksum = field.sum()
    array = np.asarray(memory)
    if not writeable:
        array = array.view(ReadOnlyRows)
    return array if dtype is None else array.astype(dtype, copy=False)


def lend(view: WholeView) -> None:
    """Lends the memory to others, which give no sign when they are done."""
    field, keeper = view.field, view.field.keeper
    if keeper is None:
        return
    if keeper.is_sealed:
        raise RowcastError(
            f"__dlpack__ of the adopted table {keeper.name}, which was looked up before, would let others change its "
            "memory unseen; give them a copy, weight.detach().clone()"
        )
    field.memories.append(lambda: field)
    field.checksum = field.sum()


@cache
def say_of_arrays(table: str) -> None:
    print_line(
        f"a NumPy array of {table} is alive, so each step brings all of its changed rows up to date; copy the array "
        "(.copy()) to be rid of that"
    )
