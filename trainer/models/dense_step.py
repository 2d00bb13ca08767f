"""Trains the dense weights once the gradients of a step are complete: by `[optimizer.dense]` or by the model's code.

OptimizerStep    gradients -> clip -> learning rate of the step -> torch.optim
ModelStep        gradients -> the model's step(train_step), which has its `training_objects`
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from rowcast.job.learning_rate import learning_rate
from rowcast.job.schema import DenseOptimizer, Job
from rowcast.protocol.parts import part_seed
from rowcast.runtime.errors import ConfigError, listed
from rowcast.trainer.models import build_dense_optimizer
from rowcast.trainer.models.model_state import Tensors, optimizer_state, restore_optimizer, saved_and_restored
from rowcast.trainer.models.user_objects import StatefulObjects


class DenseStep(Protocol):
    objects: list[Any]  # optimizers, schedules and the like, whose tensors training must leave finite
    skipped: Callable[[int], object]  # called with each train step that leaves the weights as they are

    def step(self, train_step: int) -> None:
        """Updates the weights and clears their gradients. `train_step` counts the train batches before this one."""

    def state(self) -> Tensors:
        """Returns the state of the objects, for a checkpoint."""

    def restore(self, tensors: Tensors) -> None:
        """Restores a `state`; without one the objects stay as in a new run. Raises Mismatch."""

    def tried(self) -> dict[str, str]:
        """Saves and restores objects of a user's code. Returns the checksum of each one's state, by name. Raises
        ConfigError."""


class OptimizerStep:
    def __init__(self, job: Job, settings: DenseOptimizer, model: nn.Module) -> None:
        self.optimizer = build_dense_optimizer(job, model.parameters())
        self.objects = [self.optimizer]
        self.skipped: Callable[[int], object] = list[int]().append  # never called
        self._settings, self._model = settings, model

    def step(self, train_step: int) -> None:
        clip(self._model, self._settings)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._settings, train_step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> Tensors:
        return optimizer_state(self._model, self.optimizer)

    def restore(self, tensors: Tensors) -> None:
        restore_optimizer(self._model, self.optimizer, tensors)

    def tried(self) -> dict[str, str]:
        return {}


class ModelStep:
    def __init__(self, job: Job, model: nn.Module, parts: int, *, trains: bool) -> None:
        self._source = f"{type(model).__name__}.training_objects()"
        self._kept = StatefulObjects(made_objects(job, model) if trains else [], "objects", self._source)
        self.objects = self._kept.parts
        self.skipped: Callable[[int], object] = list[int]().append
        self._model, self._seed, self._parts = model, job.job.seed, parts

    def step(self, train_step: int) -> None:
        if self._parts > 1:  # the random state is that of a rank's last part
            torch.manual_seed(part_seed(self._seed, train_step, self._parts))
        trained: Any = self._model.step(train_step)  # type: ignore[operator]
        if trained is not None and not trained:
            self.skipped(train_step)
        self._model.zero_grad(set_to_none=True)

    def state(self) -> Tensors:
        return self._kept.state()

    def restore(self, tensors: Tensors) -> None:
        self._kept.restore(tensors)

    def tried(self) -> dict[str, str]:
        checksums = {}
        for n, part in enumerate(self.objects):
            name = f"{self._source}[{n}]"
            kept = StatefulObjects([part], "objects", name)
            checksums[name] = saved_and_restored(f"{name}, of type {type(part).__name__},", kept.state, kept.restore)
        return checksums


def dense_step(job: Job, model: nn.Module, parts: int, *, trains: bool) -> DenseStep:
    """`model`: on its device. With `trains` False, the model's `training_objects` are not made. Raises ConfigError."""
    settings = job.optimizer.dense
    if owns_step(job, model) or settings is None:
        return ModelStep(job, model, parts, trains=trains)
    return OptimizerStep(job, settings, model)


def owns_step(job: Job, model: nn.Module) -> bool:
    """Whether the model trains its dense weights. Raises ConfigError unless either the model or the job file does."""
    name, is_set = type(model).__name__, job.optimizer.dense is not None
    owns = callable(getattr(model, "training_objects", None))
    if owns and not callable(getattr(model, "step", None)):
        raise ConfigError(f"{name} has a method training_objects and no method step(n); give it both")
    if owns and is_set:
        raise ConfigError(
            f"{name} has training_objects() and step(n), and the job file has [optimizer.dense]; remove one of them: "
            "either trains the dense weights"
        )
    if not owns and not is_set:
        raise ConfigError(
            f"nothing trains the dense weights of {name}: write [optimizer.dense], or give the model the methods "
            "training_objects() and step(n)"
        )
    return owns


def made_objects(job: Job, model: nn.Module) -> list[Any]:
    """Calls the model's `training_objects`, with torch's random state seeded by job.seed. Raises ConfigError."""
    source, names, weights = f"{type(model).__name__}.training_objects()", set(model.state_dict()), model.parameters
    torch.manual_seed(job.job.seed)
    made: Any = model.training_objects()  # type: ignore[operator]
    if not isinstance(made, Iterable):
        raise ConfigError(f"{source} returned {type(made).__name__}; return a list of objects")
    objects, trained = list(made), set(weights())
    if changed := sorted(names ^ set(model.state_dict())):
        raise ConfigError(
            f"{source} changes what the model's state has: {listed(changed, 1)}. An evaluation makes the model without "
            "it; make this part in the factory, or keep it in a list, where it is no part of the model"
        )
    for own in objects:
        if isinstance(own, torch.optim.Optimizer):
            of_others = [weight for group in own.param_groups for weight in group["params"] if weight not in trained]
            if of_others:
                raise ConfigError(
                    f"{source}: {type(own).__name__} trains a weight of shape {list(of_others[0].shape)}, which is no "
                    "parameter of the model, so no checkpoint has it and ranks do not add its gradients; make it one"
                )
            own.register_step_pre_hook(refuse_closure)
    return objects


def refuse_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if any(map(callable, (*args[1:], *named.values()))):
        raise ConfigError(
            f"the model's step(n) gives {type(optimizer).__name__}.step a closure: the gradients of step n are "
            "complete, and its rows are trained; call it without one, or use an optimizer that needs none"
        )


def clip(model: nn.Module, settings: DenseOptimizer) -> None:
    """Clips each element, then the norm of all gradients; one tensor at a time and without waiting for the device."""
    if settings.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), settings.clip_value, foreach=False)
    if settings.clip_norm is not None:
        nn.utils.clip_grad_norm_(list(model.parameters()), settings.clip_norm, error_if_nonfinite=False, foreach=False)
