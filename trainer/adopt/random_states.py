"""Random states of a script that saves itself, and loops over batches that begin within an epoch.

the loop begins         states A, of the script and of the loader
n batches, n steps
save                    keeps A and the states B of now
restore                 sets B
ahead(loader, skip=n)   sets A, passes n batches over, and sets B: so a shuffle is drawn again as it was
"""

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rowcast.runtime.errors import ConfigError

States = dict[str, Any]  # of generators of random numbers, by name
StateOf = tuple[Callable[[], Any], Callable[[Any], object]]  # gets and sets it
MOST_PARTS = 1000  # we search this many parts of a loader for generators
NO_LOOP = -1  # of `skip`: the loop is not one that saves go on in
NUMPY = "numpy.random"


def generators_of(owned: Sequence[torch.Generator]) -> Iterator[tuple[str, StateOf]]:
    """Returns the generators that loader and step may share, by name. `owned`: the loader's own."""
    named = {"torch": torch.default_generator}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        of_device = getattr(torch.get_device_module(device), "default_generators", ())
        named |= {f"torch on {device}:{index}": generator for index, generator in enumerate(of_device)}
    named |= {f"the loader's torch.Generator {index}": generator for index, generator in enumerate(owned)}
    for name, generator in named.items():
        yield name, (generator.get_state, generator.set_state)
    yield NUMPY, (lambda: np.random.get_state(legacy=False), np.random.set_state)
    yield "random", (random.getstate, random.setstate)


def owned_by(batches: Any) -> list[torch.Generator]:
    """Yields the generators of a loader and of its parts: samplers, wrappers, data sets."""
    generators: list[torch.Generator] = []
    seen, left = set[int](), [batches]
    while left and len(seen) < MOST_PARTS:
        owner = left.pop(0)
        if id(owner) in seen or isinstance(owner, Tensor | type | ModuleType | torch.nn.Module):
            continue
        seen.add(id(owner))
        if isinstance(owner, torch.Generator):
            generators.append(owner)
        left += getattr(owner, "__dict__", {}).values()
    return generators


def refuse_begun(batches: Any) -> None:
    """Raises ConfigError for an iterator made before the loop begins: it may have drawn numbers already."""
    if isinstance(batches, enumerate | zip | map | filter | _BaseDataLoaderIter):
        name = type(batches).__name__
        raise ConfigError(
            f"ahead(skip=...) was given {'an' if name[0] in 'e' else 'a'} {name}, which has begun its loader; give the "
            "loader itself, as in enumerate(rowcast.ahead(loader, skip=n))"
        )


def states_of(owned: Sequence[torch.Generator]) -> States:
    return {name: state() for name, (state, _) in generators_of(owned)}


def set_states(states: Mapping[str, Any], owned: Sequence[torch.Generator]) -> None:
    """Raises ConfigError if a generator is gone."""
    generators = dict(generators_of(owned))
    if missing := [name for name in states if name not in generators]:
        raise ConfigError(f"the save has the state of {missing[0]}, which this script does not have; make it as it was")
    for name, state in states.items():
        generators[name][1](state)


class LoopedLoader(Iterable[Any]):
    """A loader whose loops begin in another way."""

    def __init__(self, batches: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._batches, self._begin = batches, begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._batches)


class Loops:
    """The loops over `ahead(batches, skip=...)` of a script."""

    def __init__(self) -> None:
        self._begun: States = {}  # at the beginning of the newest loop
        self._owned: list[weakref.ref[torch.Generator]] = []  # of its loader
        self._saved: tuple[States, States] = {}, {}  # of a save, until a loop goes on from there: A and B

    def states(self) -> tuple[States, States]:
        """A and B."""
        owned = [generator for of in self._owned if (generator := of()) is not None]
        return self._begun, states_of(owned)

    def restore(self, begun: States, now: States) -> None:
        self._saved = begun, now
        known = dict(generators_of(()))
        set_states({name: state for name, state in now.items() if name in known}, ())

    def over(self, batches: Any, skip: int, plain: Callable[[], AbstractContextManager[None]]) -> LoopedLoader:
        """Batches whose first loop begins after `skip` of them. `plain`: a context in which loaders are not read
        ahead."""
        skips = [skip]

        def begin(batches: Any) -> Iterator[Any]:
            with plain():
                return self.begin(batches, skips.pop() if skips else 0)

        return LoopedLoader(batches, begin)

    def begin(self, batches: Any, skip: int) -> Iterator[Any]:
        """The rest of a loop that has had `skip` batches. Raises ConfigError."""
        owned, (begun, now) = owned_by(batches), self._saved
        self._saved = {}, {}
        if skip and now and not begun:
            raise ConfigError(
                f"ahead(skip={skip}): the save was made in no loop over rowcast.ahead(batches, skip=...), whose random "
                "states at its beginning it would need; save within such a loop, or go on with skip=0"
            )
        set_states(begun if skip else now, owned)
        self._begun, self._owned = states_of(owned), [weakref.ref(generator) for generator in owned]
        rest: Iterator[Any] = iter(batches)
        for _ in islice(rest, skip):
            pass
        if skip:
            set_states(now, owned)
        return rest


def packed(states: States) -> States:
    """Returns a state as tensors, numbers and text."""
    of_numpy = states.get(NUMPY)
    if of_numpy is None:
        return states
    key = torch.from_numpy(of_numpy["state"]["key"].astype(np.int64))
    return {**states, NUMPY: {**of_numpy, "state": {**of_numpy["state"], "key": key}}}


def unpacked(states: States) -> States:
    of_numpy = states.get(NUMPY)
    if of_numpy is None:
        return states
    key: Tensor = of_numpy["state"]["key"]
    return {**states, NUMPY: {**of_numpy, "state": {**of_numpy["state"], "key": key.numpy().astype(np.uint32)}}}
