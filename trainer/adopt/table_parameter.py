"""The parameter of an adopted table: look-ups read the step's rows; anything else meets the whole table or is refused.

`adopt` makes the script's own `nn.Parameter` an object of this class, so modules, optimizers and what else holds it
need no change. While an optimizer steps it is a plain `nn.Parameter` of the rows with a gradient
(`script_optimizer.py`).
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.adopted_table import AdoptedTable, as_plain
from rowcast.trainer.adopt.rows import positions

# their arguments, with defaults
LOOK_UPS = {
    own: {name: each.default for name, each in inspect.signature(own).parameters.items()}
    for own in (F.embedding, F.embedding_bag)
}
# attributes that say how the parameter is, not what its rows are
PROPERTIES = frozenset(
    (
        *("grad", "requires_grad", "is_leaf", "grad_fn", "device", "dtype", "is_sparse", "layout", "is_cuda", "is_cpu"),
        *("_backward_hooks", "is_mps", "is_meta", "is_xla", "is_quantized", "is_nested", "_version", "names"),
        *("output_nr", "ndim"),
    )
)
MOVES = frozenset(("to", "cuda", "cpu", "half", "float", "double", "bfloat16"))
OF_PARAMETER = frozenset(
    (
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_floating_point", "is_complex"),
        *("retain_grad", "_has_compatible_shallow_copy_type", "has_names", "__hash__", "element_size", "is_inference"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "is_contiguous", "dim"),
    )
)
# of the whole table, and no part of a loss
READS = frozenset(
    (
        *("detach", "numpy", "clone", "copy_", "__repr__", "tolist", "__format__", "untyped_storage", "data_ptr"),
        *("numel", "size", "stride", "__len__"),
    )
)


class TableParameter(nn.Parameter):
    table: AdoptedTable

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in LOOK_UPS:
            return embedding(func, args, kwargs)
        if rows_of := indexed(name, args, kwargs):
            return gathered(*rows_of)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and attribute == "shape":
            return args[0].table.shape
        if name == "__get__" and attribute == "data":
            return args[0].table.whole().weights  # the .data of these would hide that the script changes them
        if name == "__set__" and attribute == "data":
            return set_data(*args)
        if name in MOVES and (moved := another_door(func, args, kwargs)) is not None:
            return moved
        if (name, attribute) == ("__get__", "grad") and is_in("clip_grad_norm_", sys._getframe(1)):
            say_of_norm()
        if name in OF_PARAMETER or (name in ("__get__", "__set__") and attribute in PROPERTIES):
            with as_plain():
                return func(*args, **kwargs)
        if torch.is_grad_enabled() and name not in READS:
            refuse_whole(attribute if name == "__get__" else name, args, kwargs)
        with as_plain():
            args, kwargs = tree_map(
                lambda own: own.table.whole().weights if isinstance(own, cls) else own, (args, kwargs)
            )
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.table.whole().weights.clone(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.table.whole().weights.clone(), self.requires_grad)


def embedding(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.embedding` or `F.embedding_bag` of an adopted table."""
    names = LOOK_UPS[func]
    given = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(given["weight"], TableParameter):  # embedding_bag also takes them the other way round
        given["input"], given["weight"] = given["weight"], given["input"]
    table: AdoptedTable = given["weight"].table
    table.note(given["input"])
    changes_rows = given["max_norm"] is not None
    if torch.is_grad_enabled() or changes_rows:
        at = table.place(given["input"])
        ids, weights = table.ids, table.leaf() if torch.is_grad_enabled() else table.step_rows.weights
    else:
        ids, weights, at = table.peek(given["input"])
    if given["padding_idx"] is not None:
        padding = torch.tensor([given["padding_idx"] % table.num_rows], device=ids.device)
        found, known = positions(ids, padding)
        given["padding_idx"] = int(found) if bool(known) else None
    given["input"], given["weight"] = at, weights
    with as_plain():
        result = func(**given)
    if changes_rows:
        table.home.write(table.ids, table.step_rows)
    return result


Indexed = tuple[AdoptedTable, Tensor, Callable[[Tensor, Tensor], Tensor]]


def indexed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Indexed | None:
    """The look-up by an index of rows: the table, ids, and how rows are taken at positions. None: something else."""
    if not args or not isinstance(args[0], TableParameter):
        return None
    if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype in (torch.int64, torch.int32):
        return args[0].table, args[1], lambda rows, at: rows[at]
    if name == "index_select":
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | dict(kwargs)
        if given["dim"] in (0, -2):
            return args[0].table, given["index"], lambda rows, at: torch.index_select(rows, 0, at)
    return None


def gathered(table: AdoptedTable, ids: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    table.note(ids)
    if torch.is_grad_enabled():
        at = table.place(ids)
        return take(table.leaf(), at)
    _, weights, at = table.peek(ids)
    return take(weights, at)


def another_door(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "TableParameter | None":
    """A door to the same table on another device, where its look-ups are then. None: not float32 any more."""
    own: TableParameter = args[0]
    with as_plain(), torch.no_grad():
        data = func(own.data, *args[1:], **kwargs)
        if data.dtype != own.dtype:
            return None
        door: TableParameter = data.as_subclass(TableParameter).requires_grad_(own.requires_grad)
    door.table = own.table
    return door


def set_data(parameter: TableParameter, data: Tensor) -> None:
    """`parameter.data = data`: by a module that moves its parameters, or a whole table."""
    table = parameter.table
    if data.dtype != torch.float32:
        raise ConfigError(
            f"table {table.name} would become {data.dtype}, and rowcast keeps rows of torch.float32; leave it on the "
            f"device by keep=[{table.name!r}], or let autocast cast what was looked up"
        )
    if data.device != parameter.device:
        with as_plain():
            parameter.data = parameter.data.to(data.device)
        table.move(data.device)
    if not isinstance(data, TableParameter):
        table.whole().weights.copy_(data)


def refuse_whole(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    table = next(own.table for own in tree_flatten((args, kwargs))[0] if isinstance(own, TableParameter))
    if any("_dynamo" in frame.filename for frame in traceback.extract_stack()):
        refuse_compilation(table.name)
    frame = callers_frame()
    raise RowcastError(
        f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} computes {operation} of the whole table "
        f"{table.name} ({table.num_rows:,} rows) for the loss, so each step would read all rows; use the optimizer's "
        f"weight_decay, or only the rows that are looked up, or leave the table on the device by keep=[{table.name!r}]"
    )


@cache
def say_of_norm() -> None:
    print_line(
        "clip_grad_norm_ adds up the squares of an adopted table's gradient over the rows that have one, in another "
        "order than over the whole table: the norm agrees to rounding only"
    )


def is_in(function: str, frame: FrameType) -> bool:
    """Whether a frame is of a function, or of a comprehension in it."""
    around = frame.f_back or frame
    return function in (frame.f_code.co_name, around.f_code.co_name)


def refuse_compilation(name: str) -> NoReturn:
    raise ConfigError(
        f"torch.compile joins the look-ups of the adopted table {name} with the operations around them, which then "
        "round differently; compile the modules behind the look-ups instead of the model, or leave the table on the "
        f"device by keep=[{name!r}]"
    )


def callers_frame() -> FrameType:
    """The innermost frame that is neither torch's nor of this file: the script's, or its library's."""
    frame, torch_folder = sys._getframe(1), os.path.dirname(torch.__file__)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(torch_folder)
    ):
        frame = frame.f_back
    return frame


def become(parameter: nn.Parameter, table: AdoptedTable) -> None:
    """Makes a parameter the door to its table. Its own data are the rows with a gradient: none yet."""
    parameter.data = torch.empty(0, table.dim, dtype=parameter.dtype, device=parameter.device)
    parameter.__class__ = TableParameter
    cast(TableParameter, parameter).table = table
