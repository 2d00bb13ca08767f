"""Runs a job's model, for the trainer and the plain loop: precision, compilation, and the step of its weights.

forward                         dense, rows f32, arrays -> linear weights split off -> autocast, compiled or not
                                -> outputs f32
loss                            outputs, labels -> the model's own loss, or binary cross entropy
(its backward)
step                            gradients -> weights, as below

A compiled model's bits differ from the plain model's, and each shape needs a separate graph. So only train batches of
`data.batch_size` samples run compiled; smaller batches and evaluation use the plain model.

Trains the dense weights once the gradients of a step are complete: by `[optimizer.dense]`, or by the model's code.

OptimizerStep    gradients -> clip -> learning rate of the step -> torch.optim
ModelStep        gradients -> the model's step(train_step), with its `training_objects`

    objects      optimizers, schedules and the like, whose tensors training must leave finite
    skipped      gets each train step that leaves the weights as they are
    step         updates the weights and clears their gradients; `train_step` counts the train batches before this one
    state        of the objects, for a checkpoint
    restore      without a `state` the objects stay as in a new run; raises Mismatch
    tried        saves and restores a user's objects; returns each state's checksum, by name; raises ConfigError
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowcast.job.optimizers import learning_rate
from rowcast.job.schema import DenseOptimizer, Job
from rowcast.protocol.parts import PREFIX, belonging, part_seed
from rowcast.runtime.disk import use_safe_caches
from rowcast.runtime.errors import ConfigError, listed
from rowcast.trainer.models import as_fp32, build_dense_optimizer, build_model, own_loss
from rowcast.trainer.models.embedding import Embedded, Sequences, align_inputs
from rowcast.trainer.models.evaluate import EvalMetrics, own_ranks, own_sums
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
        if trained is not None and not is_truth(trained):  # such as a coroutine, which trains nothing
            raise ConfigError(
                f"{type(self._model).__name__}.step(n) returned a {type(trained).__name__}; return False if the dense "
                "weights were left as they were, else True or nothing"
            )
        if trained is not None and not trained:
            self.skipped.append(train_step)
        self._model.zero_grad(set_to_none=True)

    def tried(self) -> dict[str, str]:
        kept = {
            f"{self._source}[{n}] of type {type(stateful).__name__}": [stateful]
            for n, stateful in enumerate(self.objects)
        }
        singly = {name: StatefulObjects(objects, "objects", name) for name, objects in kept.items()}
        return {name: saved_and_restored(name, objects.state, objects.restore) for name, objects in singly.items()}


DenseStep = OptimizerStep | ModelStep


def dense_step(job: Job, model: nn.Module, parts: int, *, trains: bool) -> DenseStep:
    """`model`: on its device. With `trains` False, the model's `training_objects` are not made. Raises ConfigError."""
    settings = job.optimizer.dense
    if owns_step(job, model) or settings is None:
        return ModelStep(job, model, parts, trains=trains)
    return OptimizerStep(job, settings, model)


def is_truth(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype == torch.bool
    return isinstance(value, bool | np.bool_)


def owns_step(job: Job, model: nn.Module) -> bool:
    """Whether the model trains its dense weights. Raises ConfigError unless either the model or the job file does."""
    owns = callable(getattr(model, "training_objects", None))
    if owns and not callable(getattr(model, "step", None)):
        raise ConfigError(
            f"{type(model).__name__} has training_objects() and no method step(n), which trains with them; write it, "
            "or remove training_objects()"
        )
    if owns == (job.optimizer.dense is not None):
        methods = "both" if owns else "neither"
        raise ConfigError(
            f"either [optimizer.dense] or {type(model).__name__}'s methods training_objects() and step(n) train the "
            f"dense weights, and there are {methods}; {'remove' if owns else 'write'} one of them"
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
    for stateful in objects:
        if isinstance(stateful, torch.optim.Optimizer):
            stateful.register_step_pre_hook(refuse_closure)
            if any(weight not in trained for group in stateful.param_groups for weight in group["params"]):
                raise ConfigError(
                    f"{source}: {type(stateful).__name__} trains a weight that is no parameter of the model, so no "
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


CPU = torch.device("cpu")


class JobModel:
    def __init__(
        self,
        job: Job,
        num_dense: int,
        device: torch.device = CPU,
        *,
        trains: bool = True,
        needs_labels: bool = True,
        parts: int = 1,
    ) -> None:
        """Sets the precision of the process's matrix products and seeds torch's global random state.

        With `trains` False nothing is compiled. Without `needs_labels`, only `forward` and `logits` may be called.
        `parts`: slices of a batch that run through the model separately.
        Raises ConfigError for settings that this machine does not support."""
        if job.model.compile and job.data.batch_size % parts:
            raise ConfigError(
                f"model.compile needs parts of one size, and data.batch_size = {job.data.batch_size} is no multiple of "
                f"{parts} parts; change one of these"
            )
        set_precision(job.model.precision, device)
        self.model = build_model(job, num_dense).to(device)
        self._every_module = list(self.model.modules())
        self.own_loss = own_loss(self.model)  # None: binary cross entropy
        if needs_labels and self.own_loss is None and job.data.columns.label_values == "none":
            raise ConfigError(
                'data.columns.label_values = "none": training and evaluation need labels; remove it, give the model a '
                "method loss(outputs, labels) that does without, or score these samples with `rowcast score`"
            )
        if needs_labels and self.own_loss is None and job.data.columns.label_values != "binary":
            raise ConfigError(
                f'data.columns.label_values = "{job.data.columns.label_values}": binary cross entropy needs labels of '
                "0 or 1; give the model a method loss(outputs, labels), or remove it"
            )
        self.ranks = own_ranks(self.model)  # of the outputs' positives, i64 [P]
        self.eval_names, self.eval_sums = own_sums(self.model)
        self.dense_step = dense_step(job, self.model, parts, trains=trains)
        self.step = self.dense_step.step
        self._pass = ForwardPass(job, self.model)
        self.logits, self.score_name = self._pass.logits, self._pass.score_name
        self._compiled = compile_model(self.model, device) if job.model.compile and trains else None
        self._full_batch = job.data.batch_size // parts
        torch.manual_seed(job.job.seed)

    def forward(self, dense: Tensor, rows: Sequence[Embedded], inputs: Mapping[str, Tensor], *, training: bool) -> Any:
        """Returns logits f32 [B] or [B, T], or the input of the model's own loss.

        dense f32 [B, num_dense]; pooled rows of each feature, f32 [B, width], or its sequences; the batch's other
        arrays by name. Computes gradients if they are enabled. Raises ConfigError if the model takes no arrays."""
        if {module.training for module in self._every_module} != {training}:  # `train` asks each for its children
            self.model.train(training)
        compiled = self._compiled if training and len(dense) == self._full_batch else None
        if compiled is None:
            return self._pass(self.model, dense, rows, inputs)
        # a graph cannot read the addresses of its inputs, so they are aligned here and not in the model's hook
        return self._pass(lambda *own, **named: compiled(*align_inputs(self.model, own), **named), dense, rows, inputs)

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Returns f32 [], the batch's mean, from the outputs of `forward` and labels f32 [B] or [B, T]. Raises
        ConfigError."""
        return mean_loss(outputs, labels) if self.own_loss is None else self.own_loss(outputs, labels)

    def count(self, metrics: EvalMetrics, outputs: Any, labels: Tensor, part: int = 0) -> None:
        """Adds the outputs of an evaluation step, or of one of its parts, to the metrics."""
        loss = None if self.own_loss is None else self.loss(outputs, labels)
        metrics.update(self.logits(outputs), labels, loss, part)
        metrics.update_ranks(self.ranks(outputs))
        metrics.update_sums(self.eval_sums(outputs, labels), part)

    def scores(self, outputs: Any, labels: Tensor) -> Tensor:
        """Returns f32 in the shape of `labels`. Raises ConfigError if the outputs are not numbers for each of these."""
        logits = self.logits(outputs)
        if not isinstance(logits, Tensor) or logits.shape != labels.shape:
            given = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
            raise ConfigError(
                f"the model's outputs have {given}, which are no scores; give the model a method logits(outputs) that "
                f"returns shape {list(labels.shape)}"
            )
        return logits.float()


class ForwardPass:
    """Calls the job's model, compiled or not: arranges rows and arrays, splits linear weights off, sets precision."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._linear = tuple(table.linear for table in job.tables for _ in table.features)
        self._inputs = ModelInputs(job, model)
        self._autocasts = job.model.precision == "bf16"
        has_loss = own_loss(model) is not None
        self._own_logits: Callable[[Any], Any] | None = getattr(model, "logits", None) if has_loss else None
        # names a value of `logits`, as a column of `rowcast score`
        self.score_name = str(getattr(model, "score_name", "score" if has_loss and not self._own_logits else "logit"))

    def __call__(
        self, model: Callable[..., Any], dense: Tensor, rows: Sequence[Embedded], inputs: Mapping[str, Tensor]
    ) -> Any:
        """As `JobModel.forward`."""
        rows = self._inputs.rows(rows)
        named = self._inputs.arguments(inputs, rows)
        arguments = (dense, *split_linear(rows, self._linear)) if any(self._linear) else (dense, list(rows))
        with torch.autocast(dense.device.type, torch.bfloat16, enabled=self._autocasts):
            outputs = model(*arguments, **named)
        return as_fp32(outputs) if self._autocasts else outputs

    def logits(self, outputs: Any) -> Any:
        """Returns the values to compare with labels: the model's `logits` of its outputs, or the outputs themselves.

        Not f32 [B] if the model has no `logits` and `forward` returned something else."""
        return outputs if self._own_logits is None else self._own_logits(outputs)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy, the mean over the batch. logits and labels f32 [B], or both [B, T] with several labels.

    An unknown label, NaN, has no loss and no gradient, but counts in the mean: it divides by B * T. So a sample's
    contribution does not depend on other samples, and the parts of a batch add up to its mean. Raises ConfigError for
    other shapes."""
    returned = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.shape != labels.shape:
        needed = "one logit per sample" if labels.dim() == 1 else "one logit per sample and label"
        raise ConfigError(
            f"the model returned {returned}; return {needed}, shape {list(labels.shape)}, or give the model a method "
            "loss(outputs, labels)"
        )
    if labels.dim() > 1:
        known = ~labels.isnan()
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.where(known, 0.0), known.to(logits.dtype))
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def split_linear(rows: Sequence[Embedded], linear: Sequence[bool]) -> tuple[list[Embedded], list[Tensor]]:
    """Returns the features' embeddings, and f32 [B, 1] for each feature with linear weights in its table."""
    embeddings: list[Embedded] = []
    weights: list[Tensor] = []
    for embedded, has_linear in zip(rows, linear, strict=True):
        if has_linear:
            assert isinstance(embedded, Tensor), "tables with linear weights are pooled"
            embedding, weight = torch.split_with_sizes(embedded, [embedded.shape[1] - 1, 1], dim=1)
            embeddings.append(embedding)
            weights.append(weight)
        else:
            embeddings.append(embedded)
    return embeddings, weights


def set_precision(precision: str, device: torch.device) -> None:
    """Sets the precision of f32 matrix products in the whole process. Raises ConfigError for tf32 without CUDA.

    Uses the older of torch's two interfaces: torch.compile reads it, and refuses a setting by torch.backends'
    `fp32_precision`."""
    if precision == "tf32" and device.type != "cuda":
        raise ConfigError(
            f'model.precision = "tf32" needs a CUDA device, and trainer.device is {device}; set model.precision to '
            '"fp32" or "bf16"'
        )
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


# otherwise torch times kernels that sum in different orders and chooses the fastest
OPTIONS: dict[str, Any] = {"deterministic": True}


def compile_model(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """Returns the model, compiled at its first call, with the same parameters under the same names: one graph, nothing
    timed, so that its bits are a function of the job.

    Raises ConfigError if torch.compile cannot work on this machine."""
    use_safe_caches()
    torch.compiler.reset()  # graphs of an earlier attempt would count as variants of this model
    # beyond the limit a model would run uncompiled, with different bits than a restarted run
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    check_compiler(device)
    return torch.compile(model, dynamic=False, options=OPTIONS)


def check_compiler(device: torch.device) -> None:
    """Compiles one kernel without the cache. Raises ConfigError if that fails."""
    kernel = torch.compile(torch.sigmoid, dynamic=False, options={**OPTIONS, "fx_graph_cache": False})
    try:
        kernel(torch.zeros(64, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        needs = (
            "a C++ compiler, such as g++, on the PATH"
            if device.type == "cpu"
            else "Triton and a C compiler, such as gcc, on the PATH"
        )
        sentence = " ".join(str(error).partition("\n\n")[0].split())[:200]  # without torch's advice
        raise ConfigError(
            f"model.compile: torch.compile does not work on {device} here ({type(error).__name__}: {sentence}); it "
            f"needs {needs}; install that or remove model.compile"
        ) from None


def named_inputs(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the batch's arrays among those of a plan, without dense features and labels."""
    return {name.removeprefix(PREFIX): arrays[name] for name in arrays if name.startswith(PREFIX)}


class ModelInputs:
    """Arranges the rows and arrays of a batch, or a part of one, as the job's model takes them."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        """Raises ConfigError if the job names arrays and the model takes none."""
        self._of = belonging(job)
        self._name = type(model).__name__
        rows = ["rows"] * (1 + any(table.linear for table in job.tables))
        self._is_taken = accepts(model, *rows, inputs={})
        self._is_needed = self._is_taken and not accepts(model, *rows)
        self._refuse([*job.data.columns.inputs, *self._of.arrays])

    def rows(self, rows: Sequence[Embedded]) -> list[Embedded]:
        """Returns the rows of each feature; f32 [n, D] for one that belongs to the batch."""
        whole = self._of.batch_positions
        return [
            embedded.values if position in whole and isinstance(embedded, Sequences) else embedded
            for position, embedded in enumerate(rows)
        ]

    def arguments(self, inputs: Mapping[str, Tensor], rows: Sequence[Embedded]) -> dict[str, Any]:
        """Returns the keyword argument `inputs`, if the data has arrays. `rows`: as `rows` returns them. Raises
        ConfigError."""
        if not inputs and self._is_needed:
            raise ConfigError(
                f"{self._name}.forward needs the argument inputs, and the data has no arrays; name some as "
                "data.columns.inputs, or yield them beside dense, sparse and labels, or give inputs a default"
            )
        if not inputs:
            return {}
        self._refuse(list(inputs))
        return {"inputs": {name: self._beside(name, array, rows) for name, array in inputs.items()}}

    def _beside(self, name: str, array: Tensor, rows: Sequence[Embedded]) -> Embedded:
        """Adds the offsets of its feature to an array of look-ups."""
        feature = self._of.arrays.get(name)
        looked_up = None if feature is None else rows[self._of.positions[feature]]
        return Sequences(values=array, offsets=looked_up.offsets) if isinstance(looked_up, Sequences) else array

    def _refuse(self, names: Sequence[str]) -> None:
        if names and not self._is_taken:
            raise ConfigError(
                f"the data has the arrays {', '.join(names)}, and {self._name}.forward takes none; give it an argument "
                "inputs, or leave them out of the data"
            )


def accepts(model: nn.Module, *rows: str, **named: Any) -> bool:
    try:
        inspect.signature(model.forward).bind("dense", *rows, **named)
    except TypeError:
        return False
    return True
