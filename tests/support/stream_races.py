"""Finds two streams' work on one memory that no wait orders, while all of it runs at once and in one thread.

Each stream has a clock for every stream: how much of that one's work comes before its next. An event is a copy of them,
and a wait for it takes the later of each.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rowcast.trainer.device.streams import Event, PlainStream, Wait

Clocks = dict[str, int]


class Passed(Clocks):
    """Implements `streams.Event`: its work has run already."""

    def query(self) -> bool:
        return True


class Races(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which stream reads and writes the memory that torch takes under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = "loader"  # the name of torch's current stream
        self.found: list[str] = []
        self.clocks: defaultdict[str, Clocks] = defaultdict(lambda: defaultdict(int))
        # by address: the newest write, and the reads since, as streams and their own time
        self._used: dict[int, tuple[tuple[str, int], list[tuple[str, int]]]] = {}
        self._kept: list[Tensor] = []  # so that no address is used twice

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """These are not looked at: whoever uses them on another stream has awaited them."""
        for tensor in tensors:
            self._used.pop(address(tensor), None)

    def __exit__(self, *error: Any) -> None:
        self._kept.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, written = {*addresses((args, kwargs))}, {*addresses(list(changed(func, args, kwargs)))}
        if not written and any(own.alias_info is not None for own in func._schema.returns):
            return out  # a view
        here = self.current, self.clocks[self.current][self.current]
        for place in given & self._used.keys():
            writer, readers = self._used[place]
            before = [writer, *readers] if place in written else [writer]
            self.found += [
                f"{func} on {here[0]} after {stream}" for stream, at in before if not self._is_before(stream, at)
            ]
            self._used[place] = (here, []) if place in written else (writer, [*readers, here])
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and address(leaf) not in given:
                self._used[address(leaf)] = here, []
                self._kept.append(leaf)
        return out

    def _is_before(self, stream: str, at: int) -> bool:
        return self.clocks[self.current][stream] >= at or stream == self.current


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def addresses(tree: Any) -> Iterator[int]:
    return (address(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


class ClockedStream(PlainStream):
    """Torch's current stream, as a script's CUDA streams take it; can omit a named wait."""

    def __init__(self, races: Races, without: Wait | None) -> None:
        self._races, self._without = races, without

    def record(self) -> Event:
        own = self._races.clocks[self._races.current]
        event = Passed(own)
        own[self._races.current] += 1
        return event

    def wait(self, event: Event, why: Wait) -> None:
        own = self._races.clocks[self._races.current]
        if why != self._without and isinstance(event, Passed):
            for stream, at in event.items():
                own[stream] = max(own[stream], at)
