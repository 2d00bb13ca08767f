"""Computes a step with the job's model: issues look-up, forward, backward and update to the compute stream."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from rowcast.job.models import BUILT_IN_MODELS
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.plan_layout import ITEM_BYTES, ArraySpec, Dtype, GroupHeader, StepHeader
from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.device.streams import PhaseClock, Shown, Streams
from rowcast.trainer.kernels import ADDRESSED, Chunks, Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.models.embedding import Embeddings, GroupLookup
from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics, to_host
from rowcast.trainer.models.job_model import JobModel, named_inputs
from rowcast.trainer.models.model_state import (
    Tensors,
    model_state,
    random_state,
    require_finite,
    restore_model,
    restore_random,
    saved_and_restored,
)

DTYPES: dict[Dtype, torch.dtype] = {name: torch.from_numpy(np.empty(0, name)).dtype for name in get_args(Dtype)}


class PlanArrays(Mapping[str, Tensor]):
    """Arrays in a block of bytes, by name. They become tensors on demand: compiled loops take addresses, and making a
    tensor costs more than the few rows of a small group."""

    def __init__(self, block: Tensor, specs: Sequence[ArraySpec]) -> None:
        """Raises RemoteProtocolError if an array is not inside the block."""
        self.block = block
        self.places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}  # first byte, dtype, shape
        self.made: dict[str, Tensor] = {}
        self._items: dict[torch.dtype, Tensor] = {}
        nbytes = len(block)
        for spec in specs:
            self.places[spec.name] = spec.offset, DTYPES[spec.dtype], spec.shape
            end = spec.offset + math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
            if end > nbytes:
                raise RemoteProtocolError(f"array {spec.name} ends at byte {end} of a block of {nbytes} bytes")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.made:
            offset, dtype, shape = self.places[name]
            items = self._items.get(dtype)
            if items is None:
                whole = len(self.block) // dtype.itemsize * dtype.itemsize
                items = self._items[dtype] = self.block[:whole].view(dtype)
            first = offset // dtype.itemsize
            self.made[name] = items[first : first + math.prod(shape)].view(shape)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Returns where each array begins; 0 if there is none of this name."""
        base, places = self.block.data_ptr(), self.places
        return [base + places[name][0] if name in places else 0 for name in names]


@cache
def array_names(group: int, fields: tuple[str, ...]) -> list[str]:
    return [f"{group}.{field}" for field in fields]


@dataclass(slots=True, kw_only=True, eq=False)
class StepInputs:
    """What a runner takes of a step."""

    header: StepHeader
    arrays: PlanArrays = field(init=False)  # on the device

    @property
    def step(self) -> int:
        return self.header.step


def step_lookups(step: StepInputs) -> list[GroupLookup]:
    return [
        ArrivedLookup.of(step.arrays, group, header, step.header.batch_size)
        for group, header in enumerate(step.header.groups)
    ]


class ArrivedLookup(GroupLookup):
    """The look-ups of a step, whose tensors are made on demand."""

    __slots__ = ("_addresses", "_arrays", "_group", "_header")
    _addresses: list[int]
    _arrays: PlanArrays
    _group: int
    _header: GroupHeader

    @classmethod
    def of(cls, arrays: PlanArrays, group: int, header: GroupHeader, batch_size: int) -> GroupLookup:
        lookup = cls.__new__(cls)
        lookup._arrays, lookup._group, lookup._header = arrays, group, header
        lookup.batch_size, lookup.sequence_lookups = batch_size, header.sequence_lookups
        return lookup

    def __getattr__(self, name: str) -> Any:
        """Called for a field that was not asked for yet."""
        if name in ("_arrays", "_group"):
            raise AttributeError(name)
        if name == "_addresses":
            value: Any = self._arrays.addresses(array_names(self._group, ADDRESSED))
        elif name == "chunks":
            value = Chunks(*[self._arrays[array] for array in array_names(self._group, Chunks._fields)])
        else:
            value = self._arrays.get(f"{self._group}.{name}")
        setattr(self, name, value)
        return value

    def addresses(self) -> list[int]:
        return self._addresses

    @property
    def num_lookups(self) -> int:
        return self._header.num_lookups

    @property
    def num_unique(self) -> int:
        return self._header.num_unique


class Runner:
    """A model and its evaluation, which runners of whole batches and of parts share. Implements
    `barrier.ModelState`."""

    keeps_random_state = True

    def __init__(
        self,
        job: Job,
        device: torch.device,
        num_dense: int,
        clock: PhaseClock | None = None,
        kernels: Kernels | None = None,
        parts: int = 1,
        *,
        trains: bool = True,
        take_scores: Callable[[F32], None] | None = None,
    ) -> None:
        """`clock` times the steps' stream. `kernels`: None chooses those for the device. `take_scores`
        gets the scores of all evaluated samples, in their order, f32; then there are no metrics."""
        self.device = device
        self._job = job
        self._clock: PhaseClock = clock or PhaseClock()
        self._trains, self._take_scores = trains, take_scores
        self._scored: dict[int, list[Tensor]] = {}  # by step, on their way to the host
        self._side = JobModel(job, num_dense, device, trains=trains, needs_labels=take_scores is None, parts=parts)
        self.model = self._side.model
        self.dense_step = self._side.dense_step
        self.trained = [self.model, *self.dense_step.objects]
        self._kernels = kernels or choose_kernels(device, job)
        self._metrics = EvalMetrics(device, parts, len(job.data.columns.labels), self._side.eval_names)
        self.score_name = self._side.score_name

    def count(self, step: int, outputs: Any, labels: Tensor, part: int = 0) -> None:
        """Adds the outputs of an evaluation step, or of one of its parts, to the metrics or to the scores."""
        if self._take_scores is None:
            self._side.count(self._metrics, outputs, labels, part)
        else:
            self._scored.setdefault(step, []).append(to_host(self._side.scores(outputs, labels)))

    def completed(self, step: int) -> None:
        for part in self._scored.pop(step, []):
            assert self._take_scores is not None, "`count` found it"
            self._take_scores(part.numpy())

    def issue_state(self, streams: Streams) -> None:
        pass

    def state(self) -> Tensors:
        """The state of model, optimizers, random numbers and evaluation; called when every issued step is complete."""
        return {
            **model_state(self.model),
            **self.dense_step.state(),
            **(random_state(self.device) if self.keeps_random_state else {}),
            **self._metrics.state(),
        }

    def tried(self) -> dict[str, str]:
        """Saves and restores the user's objects, before the first step. Returns the checksum of each state, by name.
        Raises ConfigError for a state that no checkpoint can hold, and Diverged for one that is not finite."""
        if self._job.model.kind in BUILT_IN_MODELS:
            return {}
        name, restore = type(self.model).__name__, partial(restore_model, self.model)
        checksums = {name: saved_and_restored(name, partial(model_state, self.model), restore)}
        checksums |= self.dense_step.tried()
        require_finite(self.trained, 0)
        return checksums

    def restore(self, tensors: Tensors) -> bool:
        """Continues from a `state`, and leaves what is missing there unchanged. Returns whether an evaluation is in
        progress. For an evaluation alone, restores only weights."""
        restore_model(self.model, tensors)
        if not self._trains:
            return False
        self.dense_step.restore(tensors)
        if self.keeps_random_state:
            restore_random(self.device, tensors)
        return self._metrics.restore(tensors)


class StepRunner(Runner):
    """Implements `loop.Steps` for whole batches of dense features and embeddings."""

    def __init__(
        self,
        job: Job,
        records: list[Tensor],
        num_dense: int,
        clock: PhaseClock | None = None,
        kernels: Kernels | None = None,
        *,
        trains: bool = True,
        take_scores: Callable[[F32], None] | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        super().__init__(job, records[0].device, num_dense, clock, kernels, trains=trains, take_scores=take_scores)
        self._embeddings = Embeddings(group_specs(job), records, self._kernels, self._clock.lap)

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        streams.compute.run(lambda: self.train(step, loss))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        def evaluate() -> None:
            with shown():
                self.evaluate(step)

        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        streams.compute.run(lambda: closed.append(self._metrics.close()))

    def train(self, step: StepInputs, loss: Tensor) -> None:
        self._clock.begin(step.step)
        embeddings = self._embeddings(step_lookups(step), step.header.train_step)
        self._clock.lap("lookup")
        outputs = self._side.forward(step.arrays["dense"], embeddings, named_inputs(step.arrays), training=True)
        mean = self._side.loss(outputs, step.arrays["labels"])
        # a copy to the host as the step's last work would hold up the next step behind copies of rows that leave
        loss.copy_(mean.detach(), non_blocking=True)
        self._clock.lap("forward")
        torch.autograd.backward(mean)
        self._embeddings.finish_step()
        self._clock.lap("backward")
        self._side.step(step.header.train_step)
        self._clock.lap("update")

    def evaluate(self, step: StepInputs) -> None:
        with torch.no_grad():
            embeddings = self._embeddings(step_lookups(step), step.header.train_step)
            outputs = self._side.forward(step.arrays["dense"], embeddings, named_inputs(step.arrays), training=False)
            self.count(step.step, outputs, step.arrays["labels"])
