"""Saves and restores a checkpoint's model state, everything outside the tables, as safetensors.

    model.<name>                weights and buffers, under the model's own names
    optimizer.<name>.<state>    of the dense optimizer
    objects.<n>..., .structure  of a model with a step of its own, its `training_objects`
    random.cpu, random.<type>   u8, torch's random state
    metrics.<count>             of an evaluation in progress
    losses                      f32 [train steps], of the whole run
    evaluations                 u8, the results so far as JSON

An imported file may hold only weights; the rest starts as in a new run.

Saves and restores the states of objects that a user's code gives: optimizers, schedules, averages, counters.

<prefix>.<n>.<number>    tensors of the n-th object, by state_dict and load_state_dict
<prefix>.structure       u8, JSON: the nesting around the tensors
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rowcast.protocol.messages import DensePiece
from rowcast.runtime.errors import ConfigError, DataError, Diverged, Mismatch, RemoteProtocolError
from rowcast.trainer.device.cuda import device_random_state, set_device_random_state


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
        structure = [
            flattened(part.state_dict(), f"{self._prefix}.{n}", tensors, type(part).__name__)
            for n, part in enumerate(self.parts)
        ]
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
            except Exception as error:  # noqa: BLE001 - whatever a user's code raises
                sentence = " ".join(f"{type(error).__name__}: {error}".split())
                raise Mismatch(
                    f"the checkpoint's {type(part).__name__} is not this one: {sentence}; use the model that wrote it"
                ) from None
        return True


def flattened(value: Any, prefix: str, tensors: dict[str, Tensor], kind: str) -> Any:
    """Returns the nested state of an object of type `kind` as JSON, and moves its tensors to `tensors`. Raises
    ConfigError for a value that is neither."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        if others := [key for key in value if key is not None and not isinstance(key, bool | int | float | str)]:
            raise ConfigError(
                f"the state of {kind} holds a dictionary with the key {others[0]!r}, which a checkpoint cannot; its "
                "keys are numbers and text"
            )
        nesting = "counter" if isinstance(value, Counter) else "dict"
        return {nesting: [[key, flattened(entry, prefix, tensors, kind)] for key, entry in value.items()]}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # a namedtuple would come back as another
        nesting = "tuple" if type(value) is tuple else "list"
        return {nesting: [flattened(entry, prefix, tensors, kind) for entry in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"the state of {kind} holds a {type(value).__name__}, which a checkpoint cannot; it takes tensors, numbers "
        "and text"
    )


def rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that `flattened` took."""
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


Tensors = dict[str, Tensor]

STATES = {
    "SGD": {"momentum_buffer"},
    "Adagrad": {"step", "sum"},
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
}  # torch.optim's states of each kind


def pack(tensors: Tensors) -> bytes:
    # contiguous copies on the host in separate memory, as safetensors requires even for tied weights
    layout = torch.contiguous_format
    return save({name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()})


@contextmanager
def readable() -> Iterator[None]:
    """Turns every error of reading and restoring a model state into DataError."""
    try:
        yield
    except (SafetensorError, RuntimeError, LookupError, TypeError, ValueError, OverflowError) as error:
        sentence = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(
            f"the model state of the checkpoint cannot be read ({sentence}); run `rowcast verify` on the run directory"
        ) from None


def unpack(content: bytes) -> Tensors:
    """Raises DataError."""
    with readable():
        return load(content)


def saved_and_restored(name: str, save: Callable[[], Tensors], restore: Callable[[Tensors], object]) -> str:
    """Saves a state, restores it and saves it again. Returns its checksum; raises ConfigError, which has its name."""
    try:
        content = pack(save())
        checksum = xxhash.xxh3_64_hexdigest(content)
        restore(unpack(content))
        del content  # a checkpoint needs no more memory than this
        if xxhash.xxh3_64_hexdigest(pack(save())) == checksum:
            return checksum
        error = "load_state_dict() does not restore what state_dict() has returned"
    except Exception as raised:  # noqa: BLE001 - whatever a user's code raises
        error = " ".join(f"{type(raised).__name__}: {raised}".split())
    raise ConfigError(f"{name} cannot be saved and restored, so no run could continue ({error})")


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Returns the tensors whose names begin with the prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class ModelStatePieces:
    """Joins the pieces of a model state as they arrive; `order.py` has checked their order."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, message: DensePiece, payload: memoryview) -> bytes | None:
        """Returns the whole content with the last piece, else None. Raises RemoteProtocolError at a wrong checksum."""
        self._content += payload
        if message.piece < message.num_pieces - 1:
            return None
        checksum = xxhash.xxh3_64_intdigest(self._content)
        if checksum != message.checksum:
            raise RemoteProtocolError(
                f"the model state has checksum {checksum:016x}; {message.checksum:016x} was announced"
            )
        return bytes(self._content)


def model_state(model: nn.Module) -> Tensors:
    state = model.state_dict()
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ConfigError(
            f"{others[0]} is a {type(state[others[0]]).__name__}, and the state of a model has only tensors; return a "
            "tensor from get_extra_state(), or keep this in one of the model's training_objects()"
        )
    return {f"model.{name}": tensor for name, tensor in state.items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    names = [name for name, _ in model.named_parameters()]
    return {
        f"optimizer.{names[index]}.{key}": value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if value is not None
    }


def trained_tensors(parts: Iterable[Stateful]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that training must leave finite: trained parameters of the models among `parts`, and the state
    of optimizers and other objects among them. Leaves out buffers and frozen parameters: a mask may hold infinities."""
    names: dict[Tensor, str] = {}
    for part in parts:
        if isinstance(part, nn.Module):
            names |= {
                parameter: f"dense parameter {name}"
                for name, parameter in part.named_parameters()
                if parameter.requires_grad
            }
        elif isinstance(part, torch.optim.Optimizer):
            for parameter, state in part.state.items():
                own = names.get(parameter, "a dense parameter")
                yield from ((f"{key} of {own}", value) for key, value in state.items() if isinstance(value, Tensor))
        else:
            leaves = tree_leaves(part.state_dict())
            yield from ((f"a tensor of {type(part).__name__}", leaf) for leaf in leaves if isinstance(leaf, Tensor))
    yield from ((name, parameter) for parameter, name in names.items())


def require_finite(parts: Iterable[Stateful], train_steps: int) -> None:
    """Raises Diverged for the first of their `trained_tensors` that holds NaN or an infinity after so many train
    steps."""
    for name, tensor in trained_tensors(parts):
        if tensor.is_floating_point() and tensor.numel():
            extremes = torch.stack(tensor.detach().aminmax()).tolist()  # NaN if there is one
            if not all(map(math.isfinite, extremes)):
                raise Diverged(
                    f"{name} holds {next(one for one in extremes if not math.isfinite(one))} after {train_steps} train "
                    "steps: training diverged; lower the dense learning rate. What may be infinite belongs in a "
                    "buffer, and in the state of an object in a number"
                )


def restore_model(model: nn.Module, tensors: Tensors) -> None:
    """Raises Mismatch if the tensors are not the model's weights."""
    try:
        model.load_state_dict(under("model.", tensors))
    except RuntimeError as error:
        sentence = " ".join(str(error).split())
        raise Mismatch(
            f"the checkpoint's dense weights are not this model's: {sentence}; use the model that wrote it"
        ) from None


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Raises Mismatch if the tensors are not states of this kind of optimizer, in its parameters' shapes."""
    saved = under("optimizer.", tensors)
    states: dict[int, Tensors] = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        state = {key: tensor for key, tensor in under(f"{name}.", saved).items() if "." not in key}
        if state:
            check_state(optimizer, name, parameter, state)
            states[index] = state
    if states:
        current = optimizer.state_dict()
        optimizer.load_state_dict({"state": {**current["state"], **states}, "param_groups": current["param_groups"]})


def check_state(optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, state: Tensors) -> None:
    kind = type(optimizer).__name__
    names = set(state) == STATES.get(kind, set(state))
    shapes = all(tensor.shape == (torch.Size() if key == "step" else parameter.shape) for key, tensor in state.items())
    if not names or not shapes:
        given = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in sorted(state.items()))
        raise Mismatch(
            f"the checkpoint's optimizer state of {name} {tuple(parameter.shape)} is {given}, which is not a state of "
            f"{kind}; use the job file that wrote it"
        )


def random_state(device: torch.device) -> Tensors:
    states = {"random.cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {f"random.{device.type}": device_random_state(device)}


def restore_random(device: torch.device, tensors: Tensors) -> None:
    if "random.cpu" in tensors:
        torch.set_rng_state(tensors["random.cpu"])
    if device.type != "cpu" and f"random.{device.type}" in tensors:
        set_device_random_state(device, tensors[f"random.{device.type}"])
