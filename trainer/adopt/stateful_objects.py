"""Saves and restores the script's own objects, by state_dict and load_state_dict, and torch's random state.

adopted.<n>.<number>    tensors of the n-th object
adopted.structure       u8, JSON: the nesting around the tensors
random.cpu, ...         as in trainer/models/model_state.py
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from rowcast.runtime.errors import ConfigError, Mismatch
from rowcast.trainer.models.model_state import Tensors, random_state, restore_random

STRUCTURE = "adopted.structure"


class Stateful(Protocol):
    """A model, an optimizer, a learning-rate schedule."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulObjects:
    def __init__(
        self,
        parts: Sequence[Stateful],
        device: torch.device,
        without_tables: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`without_tables`: a context in which a model's state omits the tables."""
        for part in parts:
            if not all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"connect: dense holds a {type(part).__name__}; give objects with state_dict and load_state_dict"
                )
        self.parts = list(parts)
        self._device = device
        self._without_tables = without_tables

    def state(self) -> Tensors:
        tensors: Tensors = {}
        with self._without_tables():
            structure = [flattened(part.state_dict(), f"adopted.{n}", tensors) for n, part in enumerate(self.parts)]
        content = bytearray(json.dumps(structure).encode())
        return {**tensors, STRUCTURE: torch.frombuffer(content, dtype=torch.uint8), **random_state(self._device)}

    def restore(self, tensors: Tensors) -> None:
        """Raises Mismatch if the tensors are not the states of these objects."""
        if STRUCTURE not in tensors:
            raise Mismatch(
                "the checkpoint has no state of a training script; connect with fresh=True, or continue it by "
                "`trainer run`"
            )
        structure = json.loads(tensors[STRUCTURE].numpy().tobytes())
        if len(structure) != len(self.parts):
            raise Mismatch(
                f"the checkpoint has the state of {len(structure)} objects, but connect was given "
                f"{len(self.parts)} as dense"
            )
        with self._without_tables():
            for part, part_structure in zip(self.parts, structure, strict=True):
                state = rebuilt(part_structure, tensors)
                try:
                    part.load_state_dict(state)
                except (RuntimeError, ValueError, LookupError) as error:
                    sentence = " ".join(str(error).split())
                    raise Mismatch(
                        f"the checkpoint's {type(part).__name__} is not this one: {sentence}; use the model that wrote "
                        "it"
                    ) from None
        restore_random(self._device, tensors)


def flattened(value: Any, prefix: str, tensors: Tensors) -> Any:
    """Nested state as JSON; moves its tensors to `tensors`. Raises ConfigError for a value that is neither."""
    if isinstance(value, Tensor):
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[key, flattened(entry, prefix, tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if type(value) is tuple else "list"
        return {kind: [flattened(entry, prefix, tensors) for entry in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"connect: the state of dense holds a {type(value).__name__}, which a checkpoint cannot; it takes tensors, "
        "numbers and text"
    )


def rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict" | "counter":
            entries = {key: rebuilt(entry, tensors) for key, entry in content}
            return Counter(entries) if kind == "counter" else entries  # MultiStepLR calls a Counter's `elements`
        case "list":
            return [rebuilt(entry, tensors) for entry in content]
        case "tuple":
            return tuple(rebuilt(entry, tensors) for entry in content)
        case _:
            return content
