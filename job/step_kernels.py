"""Which kernels a trainer calls in a step of a job, with their counts: what `device_rates` needs to tell its time.

copy in     the plan's arrays and the fetched rows, from the ring to the device
fill        victims leave their slots, fetched rows go there
step        look up, model forward, loss, backward, row update, dense optimizer
copy out    victims, from the device to the ring
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rowcast.job.device_rates import DeviceRates, model_fingerprint
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.errors import ConfigError

Task = Literal["copy in", "fill", "step", "copy out"]
TASKS: tuple[Task, ...] = ("copy in", "fill", "step", "copy out")
COUNTED_MODELS = ("dlrm", "dcnv2")  # others are measured as a whole


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    lookups: int
    rows: int  # distinct
    fetched: int
    written_back: int  # dirty victims


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    batch: int
    plan_bytes: int  # what the plan's arrays take
    groups: tuple[GroupCounts, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    task: Task
    kernel: str
    counts: dict[str, float]
    calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    tasks: dict[Task, float]  # the time of all kernels: on a CPU the main thread's
    host: float  # what else the main thread does: after the kernels on a CPU, beside them on a device
    outside: frozenset[str]  # kernels that were not measured at such counts

    @property
    def on_one_thread(self) -> float:
        """What a step takes of a trainer on a CPU."""
        return sum(self.tasks.values()) + self.host


def step_seconds(
    rates: DeviceRates, job: Job, groups: Sequence[GroupSpec], num_dense: int, counts: StepCounts
) -> StepSeconds:
    """How long each task of a step takes. `num_dense`: dense features of a sample.

    Raises ConfigError if the rates do not hold for the job.
    """
    tasks: dict[Task, float] = dict.fromkeys(TASKS, 0.0)
    outside = set()
    if rates.model is not None and is_measured(rates, job):
        tasks["step"] += sum(rates.model.seconds(counts.batch))
        if not rates.model.covers(counts.batch):
            outside.add("model")
    for call in step_calls(rates, job, groups, num_dense, counts):
        seconds, inside = rates.seconds(call.kernel, **call.counts)
        tasks[call.task] += call.calls * seconds
        if not inside:
            outside.add(call.kernel)
    host = rates.host.per_step + rates.host.per_lookup * sum(own.lookups for own in counts.groups)
    return StepSeconds(tasks=tasks, host=host, outside=frozenset(outside))


def is_measured(rates: DeviceRates, job: Job) -> bool:
    """Whether the job's model was measured as a whole."""
    return rates.model is not None and rates.model.fingerprint == model_fingerprint(job)


def step_calls(
    rates: DeviceRates, job: Job, groups: Sequence[GroupSpec], num_dense: int, counts: StepCounts
) -> list[KernelCall]:
    """The kernels of a step, without those of a model that was measured as a whole. Raises ConfigError as above."""
    calls = [*moves(groups, counts), *row_calls(job, groups, counts)]
    if is_measured(rates, job):
        return calls
    refuse_unless_counted(job)
    return [*calls, *model_calls(job, num_dense, counts.batch)]


def refuse_unless_counted(job: Job) -> None:
    """Raises ConfigError for a model that must be measured as a whole."""
    model = job.model
    settings = {"kind": model.kind, "precision": model.precision, "compile": model.compile}
    if model.kind in COUNTED_MODELS and settings == {"kind": model.kind, "precision": "fp32", "compile": False}:
        return
    raise ConfigError(
        f"the rates file does not hold the job's model ({settings}), and only {' and '.join(COUNTED_MODELS)} in fp32, "
        "not compiled, are counted; measure it with `trainer rates --config` and this job file"
    )


def moves(groups: Sequence[GroupSpec], counts: StepCounts) -> Iterator[KernelCall]:
    fetched_bytes = sum(own.fetched * group.record_bytes for group, own in zip(groups, counts.groups, strict=True))
    yield KernelCall(task="copy in", kernel="copy in", counts={"bytes": counts.plan_bytes})
    if fetched_bytes:
        yield KernelCall(task="copy in", kernel="copy in", counts={"bytes": fetched_bytes})
    for group, own in zip(groups, counts.groups, strict=True):
        width = float(group.record_floats)
        if own.written_back:
            yield KernelCall(task="fill", kernel="gather", counts={"rows": own.written_back, "record_floats": width})
            yield KernelCall(
                task="copy out", kernel="copy out", counts={"bytes": own.written_back * group.record_bytes}
            )
        if own.fetched:
            yield KernelCall(task="fill", kernel="scatter", counts={"rows": own.fetched, "record_floats": width})


def row_calls(job: Job, groups: Sequence[GroupSpec], counts: StepCounts) -> Iterator[KernelCall]:
    for group, own in zip(groups, counts.groups, strict=True):
        sizes = {
            "lookups": float(own.lookups),
            "rows": float(own.rows),
            "dim": float(group.embedding_dim),
            "record_floats": float(group.record_floats),
        }
        yield KernelCall(task="step", kernel="lookup", counts=sizes)
        yield KernelCall(task="step", kernel=f"update {job.optimizer.sparse.kind}", counts=sizes)


def model_calls(job: Job, num_dense: int, batch: int) -> Iterator[KernelCall]:
    """Forward, loss, backward and dense optimizer of a model that is counted."""
    model = job.model
    features = sum(len(table.features) for table in job.tables)
    embedded = sum(table.embedding_dim * len(table.features) for table in job.tables)
    bottom = list(pairwise([num_dense, *model.bottom_mlp]))
    sizes = {"batch": float(batch), "vectors": features + 1.0}
    if model.kind == "dlrm":
        interacted = model.bottom_mlp[-1] + features * (features + 1) // 2
        sizes |= {"dim": float(model.bottom_mlp[-1])}
        yield from both("interaction", sizes)
    else:
        interacted = model.bottom_mlp[-1] + embedded
        yield from both("concatenation", sizes | {"width": float(interacted)})
        cross = {"batch": float(batch), "width": float(interacted), "rank": float(model.cross_rank)}
        yield from both("cross layer", cross, model.cross_layers)
    layers = [*bottom, *pairwise([interacted, *model.top_mlp])]
    for number, (inputs, outputs) in enumerate(layers):
        counts = {"batch": float(batch), "inputs": float(inputs), "outputs": float(outputs)}
        yield KernelCall(task="step", kernel="linear forward", counts=counts)
        # the first layer's input is data, which has no gradient
        kernel = "linear backward" if number else "first linear backward"
        yield KernelCall(task="step", kernel=kernel, counts=counts)
    yield from both("loss", {"batch": float(batch)})
    crosses = model.cross_layers if model.kind == "dcnv2" else 0
    parameters = sum((inputs + 1) * outputs for inputs, outputs in layers)
    parameters += crosses * (2 * model.cross_rank + 1) * interacted
    trained = {"tensors": 2.0 * len(layers) + 3 * crosses, "parameters": float(parameters)}
    yield KernelCall(task="step", kernel=f"dense {job.optimizer.dense.kind}", counts=trained)


def both(kernel: str, counts: dict[str, float], calls: int = 1) -> Iterator[KernelCall]:
    for direction in ("forward", "backward"):
        yield KernelCall(task="step", kernel=f"{kernel} {direction}", counts=counts, calls=calls)
