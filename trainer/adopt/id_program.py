"""Finds the ids of a coming batch: records what one step computes between batch and look-ups, and runs that again.

batch -> leaves -> operations that the ids need -> ids of look-up 0, 1, ... (or why they cannot be known)

A program is a hint: its ids are compared with those of the step, so a wrong one costs a fetch on demand and no row.
It runs on the host, never draws a random number, never reads rows or weights, and leaves its batch as it is.

The operations are nodes of a `torch.fx.Graph`. A value is identified by its storage and its place in it: views,
`detach` and NumPy's views of a tensor are the same memory, and a program repeats writes into it in order. Values that
depend on rows, weights or random draws are *unknown*. They are not kept, nor are the activations of the step.

Torch shows sizes as plain integers. One that equals a size of the batch, or a number that the step has read from a
tensor of the batch (`len`, `item`, `tolist`), is taken for it, and is read again in each batch.
"""

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rowcast.trainer.adopt.row_gradient import RowGradient

MANY = 8  # a longer list of lists or arrays is one array: samples. A shorter one is a structure: fields
MOST_DEPTH = 8  # of objects within a batch
MOST_PARTS = 20_000  # we read this many objects of a batch; more would belong to its data set, or the like
MOST_FLOATS = 4096  # of a constant such as the boundaries of buckets; larger ones are states of the model
MOST_COLUMNS = 256  # of a leaf that are compared one by one
FEW_CASTS = 4  # columns of a matrix that are cast at once; fewer are cast one by one
MOST_LISTED = 4096  # elements of a list of sizes
LARGEST = 1 << 24  # a size read from a batch counts as at most this, so that a wrong one cannot take all memory
MOST_RECORDED = 100_000  # operations: a script whose loop was left in the middle stays in its recording

aten = torch.ops.aten
HOST = torch.device("cpu")
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class TableKey:
    """Stands for a table in reading ahead, which outlives tables."""

    name: str
    num_embeddings: int


@dataclass(frozen=True)
class Leaves:
    """The arrays of a batch. Batches of one form share a program."""

    form: tuple[Hashable, ...]  # structure, strings, dtypes, and all dimensions but the first
    tensors: tuple[Tensor, ...]  # of NumPy arrays: tensors that share their memory


def leaves_of(batch: object) -> Leaves:
    """Finds arrays in dicts, sequences, dataclasses and other objects; lists of numbers are arrays too."""
    form: list[Hashable] = []
    tensors: list[Tensor] = []

    def visit(value: Any, around: tuple[int, ...]) -> None:
        if len(form) >= MOST_PARTS:
            return
        if value is None or isinstance(value, str | bool):
            form.append(value)
        elif (array := as_array(value)) is not None:
            form.append((array.dtype, array.dim(), array.shape[1:]))
            tensors.append(array)
        else:
            parts = parts_of(value) if id(value) not in around and len(around) < MOST_DEPTH else {}
            form.append((type(value), tuple(parts)))
            for part in parts.values():
                visit(part, (*around, id(value)))

    visit(batch, ())
    return Leaves(tuple(form), tuple(tensors))


def as_array(value: Any) -> Tensor | None:
    """Returns the value as a tensor, which shares its memory if possible, or None if it is not an array of numbers."""
    if isinstance(value, Tensor):
        return value.detach() if value.layout is torch.strided and not value.is_quantized else None
    try:
        if isinstance(value, list | tuple) and value:
            is_samples = len(value) > MANY and isinstance(value[0], list | tuple | np.ndarray)
            if is_samples or isinstance(value[0], int | float | np.number):
                value = np.array(value)
        if isinstance(value, np.ndarray):
            is_plain = value.flags.writeable and min(value.strides, default=0) >= 0
            return torch.from_numpy(value if is_plain else value.copy())
    except (ValueError, TypeError, RuntimeError):
        pass  # samples of several lengths, or a dtype that torch lacks
    return None


def parts_of(value: Any) -> Mapping[Hashable, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return {} if value and isinstance(value[0], str) else dict(enumerate(value))  # no names of samples
    if callable(value) or isinstance(value, Tensor | np.ndarray):
        return {}
    names: Any = getattr(value, "__dict__", None) or getattr(value, "__slots__", ())
    parts = {name: getattr(value, name, None) for name in names}
    return {name: part for name, part in parts.items() if not callable(part)}


@dataclass(frozen=True)
class Unknown:
    """Why no program can know a value. `because` ends the sentence "its ids depend on"."""

    because: str


@dataclass(eq=False)
class KnownStorage:
    """What is known of a storage."""

    values: dict[Hashable, Node] = field(default_factory=dict)  # by `place` of a tensor
    constants: list[str] = field(default_factory=list)  # those that share the storage with the script
    unknown: Unknown | None = None
    is_of_batch: bool = False  # holds something of the batch
    is_changed: bool = False  # by an operation that is recorded


@dataclass(frozen=True)
class LookUp:
    table: TableKey
    ids: Node | Unknown
    trains: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the step of one batch as a graph: operations on known values while it is entered, and look-ups."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets what the script has compiled run unchanged, without recording it."""
        return True

    def __init__(self, leaves: Leaves) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.look_ups: list[LookUp] = []
        self.constants: dict[str, Tensor] = {}
        self._memories: WeakKeyDictionary[torch.UntypedStorage, KnownStorage] = WeakKeyDictionary()
        self._leaves = leaves.tensors
        self.inputs = [self._know(leaf, self.graph.placeholder(f"leaf{at}")) for at, leaf in enumerate(self._leaves)]
        self._read: dict[int | tuple[int, ...], Node] = {}  # numbers and lists that the step has read, and their sums
        self._sizes: dict[int, Node] = {}  # first dimensions, which vary from batch to batch
        for leaf, node in zip(self._leaves, self.inputs, strict=True):
            memory_of(node).is_of_batch = True
            if leaf.dim() and leaf.shape[0] > 1:
                self._sizes.setdefault(leaf.shape[0], self.graph.call_method("size", (node, 0)))

    def note_list(self, tensor: Tensor, numbers: list[int]) -> None:
        """Call where the step has read the numbers of a tensor [n]."""
        memory = self._memory(tensor)
        known = memory.values.get(place(tensor)) if memory.is_of_batch and memory.unknown is None else None
        if known is not None and len(numbers) <= MOST_LISTED and not tensor.is_floating_point():
            self._read[tuple(numbers)] = self.graph.call_method("tolist", (known,))
            ends = self.graph.call_method("tolist", (self.graph.call_method("cumsum", (known, 0)),))
            for at, end in enumerate(accumulate(numbers)):  # of the slices that the list cuts
                self._note_number(end, self.graph.call_function(operator.getitem, (ends, at)))

    def _note_number(self, number: int, node: Node) -> None:
        if 1 < number <= LARGEST:
            self._read[number] = self.graph.call_function(min, (node, LARGEST))

    def has_made(self, ids: Tensor) -> bool:
        """Whether the ids are known to depend on the batch. Call outside the recording mode."""
        node = self._find(ids.detach(), "the look-up")
        return isinstance(node, Node) and memory_of(node).is_of_batch

    def note(self, table: TableKey, ids: Tensor) -> None:
        """Call where the step looks up `ids`, outside of the recording mode."""
        node = self._find(ids.detach(), "the look-up")
        if isinstance(node, Node):
            node = self.graph.call_function(torch.clone, (node,))  # the step may write into them later
        self.look_ups.append(LookUp(table, node, torch.is_grad_enabled()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if RowGradient in types:  # no ids come from gradients
            return func(*args, **kwargs)
        changed = [self._memory(tensor) for tensor in written(func, args, kwargs)]
        inputs = self._inputs_of(func, args, kwargs)
        for memory in changed:  # the numbers of constants are those before
            for name in memory.constants:
                self.constants[name] = self.constants[name].clone()
            memory.constants.clear()
        result = func(*args, **kwargs)
        if isinstance(inputs, Unknown):
            made = [self._memory(tensor) for tensor in tensors_of(result)]
            for memory in changed + [memory for memory in made if not memory.values]:
                memory.unknown = inputs
        else:
            self._record(func, *inputs, changed, result)
        return result

    def _inputs_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | Unknown:
        """Returns the arguments as nodes and on the host, or why the results are unknown."""
        if not isinstance(func, OpOverload):
            return Unknown(f"what {func} computes")
        unknown: list[Unknown] = []

        def found(value: Any) -> Any:
            if isinstance(value, torch.device):
                return HOST
            known = self._find(value, str(func)) if isinstance(value, Tensor) else value
            if isinstance(known, Unknown):
                unknown.append(known)
            return known

        inputs: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(found, (args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            unknown.append(Unknown(f"a random draw in the step ({func})"))
        if len(self.graph.nodes) >= MOST_RECORDED:
            unknown.append(Unknown(f"more than {MOST_RECORDED:,} operations"))
        return unknown[0] if unknown else inputs

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], changed: list[KnownStorage], result: Any
    ) -> None:
        node = self._added(func, args, kwargs)
        node.meta["writes"] = changed
        made = []
        for at, made_one in enumerate(result if isinstance(result, tuple | list) else [result]):
            if isinstance(made_one, Tensor):
                value = node if made_one is result else self.graph.call_function(operator.getitem, (node, at))
                made.append(memory_of(self._know(made_one, value)))
        is_of_batch = any(memory_of(given).is_of_batch for given in node.all_input_nodes)
        if is_of_batch and type(result) is int:
            self._note_number(result, node)
        if is_of_batch and torch.Tag.dynamic_output_shape in func.tags and isinstance(result, Tensor) and result.dim():
            self._note_number(result.shape[0], self.graph.call_method("size", (node, 0)))
        for memory in changed + made:
            memory.is_of_batch |= is_of_batch
        for memory in changed:
            memory.is_changed = True

    def _added(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Returns the operation as a node, with integers that follow the batch size, and a quicker call if any."""
        given = list(args)
        if func in RESHAPES:
            given[1] = self._first_deduced(given[1])
        else:
            makes = not any(isinstance(leaf, Node) for leaf in tree_leaves((args, kwargs)))  # `arange(batch size)`
            for at, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
                if makes or is_size(argument):
                    given[at] = self._sized(value)
        if func is aten.slice.Tensor and len(given) == 4 and isinstance(given[2], Node):
            given[3], length = self._read.get(args[3], given[3]), self._sized(args[3] - args[2])
            if type(given[3]) is int and isinstance(length, Node):
                given[3] = self._read[args[3]] = self.graph.call_function(operator.add, (given[2], length))
        if func is aten.select.int:
            return self.graph.call_method("select", tuple(given))
        if func is aten.slice.Tensor and len(given) == 4 and given[1] >= 0:
            part = (*[slice(None)] * given[1], slice(given[2], given[3]))
            return self.graph.call_function(operator.getitem, (given[0], part))
        if func is aten._to_copy.default:
            wanted = {name: value for name, value in kwargs.items() if name in ("dtype", "device", "memory_format")}
            return self._copy(given[0], **wanted)
        return self.graph.call_function(func, tuple(given), kwargs)

    def _sized(self, value: Any) -> Any:
        if isinstance(value, list) and tuple(value) in self._read:
            return self._read[tuple(value)]
        return tree_map(
            lambda number: self._sizes.get(number) or self._read.get(number, number) if type(number) is int else number,
            value,
        )

    def _first_deduced(self, shape: Sequence[Any]) -> list[Any]:
        """`shape` with -1 for the first dimension that is a multiple of a batch size."""
        follows = [bool(dimension) and any(dimension % size == 0 for size in self._sizes) for dimension in shape]
        if -1 in shape or True not in follows:
            return list(shape)
        return [*shape[: follows.index(True)], -1, *shape[follows.index(True) + 1 :]]

    def _memory(self, tensor: Tensor) -> KnownStorage:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return KnownStorage(unknown=Unknown(f"a {type(tensor).__name__}"))
        return self._memories.setdefault(storage, KnownStorage())

    def _know(self, tensor: Tensor, node: Node) -> Node:
        memory = node.meta["memory"] = self._memory(tensor)
        if memory.unknown is None:  # a sparse tensor has no place
            memory.values[place(tensor)] = node
        return node

    def _find(self, tensor: Tensor, reader: str) -> Node | Unknown:
        """`reader`: the operation that reads the tensor."""
        memory = self._memory(tensor)
        if memory.unknown is not None:
            return memory.unknown
        if (known := memory.values.get(place(tensor))) is not None:
            return known
        if tensor.requires_grad:
            return Unknown(f"rows of a table or trained weights ({reader})")
        if (node := self._from_batch(tensor)) is not None:
            memory_of(self._know(tensor, node)).is_of_batch = True
            return node
        if tensor.is_floating_point() and tensor.numel() > MOST_FLOATS:
            return Unknown(f"numbers that are not in the batch ({reader})")
        name = f"constant{len(self.constants)}"
        self.constants[name] = tensor.detach()
        memory.constants.append(name)
        return self._know(tensor, self.graph.create_node("get_attr", name))

    def _from_batch(self, tensor: Tensor) -> Node | None:
        """Identifies a tensor that no operation made: a view of a leaf, or by its values a leaf or a column."""
        leaves = list(zip(self._leaves, self.inputs, strict=True))
        for leaf, node in leaves:
            if leaf.dtype == tensor.dtype and leaf.device == tensor.device and tensor.numel():
                elements, rest = divmod(tensor.data_ptr() - leaf.data_ptr(), leaf.element_size())
                if not rest and elements >= 0 and elements + span(tensor) <= span(leaf):
                    self._memories[tensor.untyped_storage()] = memory_of(node)
                    shape, strides = self._sized(list(tensor.shape)), self._sized(list(tensor.stride()))
                    return self.graph.call_function(view_within, (node, shape, strides, elements))
        host = tensor.detach().cpu()
        for leaf, node in leaves:
            if not host.dim() or not host.numel() or leaf.shape[0:1] != host.shape[0:1]:
                continue
            if leaf.shape == host.shape and torch.equal(leaf.cpu().to(host.dtype), host):
                return self._copy(node, dtype=host.dtype)
            if leaf.dim() == 2 and leaf.shape[1] <= MOST_COLUMNS and host.dim() == 1:
                equal = (leaf.cpu().to(host.dtype) == host[:, None]).all(0)
                if equal.any():
                    index = int(equal.nonzero()[0])
                    return self._copy(self.graph.call_method("select", (node, 1, index)), dtype=host.dtype)
        return None

    def _copy(self, node: Node, **wanted: Any) -> Node:
        return self.graph.call_method("to", (node,), {**wanted, "copy": True})


def memory_of(node: Node) -> KnownStorage:
    """Returns the memory of a value; a batch size has none."""
    memory: KnownStorage = node.meta.get("memory") or KnownStorage()
    return memory


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation changes."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    names = [
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return tensors_of([given.get(name) for name in names])


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype  # an empty one has no address


def span(tensor: Tensor) -> int:
    """The number of elements from its first to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0


def is_size(argument: Any) -> bool:
    """Whether an operation uses it as a number of elements, rather than as a dimension or a value."""
    kind = argument.real_type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() == "SymIntType" and argument.name not in ("index", "step")


def view_within(leaf: Tensor, shape: Sequence[int], strides: Sequence[int], elements: int) -> Tensor:
    return leaf.as_strided(shape, strides, leaf.storage_offset() + elements)


class Program:
    """From the leaves of a batch to the ids of each look-up of its step, in the order of the look-ups."""

    def __init__(self, recorder: Recorder, *, is_alone: bool) -> None:
        """is_alone: no other batch was in use, so ids that do not depend on this batch belong to its step too."""
        graph = recorder.graph
        self.look_ups = [resolved(look_up, is_alone) for look_up in recorder.look_ups]
        graph.output(tuple(look_up.ids for look_up in self.look_ups if isinstance(look_up.ids, Node)))
        cast_once(graph)
        erase_unneeded(graph)
        calls = [node for node in graph.nodes if node.op.startswith("call")]
        constants = [node for node in graph.nodes if node.op == "get_attr"]
        self.num_operations, self.num_constants = len(calls), len(constants)
        self._inputs = [at for at, node in enumerate(recorder.inputs) if node.users]
        shown = {memory_of(look_up.ids) for look_up in self.look_ups if isinstance(look_up.ids, Node)}
        for node in [*constants, *(recorder.inputs[at] for at in self._inputs)]:
            if memory_of(node).is_changed or memory_of(node) in shown:  # the step's writes, and the script's later ones
                with graph.inserting_after(node):
                    copied = graph.call_function(torch.clone)
                node.replace_all_uses_with(copied)
                copied.args = (node,)
        tensors = {name: tensor.cpu() for name, tensor in recorder.constants.items()}
        self._function = GraphModule(tensors, graph).forward
        self.is_known = [isinstance(look_up.ids, Node) for look_up in self.look_ups]
        self.trains = any(look_up.trains for look_up in self.look_ups)

    def run(self, leaves: Leaves) -> list[tuple[TableKey, Tensor | Unknown]]:
        """Returns the ids of each look-up, i32 or i64 on the host as the step has them, or why they are unknown.

        `leaves`: of a batch of the program's form."""
        try:
            with torch.inference_mode():
                outputs = iter(self._function(*(leaves.tensors[at].cpu() for at in self._inputs)))
            return [
                (look_up.table, next(outputs) if isinstance(look_up.ids, Node) else look_up.ids)
                for look_up in self.look_ups
            ]
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            why = Unknown(f"more than its first batch shows ({type(error).__name__}: {' '.join(str(error).split())})")
            return [(look_up.table, why) for look_up in self.look_ups]


def resolved(look_up: LookUp, is_alone: bool) -> LookUp:
    """Returns ids, without a copy if they need no change; unknown if they may be another batch's."""
    if isinstance(look_up.ids, Unknown):
        return look_up
    (ids,) = look_up.ids.all_input_nodes
    memory = memory_of(ids)
    if not memory.is_of_batch and not (is_alone and look_up.trains):
        why = "something else than the batch, or what Python or NumPy computes from it"
        return LookUp(look_up.table, Unknown(why), look_up.trains)
    return LookUp(look_up.table, look_up.ids if memory.is_changed else ids, look_up.trains)


def erase_unneeded(graph: Graph) -> None:
    """Keeps the operations that the ids need, and those that write into the memory of these."""
    memories: set[KnownStorage] = set()
    for node in reversed(graph.nodes):
        if node.users or node.op == "output" or not memories.isdisjoint(node.meta.get("writes", ())):
            memories.update(memory_of(given) for given in node.all_input_nodes)
        else:
            graph.erase_node(node)


def cast_once(graph: Graph) -> None:
    """Casts a matrix once instead of each of its columns."""
    casts: dict[Hashable, Node] = {}
    for node in graph.find_nodes(op="call_method", target="to"):
        (view,) = node.all_input_nodes
        if view.target not in ("select", operator.getitem) or len(view.all_input_nodes) > 1:
            continue
        (matrix,) = view.all_input_nodes
        if memory_of(view) is not memory_of(matrix) or memory_of(matrix).is_changed or memory_of(node).is_changed:
            continue
        kind = (matrix, *node.kwargs.items())
        if kind not in casts and len(matrix.users) >= FEW_CASTS:
            with graph.inserting_after(matrix):
                casts[kind] = graph.call_method("to", (matrix,), node.kwargs)
        if kind in casts:
            with graph.inserting_before(node):
                column = graph.node_copy(view)
            column.replace_input_with(matrix, casts[kind])
            node.replace_all_uses_with(column)
