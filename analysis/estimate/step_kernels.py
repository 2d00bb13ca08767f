"""Lists the kernels of a trainer's step with their counts, for `device_rates`.

copy in     the plan's arrays and the fetched rows, from the ring to the device
fill        victims leave their slots, fetched rows go there
step        look up, model forward, backward, row update, dense optimizer
copy out    victims, from the device to the ring
exchange    rows, their gradients and the sums of the dense side, between ranks

A rank looks up its parts' rows where they were received, and trains the rows of its shard. An evaluation looks up and
computes forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rowcast.analysis.estimate.device_rates import DeviceRates, model_fingerprint
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.errors import ConfigError

Task = Literal["copy in", "fill", "exchange", "step", "copy out"]
TASKS: tuple[Task, ...] = ("copy in", "fill", "exchange", "step", "copy out")
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


class KernelCall(NamedTuple):
    task: Task
    kernel: str
    counts: dict[str, float]
    calls: int = 1


def step_calls(rates: DeviceRates, job: Job, groups: Sequence[GroupSpec], counts: StepCounts) -> list[KernelCall]:
    """Raises ConfigError if the rates do not hold for the job."""
    if rates.model != model_fingerprint(job):
        raise ConfigError(
            "the rates file holds another job's model; measure this one: `trainer rates --config` with its job file"
        )
    calls = [*moves(groups, counts), *row_calls(job, groups, counts), *model_calls(counts)]
    if job.ranks.num_parts > 1:
        calls += exchange_calls(job, groups, counts, rates.parameters)
    if any(call.kernel == NETWORK for call in calls) and NETWORK not in rates.kernels:
        raise ConfigError(
            "the rates file has no network between the job's hosts; name its rate: `trainer rates --network-gbs`"
        )
    return calls


def moves(groups: Sequence[GroupSpec], counts: StepCounts) -> Iterator[KernelCall]:
    fetched_bytes = sum(own.fetched * group.record_bytes for group, own in zip(groups, counts.groups, strict=True))
    yield KernelCall("copy in", "copy in", {"bytes": counts.plan_bytes})
    if fetched_bytes:
        yield KernelCall("copy in", "copy in", {"bytes": fetched_bytes})
    for group, own in zip(groups, counts.groups, strict=True):
        width = float(group.record_floats)
        if own.written_back:
            yield KernelCall("fill", "gather", {"rows": own.written_back, "record_floats": width})
            yield KernelCall("copy out", "copy out", {"bytes": own.written_back * group.record_bytes})
        if own.fetched:
            yield KernelCall("fill", "scatter", {"rows": own.fetched, "record_floats": width})


def row_calls(job: Job, groups: Sequence[GroupSpec], counts: StepCounts) -> Iterator[KernelCall]:
    for group, own in zip(groups, counts.groups, strict=True):
        dim = float(group.embedding_dim)
        sizes = {
            "lookups": float(own.lookups),
            "rows": float(own.rows),
            "dim": dim,
            "record_floats": float(group.record_floats),
        }
        yield KernelCall("step", "lookup", sizes)
        if counts.trains:
            trained = {} if own.exchange is None else {"rows": float(own.exchange.trained)}
            yield KernelCall("step", f"update {job.optimizer.sparse.kind}", sizes | trained)
        if own.exchange is not None:  # rows leave their slots, gradients are put in order and added
            exchange, added = own.exchange, own.exchange.additions if counts.trains else 0
            moved = [("gather", exchange.sent), ("gather", added), ("scatter", added)]
            moved += [("gather", exchange.received), ("gather", exchange.trained)] if counts.trains else []
            for kernel, rows in moved:
                if rows:
                    yield KernelCall("step", kernel, {"rows": float(rows), "record_floats": dim})


def model_calls(counts: StepCounts) -> Iterator[KernelCall]:
    part = {"batch": counts.batch / counts.parts}  # sizes of parts differ by one at most
    yield KernelCall("step", "model forward", part, counts.parts)
    if counts.trains:
        yield KernelCall("step", "model backward", part, counts.parts)
        yield KernelCall("step", "model update", {})


def exchange_calls(job: Job, groups: Sequence[GroupSpec], counts: StepCounts, parameters: int) -> Iterator[KernelCall]:
    """The dense gradients are added over parts; then each rank adds a slice of all ranks'."""
    ranks, on_host = job.ranks.count, job.ranks.on_host
    if counts.trains:
        yield KernelCall("step", DENSE_SUMS, {"parts": float(counts.parts)})
    if ranks == 1:
        return
    exchanged = []  # bytes of each collective: in the host, across hosts
    for group, own in zip(groups, counts.groups, strict=True):
        assert own.exchange is not None, "several ranks exchange rows"
        row_bytes, gradient_bytes = group.parts[0].nbytes, group.embedding_dim * GRADIENT_BYTES
        both_ways = (row_bytes, gradient_bytes) if counts.trains else (row_bytes,)
        exchanged += [(own.exchange.in_host * nbytes, own.exchange.across * nbytes) for nbytes in both_ways]
    slice_bytes = GRADIENT_BYTES * parameters / ranks if counts.trains else GRADIENT_BYTES
    sums = slice_bytes * (on_host - 1), slice_bytes * (ranks - on_host)
    for in_host, across in [*exchanged, *([sums, sums] if counts.trains else [sums])]:
        if on_host > 1:
            yield KernelCall("exchange", EXCHANGE, {"bytes": float(in_host)})
        if on_host < ranks:
            yield KernelCall("exchange", NETWORK, {"bytes": float(across)})
