"""The parameter of an adopted table: look-ups read the step's rows; anything else meets the whole table or is refused.

`adopt` makes the script's own `nn.Parameter` an object of this class, so modules, optimizers and other holders of it
need no change. While an optimizer steps it is a plain `nn.Parameter` of the rows with a gradient
(`script_optimizer.py`)."""

import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.records import positions
from rowcast.trainer.adopt.row_gradient import as_plain, attribute_of, ids_of, is_basic, split, words
from rowcast.trainer.adopt.whole_table import WholeField, WholeView

# their arguments, with defaults
LOOK_UPS = {
    look_up: {name: argument.default for name, argument in inspect.signature(look_up).parameters.items()}
    for look_up in (F.embedding, F.embedding_bag)
}
# attributes and methods that describe the parameter, not its rows
PROPERTIES = words(
    """requires_grad is_leaf grad_fn device dtype is_sparse layout is_cuda is_cpu _backward_hooks is_mps is_meta is_xla
    _post_accumulate_grad_hooks is_quantized is_nested _version names output_nr ndim shape itemsize nbytes is_xpu
    is_vulkan is_sparse_csr"""
)
OF_PARAMETER = words(
    """requires_grad_ register_hook register_post_accumulate_grad_hook is_floating_point is_complex has_names __hash__
    _has_compatible_shallow_copy_type element_size is_inference get_device zeros_like ones_like full_like empty_like
    rand_like randn_like dim numel size nelement ndimension __len__ is_signed is_conj is_neg retain_grad new_zeros
    detach_ new_empty new_ones new_full new_tensor is_same_size type dim_order"""
)
OF_MEMORY = words("stride is_contiguous storage_offset")
MOVES = words("to cuda cpu half float double bfloat16")
OF_ANOTHER = words("view_as expand_as reshape_as type_as")  # take only the shape or type of their second
RESHAPES = words("t_ transpose_ swapaxes_ swapdims_ unsqueeze_ squeeze_ as_strided_")
# of the whole table, and no part of a loss
READS = words(
    """detach copy_ __repr__ tolist __format__ untyped_storage data_ptr storage equal isnan isinf isfinite isneginf
    isposinf isclose allclose signbit all any eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ argmax argmin
    argsort nonzero count_nonzero histc bucketize searchsorted isin"""
)
SCORES = words(
    """matmul __matmul__ __rmatmul__ mm linear t T mT transpose addmm einsum bmm inner tensordot mv dot permute
    baddbmm"""
)


class TableParameter(nn.Parameter):
    table: AdoptedTable

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation(func)
        first: Any = args[0] if args else None
        attribute = attribute_of(func)
        if func in LOOK_UPS:
            return embedding(func, args, kwargs)
        if name == "embedding":
            return embedding(F.embedding, *as_function(*args, **kwargs))
        if rows_of := indexed(name, args, kwargs):
            return gathered(*rows_of)
        if attribute == "data":
            return first.table.whole().detach() if name == "__get__" else set_data(*args)
        if attribute == "grad" and isinstance(first, TableParameter):
            return gradient_of(first.table, name, args[1:])
        if getattr(func, "__module__", "") == "torch.nn.init":
            with torch.no_grad():
                func(*tree_map(opened, args), **tree_map(opened, kwargs))
            return first
        if name == "full_like" and first.table.home.is_large:  # Adagrad makes its sums before the first step
            with as_plain():
                return func(first[:1, :1], *args[1:], **kwargs).expand(first.table.shape)
        if name == "__repr__" and first.table.home.is_large:  # of the module, which prints all that it has
            return f"an adopted table of {first.table.shape[0]:,} rows"
        if name in MOVES and (moved := another_door(func, args, kwargs)) is not None:
            return moved
        if is_of_parameter(func) or (name in OF_ANOTHER and not isinstance(first, TableParameter)):
            with as_plain():
                return func(*args, **kwargs)
        if name in OF_MEMORY:
            return func(torch.empty(first.table.shape, device="meta"), *args[1:], **kwargs)
        if torch.is_grad_enabled() and name not in READS:
            if name == "clone" and first.requires_grad:
                return TableCopy.apply(torch.zeros((), requires_grad=True, device="cpu"), first)  # type: ignore[no-untyped-call]
            if name in ("numpy", "__array__"):
                with as_plain():
                    return func(*args, **kwargs)  # torch refuses it: the parameter takes gradients
            refuse_whole(attribute if name == "__get__" else name, args, kwargs)
        return through_doors(func, args, kwargs)

    def plain(self) -> Tensor:
        """Returns all rows with all steps, f32 [V, D]."""
        return self.table.whole().plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.plain(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.plain().clone(), self.requires_grad)


class TableState(Tensor):
    """`optimizer.state[weight][name]` between steps: a state of all rows, [V, D]."""

    field: WholeField

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if is_of_parameter(func) or attribute_of(func) == "grad":
            with as_plain():
                return func(*args, **(kwargs or {}))
        if (operation(func), attribute_of(func)) == ("__set__", "data"):
            opened(args[0]).copy_(args[1])
            return None
        return through_doors(func, args, kwargs or {})

    def plain(self) -> Tensor:
        """Returns the state of all rows with all steps, f32 [V, D]."""
        return self.field.view().plain()


def state_door(table: AdoptedTable, name: str) -> TableState:
    field = table.home.whole(name)
    door: TableState = placeholder(table.shape, torch.float32, table.home.device).as_subclass(TableState)
    door.field, field.door = field, weakref.ref(door)
    return door


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of a door, which nobody may see."""
    return torch.full((1, 1), torch.nan, dtype=dtype, device=device).expand(*shape)


def operation(func: Callable[..., Any]) -> str:
    """Returns the name of an operation, also of one in torch.ops."""
    return str(getattr(func, "__name__", func)).split(".")[0]


def is_of_parameter(func: Callable[..., Any]) -> bool:
    return operation(func) in OF_PARAMETER or attribute_of(func) in PROPERTIES


def opened(leaf: Any) -> Any:
    """Returns what a door leads to."""
    if isinstance(leaf, TableParameter):
        return leaf.table.whole()
    return leaf.field.view() if isinstance(leaf, TableState) else leaf


def through_doors(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the operation on whole tables."""
    if torch._C._get_tracing_state() is not None:
        refuse_whole(operation(func), args, kwargs)
    if operation(func) in RESHAPES:
        raise ConfigError(
            f"{operation(func)} would give an adopted table another shape, and its look-ups are by rows; use "
            f"{operation(func)[:-1]}, which gives a view"
        )
    args_opened, kwargs_opened = tree_map(opened, (args, kwargs))
    result = func(*args_opened, **kwargs_opened)
    return args[0] if args and result is args_opened[0] else result


class TableCopy(torch.autograd.Function):
    """A copy of a whole table, which can be read but not trained."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: TableParameter) -> Tensor:
        ctx.parameter = parameter
        return parameter.plain().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_whole("clone", [ctx.parameter], {})


def gradient_of(table: AdoptedTable, action: str, values: Sequence[Any]) -> Tensor | None:
    """`parameter.grad`, and what is assigned to it."""
    if action != "__get__":
        table.grad = None if action == "__delete__" or values[0] is None else table.checked(values[0])
        table.is_stepped = False
    return table.grad


def as_function(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of F.embedding for those of torch.embedding."""
    padding = padding_idx if padding_idx >= 0 else None
    return (indices, weight, padding), {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}


def embedding(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.embedding` or `F.embedding_bag` of an adopted table."""
    names = LOOK_UPS[func]
    given = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(given["weight"], TableParameter):  # embedding_bag also takes them the other way round
        given["input"], given["weight"] = given["weight"], given["input"]
    table: AdoptedTable = given["weight"].table
    if torch._C._get_tracing_state() is not None:
        refuse_whole("a trace", [given["weight"]], {})
    wanted, padding = given["input"], given["padding_idx"]
    table.note(wanted)
    changes_rows = given["max_norm"] is not None
    if padding is not None:
        padding %= table.num_rows
        if func is F.embedding_bag:  # without a padding row, torch may add in another order
            wanted = torch.cat([wanted.reshape(-1), wanted.new_tensor([padding])])
    if torch.is_grad_enabled() or changes_rows:
        at = table.place(wanted)
        ids, weights = table.ids, table.leaf() if torch.is_grad_enabled() else table.step_rows.weights
    else:
        ids, weights, at = table.peek(wanted)
    if padding is not None:
        place, is_known = positions(ids, torch.tensor([padding], device=ids.device))
        given["padding_idx"] = int(place) if bool(is_known) else None
    given["input"] = at if wanted is given["input"] else at[:-1].view_as(given["input"])
    given["weight"] = weights
    with as_plain():
        result = func(**given)
    if changes_rows:
        table.home.write(table.ids, table.step_rows)
    return result


Indexed = tuple[AdoptedTable, Tensor, Callable[[Tensor, Tensor], Tensor]]


def indexed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Indexed | None:
    """Returns a look-up by index as the table, ids, and how to take rows at positions; None for any other operation."""
    if not args or not isinstance(args[0], TableParameter):
        return None
    table = args[0].table
    if name == "__getitem__":
        first, others = split(args[1])
        is_view = is_basic(first)
        if first is None or isinstance(first, bool) or (is_view and not torch.is_grad_enabled()):
            return None
        ids = ids_of(first, table.num_rows, table.home.device)
        if isinstance(first, slice) and len(ids) == table.num_rows:
            return None
        if is_view and not isinstance(first, slice):
            return table, ids.reshape(1), lambda rows, at: rows[at][(0, *others)]
        return table, ids, lambda rows, at: rows[(at, *others)]
    if name in ("index_select", "gather"):
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | dict(kwargs)
        if given["dim"] in (0, -2):
            take = torch.index_select if name == "index_select" else torch.gather
            return table, given["index"], lambda rows, at: take(rows, 0, at)
    return None


def gathered(table: AdoptedTable, ids: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    table.note(ids)
    if torch.is_grad_enabled():
        at = table.place(ids)
        return take(table.leaf(), at)
    _, weights, at = table.peek(ids)
    return take(weights, at)


def another_door(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "TableParameter | None":
    """Returns a door to the same table on another device, which its look-ups then use, or None if not float32 any
    more."""
    door: TableParameter = args[0]
    with as_plain(), torch.no_grad():
        moved = func(door.new_empty(0), *args[1:], **kwargs)
        if moved.dtype != door.dtype:
            return None
        if moved.device == door.device:
            return door
        values: Any = placeholder(door.table.shape, moved.dtype, moved.device)
        other: TableParameter = values.as_subclass(TableParameter).requires_grad_(door.requires_grad)
    other.table = door.table
    return other


def set_data(parameter: TableParameter, data: Tensor) -> None:
    """`parameter.data = data`: by a module that moves its parameters, or a whole table."""
    table = parameter.table
    if data.dtype != torch.float32 or data.shape != table.shape:
        raise ConfigError(
            f"table {table.name} would become {list(data.shape)} of {data.dtype}, and rowcast keeps its "
            f"{list(table.shape)} of torch.float32; leave it on the device by keep=[{table.name!r}], or let autocast "
            "cast what was looked up"
        )
    if data.device != parameter.device and (isinstance(data, TableParameter) or not isinstance(data, WholeView)):
        with as_plain():
            parameter.data = placeholder(table.shape, data.dtype, data.device)
        table.move(data.device)
    if isinstance(data, TableParameter):
        return
    if data.device.type != "cpu":
        table.whole().copy_(data)
        return
    field = table.home.repoint(data)
    if type(data) is Tensor:  # it is the table now, as in torch
        data.__class__ = WholeView
        cast(WholeView, data).field = field


def refuse_whole(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    table = next(leaf.table for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TableParameter))
    folders = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
    if any("_dynamo" in folder for folder in folders):
        refuse_compilation(table.name)
    keep = f"leave the table on the device by keep=[{table.name!r}]"
    if any("fsdp" in folder for folder in folders):
        raise ConfigError(f"FSDP cuts parameters, and the adopted table {table.name} is not here to be cut; {keep}")
    if torch._C._get_tracing_state() is not None or any("/export" in folder for folder in folders):
        raise ConfigError(
            f"torch.jit.trace and torch.export would keep the rows of {table.name} that the example looks up; trace "
            f"copy.deepcopy(model), which has the whole table, or {keep}"
        )
    if operation in ("grad", "backward"):
        raise ConfigError(
            f"torch.autograd.{operation} of named inputs cannot name the adopted table {table.name}, whose gradient is "
            f"gathered from its look-ups for weight.grad; call loss.backward() and read weight.grad, or {keep}"
        )
    frame = callers_frame()
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    if operation in SCORES:
        raise RowcastError(
            f"{where} computes {operation} of the whole table {table.name} ({table.num_rows:,} rows) with gradients; "
            f"for a head that is tied to the table {keep}; for an evaluation write `with torch.no_grad():` around it"
        )
    raise RowcastError(
        f"{where} computes {operation} of the whole table {table.name} ({table.num_rows:,} rows) for the loss, so each "
        "step would read all rows; use the optimizer's weight_decay, or only the rows that are looked up, or "
        f"{keep}; outside the loss write `with torch.no_grad():` around it"
    )


def refuse_compilation(name: str) -> NoReturn:
    raise ConfigError(
        f"torch.compile joins the look-ups of the adopted table {name} with the operations around them, which then "
        "round differently; compile the modules behind the look-ups instead of the model, or leave the table on the "
        f"device by keep=[{name!r}]"
    )


def callers_frame() -> FrameType:
    """Returns the innermost frame that is neither torch's nor this file's: the script's, or its library's."""
    frame, torch_folder = sys._getframe(1), os.path.dirname(torch.__file__)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(torch_folder)
    ):
        frame = frame.f_back
    return frame


def become(parameter: nn.Parameter, table: AdoptedTable) -> None:
    """Makes a parameter the door to its table."""
    with as_plain():
        parameter.data = placeholder(table.shape, parameter.dtype, parameter.device)
    parameter.__class__ = TableParameter
    cast(TableParameter, parameter).table = table
