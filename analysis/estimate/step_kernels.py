"""Lists the kernels of a trainer's step with their counts, for `device_rates`.

copy in     the plan's arrays and the fetched rows, from the ring to the device
fill        victims leave their slots, fetched rows go there
step        look up, model forward, loss, backward, row update, dense optimizer
copy out    victims, from the device to the ring
exchange    rows, their gradients and the sums of the dense side, between ranks

A rank looks up its parts' rows where they were received, and trains the rows of its shard. An evaluation looks up and
computes forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from rowcast.analysis.estimate.device_rates import DeviceRates, model_fingerprint
from rowcast.job.models import BottomAndTop, DCNv2Settings
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.errors import ConfigError

Task = Literal["copy in", "fill", "exchange", "step", "copy out"]
TASKS: tuple[Task, ...] = ("copy in", "fill", "exchange", "step", "copy out")
COUNTED_MODELS = ("dlrm", "dcnv2")  # others are measured as a whole
# kernels of jobs with parts: an exchange on a host, what comes on top across hosts, what a step adds up
EXCHANGE, NETWORK, DENSE_SUMS = "exchange", "network", "dense sums"
GRADIENT_BYTES = 4  # gradients travel as fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCounts:
    """A group's exchange on one rank in a step, in rows. Gradients travel the other way."""

    sent: int  # to all ranks, itself included
    received: int  # from all ranks, itself included
    in_host: int  # to or from the other ranks of its host, whichever is more
    across: int  # to or from ranks of other hosts, whichever is more
    trained: int  # rows in its own shard
    additions: int  # sums of two gradients of the same row


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    lookups: int
    rows: int  # distinct
    fetched: int
    written_back: int  # dirty victims
    exchange: ExchangeCounts | None = None  # None: the batch is not divided


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    trains: bool = True  # False: an evaluation step
    batch: int  # samples of this trainer
    parts: int = 1  # that they are cut into
    plan_bytes: int  # what the plan's arrays take
    groups: tuple[GroupCounts, ...]

    @property
    def part(self) -> float:
        """Samples of a part; sizes differ by one at most."""
        return self.batch / self.parts


class DenseWeights(NamedTuple):
    """The size of a model whose gradients the ranks add up."""

    tensors: float
    parameters: float  # their elements


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


def step_seconds(
    rates: DeviceRates, job: Job, groups: Sequence[GroupSpec], num_dense: int, counts: StepCounts
) -> StepSeconds:
    """Computes how long each task of a step takes. `num_dense`: dense features per sample.

    Raises ConfigError if the rates do not hold for the job."""
    tasks: dict[Task, float] = dict.fromkeys(TASKS, 0.0)
    outside = set()
    if rates.model is not None and is_measured(rates, job):
        forward, backward, update = rates.model.seconds(counts.part)
        tasks["step"] += counts.parts * forward
        if counts.trains:
            tasks["step"] += counts.parts * backward + update
        if not rates.model.covers(counts.part):
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
    if not is_measured(rates, job):
        refuse_unless_counted(job)
        calls += model_calls(job, num_dense, counts)
    if job.ranks.num_parts > 1:
        calls += exchange_calls(job, groups, counts, weights_of(rates, job, num_dense))
    for call in calls:
        if call.kernel in REFUSALS and call.kernel not in rates.kernels:
            raise ConfigError(REFUSALS[call.kernel])
    return calls


REFUSALS = {
    DENSE_SUMS: "the rates file has no sums over parts; measure them: `trainer rates --config` with this job file",
    EXCHANGE: "the rates file has no exchange between ranks; measure it: `trainer rates --config` with this job file",
    NETWORK: "the rates file has no network between the job's hosts; name its rate: `trainer rates --network-gbs`",
}


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
        if counts.trains:
            trained = {} if own.exchange is None else {"rows": float(own.exchange.trained)}
            yield KernelCall(task="step", kernel=f"update {job.optimizer.sparse.kind}", counts=sizes | trained)
        if own.exchange is not None:
            yield from packing(own.exchange, float(group.embedding_dim), trains=counts.trains)


def packing(own: ExchangeCounts, dim: float, *, trains: bool) -> Iterator[KernelCall]:
    """Rows that leave their slots, gradients in the order in which they travel, and additions."""
    added = own.additions if trains else 0
    moved = [("gather", own.sent), ("gather", added), ("scatter", added)]
    moved += [("gather", own.received), ("gather", own.trained)] if trains else []
    for kernel, rows in moved:
        if rows:
            yield KernelCall(task="step", kernel=kernel, counts={"rows": float(rows), "record_floats": dim})


def exchange_calls(
    job: Job, groups: Sequence[GroupSpec], counts: StepCounts, weights: DenseWeights
) -> Iterator[KernelCall]:
    """`weights`: of the dense side. Their gradients are added over parts; then each rank adds a slice of all ranks'."""
    ranks, on_host = job.ranks.count, job.ranks.on_host
    if counts.trains:
        yield KernelCall(task="step", kernel=DENSE_SUMS, counts=weights._asdict() | {"parts": float(counts.parts)})
    if ranks == 1:
        return
    exchanged = []  # bytes of each collective: in the host, across hosts
    for group, own in zip(groups, counts.groups, strict=True):
        assert own.exchange is not None, "several ranks exchange rows"
        row_bytes, gradient_bytes = group.parts[0].nbytes, group.embedding_dim * GRADIENT_BYTES
        both_ways = (row_bytes, gradient_bytes) if counts.trains else (row_bytes,)
        exchanged += [(own.exchange.in_host * nbytes, own.exchange.across * nbytes) for nbytes in both_ways]
    slice_bytes = GRADIENT_BYTES * weights.parameters / ranks if counts.trains else GRADIENT_BYTES
    sums = slice_bytes * (on_host - 1), slice_bytes * (ranks - on_host)
    for in_host, across in [*exchanged, *([sums, sums] if counts.trains else [sums])]:
        if on_host > 1:
            yield KernelCall(task="exchange", kernel=EXCHANGE, counts={"bytes": float(in_host)})
        if on_host < ranks:
            yield KernelCall(task="exchange", kernel=NETWORK, counts={"bytes": float(across)})


def model_calls(job: Job, num_dense: int, counts: StepCounts) -> Iterator[KernelCall]:
    """Forward, loss, backward and dense optimizer of a model that is counted."""
    model, batch = job.model, counts.part
    assert isinstance(model, BottomAndTop)
    features, layers, interacted = layers_of(job, num_dense)
    sizes = {"batch": batch, "vectors": features + 1.0}
    calls: list[KernelCall] = []
    if model.kind == "dlrm":
        calls += both("interaction", sizes | {"dim": float(model.bottom_mlp[-1])})
    elif isinstance(model, DCNv2Settings):
        calls += both("concatenation", sizes | {"width": float(interacted)})
        cross = {"batch": batch, "width": float(interacted), "rank": float(model.cross_rank)}
        calls += both("cross layer", cross, model.cross_layers)
    for number, (inputs, outputs) in enumerate(layers):
        widths = {"batch": batch, "inputs": float(inputs), "outputs": float(outputs)}
        calls.append(KernelCall(task="step", kernel="linear forward", counts=widths))
        # the first layer's input is data, which has no gradient
        kernel = "linear backward" if number else "first linear backward"
        calls.append(KernelCall(task="step", kernel=kernel, counts=widths))
    calls += both("loss", {"batch": batch})
    for call in calls:
        if counts.trains or call.kernel.endswith("forward"):
            yield replace(call, calls=call.calls * counts.parts)
    if counts.trains:
        trained = counted_weights(job, num_dense)._asdict()
        yield KernelCall(task="step", kernel=f"dense {job.optimizer.dense.kind}", counts=trained)


def layers_of(job: Job, num_dense: int) -> tuple[int, list[tuple[int, int]], int]:
    """Features, inputs and outputs of each linear layer, and the width of what is between bottom and top."""
    model = job.model
    assert isinstance(model, BottomAndTop)
    features = sum(len(table.features) for table in job.tables)
    if model.kind == "dlrm":
        interacted = model.bottom_mlp[-1] + features * (features + 1) // 2
    else:
        interacted = model.bottom_mlp[-1] + sum(table.embedding_dim * len(table.features) for table in job.tables)
    layers = [*pairwise([num_dense, *model.bottom_mlp]), *pairwise([interacted, *model.top_mlp])]
    return features, layers, interacted


def counted_weights(job: Job, num_dense: int) -> DenseWeights:
    model = job.model
    _, layers, interacted = layers_of(job, num_dense)
    crosses, cross_rank = (model.cross_layers, model.cross_rank) if isinstance(model, DCNv2Settings) else (0, 0)
    parameters = sum((inputs + 1) * outputs for inputs, outputs in layers)
    parameters += crosses * (2 * cross_rank + 1) * interacted
    return DenseWeights(tensors=2.0 * len(layers) + 3 * crosses, parameters=float(parameters))


def weights_of(rates: DeviceRates, job: Job, num_dense: int) -> DenseWeights:
    if rates.model is not None and is_measured(rates, job):
        return DenseWeights(tensors=float(rates.model.tensors), parameters=float(rates.model.parameters))
    return counted_weights(job, num_dense)


def both(kernel: str, counts: dict[str, float], calls: int = 1) -> Iterator[KernelCall]:
    for direction in ("forward", "backward"):
        yield KernelCall(task="step", kernel=f"{kernel} {direction}", counts=counts, calls=calls)
