"""Trains the dense weights once the gradients of a step are complete: by `[optimizer.dense]`, or by the model's code.

OptimizerStep    gradients -> clip -> learning rate of the step -> torch.optim
ModelStep        gradients -> the model's step(train_step), with its `training_objects`

    objects      optimizers, schedules and the like, whose tensors training must leave finite
    skipped      gets each train step that leaves the weights as they are
    step         updates the weights and clears their gradients; `train_step` counts the train batches before this one
    state        of the objects, for a checkpoint
    restore      without a `state` the objects stay as in a new run; raises Mismatch
    tried        saves and restores a user's objects; returns the checksum of each state, by name; raises ConfigError
"""

from typing import Any

import torch
from torch import nn

from rowcast.job.optimizers import learning_rate
from rowcast.job.schema import DenseOptimizer, Job
from rowcast.protocol.parts import part_seed
from rowcast.runtime.errors import ConfigError, listed
from rowcast.trainer.models import build_dense_optimizer
from rowcast.trainer.models.model_state import (
    StatefulObjects,
    Tensors,
    optimizer_state,
    restore_optimizer,
    saved_and_restored,
)


class OptimizerStep:
    def __init__(self, job: Job, settings: DenseOptimizer, model: nn.Module) -> None:
        self.optimizer = build_dense_optimizer(job, model.parameters())
        self.objects: list[Any] = [self.optimizer]
        self.skipped: Any = []
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
        kept = StatefulObjects(made_objects(job, model, self._source) if trains else [], "objects", self._source)
        self.objects: list[Any] = kept.parts
        self.skipped: Any = []
        self.state, self.restore = kept.state, kept.restore
        self._model, self._seed, self._parts = model, job.job.seed, parts

    def step(self, train_step: int) -> None:
        if self._parts > 1:  # the random state is that of a rank's last part
            torch.manual_seed(part_seed(self._seed, train_step, self._parts))
        trained: Any = self._model.step(train_step)  # type: ignore[operator]
        if trained is not None and not trained:
            self.skipped.append(train_step)
        self._model.zero_grad(set_to_none=True)

    def tried(self) -> dict[str, str]:
        kept = {f"{self._source}[{n}] of type {type(own).__name__}": [own] for n, own in enumerate(self.objects)}
        singly = {name: StatefulObjects(own, "objects", name) for name, own in kept.items()}
        return {name: saved_and_restored(name, own.state, own.restore) for name, own in singly.items()}


DenseStep = OptimizerStep | ModelStep


def dense_step(job: Job, model: nn.Module, parts: int, *, trains: bool) -> DenseStep:
    """`model`: on its device. With `trains` False, the model's `training_objects` are not made. Raises ConfigError."""
    settings = job.optimizer.dense
    if owns_step(job, model) or settings is None:
        return ModelStep(job, model, parts, trains=trains)
    return OptimizerStep(job, settings, model)


def owns_step(job: Job, model: nn.Module) -> bool:
    """Whether the model trains its dense weights. Raises ConfigError unless either the model or the job file does."""
    owns = all(callable(getattr(model, name, None)) for name in ("training_objects", "step"))
    if owns == (job.optimizer.dense is not None):
        found = "both" if owns else "neither"
        raise ConfigError(
            f"either [optimizer.dense] or {type(model).__name__}'s methods training_objects() and step(n) train the "
            f"dense weights, and there are {found}; {'remove' if owns else 'write'} one of them"
        )
    return owns


def made_objects(job: Job, model: nn.Module, source: str) -> list[Any]:
    """Calls the model's `training_objects`, with torch's random state seeded by job.seed. Raises ConfigError."""
    names, trained = set(model.state_dict()), set(model.parameters())
    torch.manual_seed(job.job.seed)
    objects: Any = model.training_objects()  # type: ignore[operator]
    if not isinstance(objects, list | tuple):
        raise ConfigError(f"{source} returned {type(objects).__name__}; return a list of objects")
    if changed := sorted(names ^ set(model.state_dict())):
        raise ConfigError(
            f"{source} changes what the model's state has: {listed(changed, 1)}. An evaluation makes the model without "
            "it; make this part in the factory, or keep it in a list, where it is no part of the model"
        )
    for own in objects:
        if isinstance(own, torch.optim.Optimizer):
            own.register_step_pre_hook(refuse_closure)
            if any(weight not in trained for group in own.param_groups for weight in group["params"]):
                raise ConfigError(
                    f"{source}: {type(own).__name__} trains a weight that is no parameter of the model, so no "
                    "checkpoint has it and ranks do not add its gradients; make it one in the factory"
                )
    return list(objects)


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
