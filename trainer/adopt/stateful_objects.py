"""The script's own side of a checkpoint: whatever has state_dict and load_state_dict, and torch's random numbers.

adopted.<n>.<number>    tensors of the n-th object
adopted.structure       u8, JSON: what stands around them
random.cpu, ...         as in trainer/models/model_state.py
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from rowcast.runtime.errors import ConfigError, Mismatch
from rowcast.trainer.models.model_state import Tensors, random_state, restore_random

STRUCTURE = "adopted.structure"


class Stateful(Protocol):
    """A model, an optimizer, a schedule."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulObjects:
    def __init__(
        self,
        parts: Sequence[Stateful],
        device: torch.device,
        without_tables: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`without_tables`: within it the state of a model that holds the tables leaves them out."""
        for part in parts:
            if not all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"connect: dense holds a {type(part).__name__}; give objects with state_dict and load_state_dict"
                )
        self._parts = list(parts)
        self._device = device
        self._without_tables = without_tables

    def state(self) -> Tensors:
        tensors: Tensors = {}
        with self._without_tables():
            structure = [flattened(part.state_dict(), f"adopted.{n}", tensors) for n, part in enumerate(self._parts)]
        content = bytearray(json.dumps(structure).encode())
        return {**tensors, STRUCTURE: torch.frombuffer(content, dtype=torch.uint8), **random_state(self._device)}

    def restore(self, tensors: Tensors) -> None:
        """Raises Mismatch where these are not the states of such objects."""
        if STRUCTURE not in tensors:
            raise Mismatch(
                "the checkpoint has no dense side of a training script; connect with fresh=True, or `trainer run` goes on from it"
            )
        structure = json.loads(tensors[STRUCTURE].numpy().tobytes())
        if len(structure) != len(self._parts):
            raise Mismatch(
                f"the checkpoint has the state of {len(structure)} objects; connect was given dense = {len(self._parts)}"
            )
        with self._without_tables():
            for part, own in zip(self._parts, structure, strict=True):
                load(part, rebuilt(own, tensors))
        restore_random(self._device, tensors)


def load(part: Stateful, state: Any) -> None:
    """Raises Mismatch where the object is another than the one whose state it is."""
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError) as error:
        sentence = " ".join(str(error).split())
        raise Mismatch(
            f"the checkpoint's {type(part).__name__} is not this one: {sentence}; use the model that wrote it"
        ) from None


def flattened(value: Any, prefix: str, tensors: Tensors) -> Any:
    """JSON of nested state; its tensors go into `tensors`. Raises ConfigError for what can be neither."""
    if isinstance(value, Tensor):
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, flattened(own, prefix, tensors)] for key, own in value.items()]}
    if isinstance(value, list | tuple):
        return {
            type(value).__name__ if type(value) in (list, tuple) else "list": [
                flattened(own, prefix, tensors) for own in value
            ]
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"connect: the state of dense holds a {type(value).__name__}, which a checkpoint cannot; it takes tensors, numbers and text"
    )


def rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `flattened` was given."""
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: rebuilt(own, tensors) for key, own in content}
        case "list":
            return [rebuilt(own, tensors) for own in content]
        case "tuple":
            return tuple(rebuilt(own, tensors) for own in content)
        case _:
            return content
