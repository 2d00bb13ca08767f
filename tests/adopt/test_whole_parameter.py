"""What a script does with an adopted table has torch's meaning, or is refused with a sentence of rowcast's.

Each method and attribute of torch.Tensor is tried on the parameter, its gradient, its optimizer's state and its data,
adopted and not, with the first arguments that torch takes. Both give the same, and leave the same.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rowcast
from rowcast.runtime.errors import RowcastError
from rowcast.trainer.adopt.table_parameter import TableParameter
from tests.support.repeats import count

ROWS, DIM = 12, 3
SHARES = 6  # of the names: one is tried of each kind, all in `make soak`

pytestmark = [
    pytest.mark.usefixtures("_cheap_collections", "no_engine", "let_go"),
    pytest.mark.filterwarnings("ignore"),  # of torch, on its own old methods
]


@pytest.fixture
def _cheap_collections() -> Iterator[None]:
    """Each adoption collects garbage, to see whether an earlier one is alive."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class World:
    """A script between backward and step, in its third step."""

    def __init__(self, *, adopted: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.ModuleDict({"item": nn.Embedding(ROWS, DIM), "top": nn.Linear(DIM, 1)})
        if adopted:
            rowcast.adopt(self.model, "6 rows")
            assert isinstance(self.weight, TableParameter)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        for ids in ([1, 2, 2], [4, 1, 7], [2, 9, 1]):
            self.optimizer.zero_grad()
            self.loss(torch.tensor(ids)).backward()  # type: ignore[no-untyped-call]
            if ids[0] != 2:
                self.optimizer.step()
        self.given: Any = None  # what the operation gives

    @property
    def weight(self) -> Any:
        return self.model.item.weight

    def loss(self, ids: Tensor) -> Tensor:
        return self.model.top(self.model.item(ids)).square().mean()  # type: ignore[no-any-return]

    def target(self, name: str) -> Any:
        match name:
            case "gradient":
                return self.weight.grad
            case "state":
                return self.optimizer.state[self.weight]["sum"]
            case "data":
                return self.weight.data
        return self.weight

    def left(self) -> list[Tensor]:
        """What the script would go on with."""
        state, grad = self.optimizer.state[self.weight]["sum"], self.weight.grad
        with torch.no_grad():
            return [self.weight.detach().clone(), state.clone() * 1, torch.zeros(0) if grad is None else whole(grad)]

    def goes_on(self) -> list[Tensor]:
        if self.weight.requires_grad:
            self.loss(torch.tensor([3, 9])).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return self.left()


def whole(grad: Tensor) -> Tensor:
    return torch.from_numpy(np.array(grad.numpy())) if not grad.is_sparse else grad.to_dense()


ARGUMENTS: tuple[Callable[[], tuple[Any, ...]], ...] = (
    lambda: (),
    lambda: (2,),
    lambda: (0.5,),
    lambda: (torch.ones(ROWS, DIM),),
    lambda: (torch.arange(ROWS)[:, None] > 3,),
    lambda: (torch.arange(ROWS)[:, None] > 3, 0.25),
    lambda: (0, torch.tensor([1, 4])),
    lambda: (0, torch.tensor([1, 4]), 0.5),
    lambda: (0, torch.tensor([1, 4]), torch.ones(2, DIM)),
    lambda: (0, torch.zeros(1, DIM, dtype=torch.long), 0.5),
    lambda: (0, torch.zeros(1, DIM, dtype=torch.long), torch.ones(1, DIM)),
    lambda: (0, 1),
    lambda: (0, 1, 2),
    lambda: (torch.ones(DIM),),
    lambda: (torch.ones(DIM, 2),),
    lambda: (torch.ones(ROWS, DIM), torch.ones(ROWS, DIM)),
    lambda: (torch.tensor([1, 4]),),
    lambda: (torch.tensor([1, 4]), 0.5),
    lambda: ((ROWS, DIM),),
    lambda: (lambda x: x,),
    lambda: (torch.float64,),
)
# of Python, of one object, of other devices, or of torch's own machinery
LEFT_OUT = frozenset(
    (
        *("__class__", "__dict__", "__dir__", "__doc__", "__init__", "__init_subclass__", "__module__", "__new__"),
        *(
            "__subclasshook__",
            "__weakref__",
            "__getattribute__",
            "__getattr__",
            "__setattr__",
            "__delattr__",
            "__hash__",
        ),
        *("__reduce__", "__getstate__", "__setstate__", "__sizeof__", "__torch_function__", "__torch_dispatch__"),
        *("_make_subclass", "_make_wrapper_subclass", "_make_dtensor", "as_subclass", "data_ptr", "_typed_storage"),
        *("storage", "untyped_storage", "storage_type", "share_memory_", "is_shared", "pin_memory", "is_pinned"),
        *("__dlpack__", "__dlpack_device__", "__cuda_array_interface__", "module_load", "__repr__", "__str__"),
        *("__format__", "_version", "_base", "_is_view", "_cdata", "retains_grad", "retain_grad", "backward", "_grad"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("set_", "resize_", "resize_as_", "resize", "resize_as", "_reduce_ex_internal", "_update_names", "rename_"),
        *("map_", "map2_", "_view_func", "_view_func_unsafe", "_rev_view_func_unsafe", "empty_like", "new_empty"),
        *("new_empty_strided", "new", "requires_grad_", "requires_grad", "swap_tensors", "_fix_weakref", "_use_count"),
        *(
            "__torch_dispatch__",
            "dim_order",
            "const_data_ptr",
            "grad_dtype",
            "_clear_non_serializable_cached_data",
            "__contains__",
        ),
    )
)
NAMES = sorted(
    name
    for name in dir(Tensor)
    if name not in LEFT_OUT and not name.startswith(("_", "is_", "sparse", "cuda", "xpu", "ipu", "mtia", "hpu", "to_"))
) + [f"__{name}__" for name in ("add", "iadd", "isub", "imul", "mul", "truediv", "neg", "matmul", "len", "pow", "eq")]


def outcome(act: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    try:
        return act()
    except RowcastError as error:
        return error


def call(target: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    method = getattr(target, name)
    return method(*arguments) if callable(method) else method


def arguments_of(name: str) -> Iterator[Callable[[], tuple[Any, ...]]]:
    """The first arguments that torch takes, if there are any."""
    for make in ARGUMENTS:
        try:
            call(torch.rand(ROWS, DIM), name, make())
        except Exception:  # noqa: BLE001 - torch has many
            continue
        yield make
        return


def plain(value: Any) -> Any:
    """A value to compare."""
    if isinstance(value, Tensor):
        whole = value.detach().to_dense().resolve_conj().resolve_neg().clone()
        is_half = whole.dtype in (torch.bfloat16, torch.complex32)
        return np.array(whole.to(torch.complex64 if whole.is_complex() else torch.float32) if is_half else whole)
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value if isinstance(value, int | float | str | bool | torch.dtype | torch.device | torch.Size) else None


def same(one: Any, other: Any) -> bool:
    one, other = plain(one), plain(other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        )
    return type(one) is type(other) and (one == other or one != one)


@pytest.mark.parametrize(
    ("kind", "takes_gradients"),
    [("parameter", True), *((kind, False) for kind in ("parameter", "gradient", "state", "data"))],
)
@pytest.mark.parametrize("share", range(SHARES if count(test=0, soak=1) else 1))
def test_each_method_has_torchs_meaning_or_is_refused(kind: str, takes_gradients: bool, share: int) -> None:
    others: list[str] = []
    counts = {"same": 0, "refused": 0}
    worlds: list[World] = []
    for name in NAMES[(share + sum(map(ord, kind))) % SHARES :: SHARES]:  # kinds begin at different names
        for make in arguments_of(name):
            worlds = worlds or [World(adopted=False), World(adopted=True)]
            before = worlds[0].left()

            def act(world: World) -> Any:
                with torch.set_grad_enabled(takes_gradients):
                    return call(world.target(kind), name, make())  # noqa: B023 - called here

            try:
                expected = outcome(lambda: act(worlds[0]))  # noqa: B023
            except Exception:  # noqa: BLE001 - not with gradients, say
                worlds = []
                continue
            try:
                got = outcome(lambda: act(worlds[1]))  # noqa: B023
                if isinstance(got, RowcastError):
                    counts["refused"] += 1
                    worlds = []
                    continue
                if not same(expected, got):
                    others.append(f"{name}: gives another value")
                elif not same(worlds[0].left(), left := worlds[1].left()):
                    others.append(f"{name}: leaves other values")
                else:
                    counts["same"] += 1
                    if same(before, left):
                        continue
                    ends = outcome(worlds[1].goes_on)
                    if not isinstance(ends, RowcastError) and not same(worlds[0].goes_on(), ends):
                        others.append(f"{name}: goes on with other values")
            except Exception as error:  # noqa: BLE001 - in torch's words
                others.append(f"{name}: {type(error).__name__}: {str(error)[:80]}")
            worlds = []
    assert others == [], counts
    assert counts["same"] > (0 if takes_gradients else counts["refused"])
