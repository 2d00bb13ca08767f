"""Saves and restores the states of objects that a user's code gives: optimizers, schedules, averages, counters.

<prefix>.<n>.<number>    tensors of the n-th object, by state_dict and load_state_dict
<prefix>.structure       u8, JSON: the nesting around the tensors
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowcast.runtime.errors import ConfigError, Mismatch


class Stateful(Protocol):
    """A model, an optimizer, a learning-rate schedule."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulObjects:
    def __init__(self, parts: Sequence[Stateful], prefix: str, source: str) -> None:
        """`prefix`: of the tensors' names. `source`: where the user gave the objects, for errors. Raises
        ConfigError."""
        for part in parts:
            if not all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"{source} holds a {type(part).__name__}; give objects with state_dict and load_state_dict"
                )
        self.parts = list(parts)
        self._prefix, self._structure, self._source = prefix, f"{prefix}.structure", source

    def state(self) -> dict[str, Tensor]:
        """Raises ConfigError for a state that a checkpoint cannot hold."""
        tensors: dict[str, Tensor] = {}
        structure = [flattened(own.state_dict(), f"{self._prefix}.{n}", tensors) for n, own in enumerate(self.parts)]
        content = bytearray(json.dumps(structure).encode())
        return {**tensors, self._structure: torch.frombuffer(content, dtype=torch.uint8)}

    def restore(self, tensors: dict[str, Tensor]) -> bool:
        """Returns whether the tensors have states of objects. Raises Mismatch if these are not of these objects."""
        if self._structure not in tensors:
            return False
        structure = json.loads(tensors[self._structure].numpy().tobytes())
        if len(structure) != len(self.parts):
            raise Mismatch(
                f"the checkpoint has the state of {len(structure)} objects, but {self._source} has {len(self.parts)}"
            )
        for part, part_structure in zip(self.parts, structure, strict=True):
            state = rebuilt(part_structure, tensors)
            try:
                part.load_state_dict(state)
            except (RuntimeError, ValueError, LookupError) as error:
                sentence = " ".join(str(error).split())
                raise Mismatch(
                    f"the checkpoint's {type(part).__name__} is not this one: {sentence}; use the model that wrote it"
                ) from None
        return True


def flattened(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
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
        f"the state of an object holds a {type(value).__name__}, which a checkpoint cannot; it takes tensors, numbers "
        "and text"
    )


def rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that `flattened` was given."""
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
