"""`trainer rates`: measures what this device does with a job's kernels, for `prefetcher estimate`.

Shapes lie around the job's own. Each is timed several times, in random rounds over all shapes. A shared machine is
slower for seconds at a time: so these fall on a few measurements of many shapes, and the medians leave them out.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor
from typer import Option

from rowcast.analysis.estimate.planned import DENSE_SUMS
from rowcast.analysis.estimate.rates.exchange import exchange_kernels
from rowcast.analysis.estimate.rates.overheads import NUM_DENSE, SLOTS_PER_ROW, overheads, random_lookup, small_job
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.analysis.estimate.rates_file import (
    OVERHEADS,
    RATES_VERSION,
    DeviceRates,
    KernelRates,
    Sample,
    fitted,
    model_fingerprint,
)
from rowcast.job.file import load_job
from rowcast.job.row_optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, record_parts
from rowcast.runtime.command_options import Config, Overrides
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import keep_freed_memory, processor
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.device.cuda import choose_device, device_name
from rowcast.trainer.kernels import GroupLookup, RecordViews, part_of, rule_at
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.kernels.lookups import group_lookup, moved
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.ordered import PartVector, sum_in_order

ROUNDS = 3
ENOUGH_S = 0.25  # spent on a shape: no further round
SCALES = (0.25, 0.5, 1.0, 2.0)  # batches, as multiples of the job's
SHARES = (0.1, 0.5)  # distinct rows of a step's look-ups
MOVED_ROWS = (300, 1000, 5000, 20_000)
COPIED_BYTES = (10**4, 10**5, 10**6, 4 * 10**6, 16 * 10**6)
PARTS = (1, 2, 4)
TERMS = {
    "lookup": ("1", "lookups", "lookups*dim", "rows*dim"),
    "update": ("1", "lookups", "lookups*dim", "rows", "rows*record_floats"),
    "gather": ("1", "rows", "rows*record_floats"),
    "scatter": ("1", "rows", "rows*record_floats"),
    "copy in": ("1", "bytes"),
    "copy out": ("1", "bytes"),
    "model forward": ("1", "batch"),
    "model backward": ("1", "batch"),
    "model update": ("1",),
    DENSE_SUMS: ("1", "parts"),
}


class Shape(NamedTuple):
    kernel: str
    counts: dict[str, float]
    time: Callable[[], float]  # seconds of one call


def measured(shapes: Sequence[Shape]) -> dict[str, KernelRates]:
    found: list[list[float]] = [[] for _ in shapes]
    orders = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for number in orders.permutation(len(shapes)):
            if sum(found[number]) < ENOUGH_S:
                found[number].append(shapes[number].time())
    samples: dict[str, list[Sample]] = {}
    for shape, seconds in zip(shapes, found, strict=True):
        samples.setdefault(shape.kernel, []).append(Sample(shape.counts, median(seconds)))
    return {name: fitted(own, TERMS.get(name) or TERMS[name.split()[0]]) for name, own in samples.items()}


def row_shapes(watch: Stopwatch, job: Job) -> Iterator[Shape]:
    """Look-ups, updates, and moves of rows, as in a step of the job."""
    kernels, rng, sparse = choose_kernels(watch.device, job), np.random.default_rng(0), job.optimizer.sparse
    groups = {(group.embedding_dim, group.record_floats): group for group in group_specs(job)}
    features = sum(len(table.features) for table in job.tables)

    def update(rows: RecordViews, lookup: GroupLookup, dim: int) -> float:
        grads = torch.randn(len(lookup.slots), dim, device=watch.device)
        return watch.seconds(partial(kernels.update, rows, grads, lookup, None, rule_at(sparse, 2)))

    def look_up(rows: RecordViews, lookup: GroupLookup, dim: int) -> float:
        return watch.seconds(partial(kernels.lookup, rows, lookup, None))

    for group, batch, share in (
        (own, size, share) for own in groups.values() for size in batches_of(job) for share in SHARES
    ):
        lookup = moved(group_lookup(random_lookup(batch, share, rng, features), batch), watch.device)
        rows = random_rows(sparse, group, lookup, watch.device)
        counts = {
            "lookups": float(len(lookup.slots)),
            "rows": float(len(lookup.unique_slots)),
            "dim": float(group.embedding_dim),
            "record_floats": float(group.record_floats),
        }
        for name, time_of in (("lookup", look_up), (f"update {sparse.kind}", update)):
            yield Shape(name, counts, partial(time_of, rows, lookup, group.embedding_dim))
    for width in sorted({width for dim, record in groups for width in (dim, record)}):
        for count, into_slots in ((count, into) for count in MOVED_ROWS for into in (False, True)):
            name, own = "scatter" if into_slots else "gather", {"rows": float(count), "record_floats": float(width)}
            yield Shape(name, own, partial(move_s, watch, count, width, into_slots=into_slots))
    for nbytes, into in ((nbytes, into) for nbytes in COPIED_BYTES for into in (True, False)):
        yield Shape("copy in" if into else "copy out", {"bytes": float(nbytes)}, partial(copy_s, watch, nbytes, into))


def batches_of(job: Job) -> list[int]:
    """Samples of a part, and others around it."""
    part = job.data.batch_size / job.ranks.num_parts
    return sorted({max(2, round(part * scale)) for scale in SCALES})


def random_rows(settings: SparseOptimizer, group: GroupSpec, lookup: GroupLookup, device: torch.device) -> RecordViews:
    parts, _ = record_parts(settings, "fp32", group.embedding_dim)
    records = torch.zeros(SLOTS_PER_ROW * len(lookup.unique_slots), group.record_floats, device=device)
    views = {part.name: part_of(records, part) for part in parts}
    return RecordViews(weight=views.pop("weight"), master=None, states=tuple(views.values()))


def move_s(watch: Stopwatch, count: int, width: int, *, into_slots: bool) -> float:
    records = torch.zeros(4 * count, width, device=watch.device)
    staged = torch.zeros(count, width, device=watch.device)
    slots, fill = torch.randperm(4 * count)[:count].to(watch.device), watch.streams.compute
    if into_slots:
        return watch.seconds(partial(fill.scatter, staged, slots, records))
    return watch.seconds(partial(fill.gather, records, slots.int(), staged))


def copy_s(watch: Stopwatch, nbytes: int, into: bool) -> float:
    """Between the ring, which is page-locked where there is a device, and staging."""
    ring: Tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
    staging = torch.zeros(nbytes, dtype=torch.uint8, device=watch.device)
    source, out = (ring, staging) if into else (staging, ring)
    return watch.seconds(partial(watch.streams.compute.copy, source, out))


class TimedModel:
    """A job's model and one batch for it, made at random."""

    def __init__(self, job: Job, num_dense: int, batch: int, device: torch.device) -> None:
        self._side = JobModel(job, num_dense, device)
        self.weights = list(self._side.model.parameters())
        self._dense = torch.randn(batch, num_dense, device=device)
        self._labels = torch.randint(0, 2, (batch, *job.data.columns.label_shape), device=device).float()
        self._rows = [
            torch.randn(batch, table.width, device=device, requires_grad=True)
            for table in job.tables
            for _ in table.features
        ]
        self._loss: Tensor | None = None

    def forward(self) -> None:
        """The loss included."""
        for rows in self._rows:
            rows.grad = None
        self._side.optimizer.zero_grad(set_to_none=True)
        self._loss = self._side.loss(self._side.forward(self._dense, self._rows, {}, training=True), self._labels)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        torch.autograd.backward(self._loss)

    def up_to_backward(self) -> None:
        self.forward()
        self.backward()

    def update(self) -> None:
        self._side.step(0)


def model_shapes(watch: Stopwatch, job: Job, num_dense: int) -> Iterator[Shape]:
    """Raises ConfigError for a model of sequences, whose time depends on their lengths."""
    for table in job.tables:
        if table.pooling == "none":
            raise ConfigError(
                f'table {table.name} has pooling = "none": the time of the model depends on the lengths of sequences, '
                "which are not known here, so this job has no estimate"
            )
    for batch in batches_of(job):
        own, counts = TimedModel(job, num_dense, batch, watch.device), {"batch": float(batch)}
        yield Shape("model forward", counts, partial(watch.seconds, own.forward))
        yield Shape("model backward", counts, partial(watch.seconds, own.backward, own.forward))
        yield Shape("model update", {}, partial(watch.seconds, own.update, own.up_to_backward))
    if job.ranks.num_parts > 1:
        for parts in PARTS:
            yield Shape(DENSE_SUMS, {"parts": float(parts)}, partial(watch.seconds, sums(own, parts, watch.device)))


def sums(model: TimedModel, parts: int, device: torch.device) -> Callable[[], object]:
    """What `SharedRunner` does with dense gradients between backward passes and the optimizer, without exchanges."""
    weights, ranks = model.weights, 2
    gradients = [torch.ones_like(weight) for weight in weights]
    layout, loss = PartVector(weights, ranks), torch.zeros((), device=device)
    own = layout.new(device)

    def of_part() -> Tensor:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return layout.take(loss)

    def work() -> None:
        own.copy_(sum_in_order([of_part() for _ in range(parts)]))
        sum_in_order(own.view(ranks, -1).unbind())
        layout.give(own)

    return work


def measure(
    device: torch.device, threads: int, job: Job, num_dense: int, network_gbs: float | None = None
) -> DeviceRates:
    """`num_dense`: dense features of the job's samples. `network_gbs`: of the network between hosts, in 10^9 bytes/s.
    Raises ConfigError."""
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()  # as a trainer does
    watch, warm = Stopwatch(device, threads), Stopwatch(device, threads, cold=False)
    small = small_job()
    of_small = measured([*row_shapes(watch, small), *model_shapes(warm, small, NUM_DENSE)])
    kernels = measured([*row_shapes(watch, job), *model_shapes(warm, job, num_dense)])
    if job.ranks.num_parts > 1:
        kernels |= exchange_kernels(device, job, network_gbs)
    return DeviceRates(
        version=RATES_VERSION,
        machine=f"{processor()}, {platform.system()} {platform.machine()}",
        device=device_name(device),
        clock=watch.clock,
        torch=str(torch.__version__),
        threads=threads,
        model=model_fingerprint(job),
        parameters=sum(weight.numel() for weight in JobModel(job, num_dense, device).model.parameters()),
        kernels=kernels | overheads(device, of_small),
    )


def write_rates(rates: DeviceRates, path: Path) -> None:
    path.write_bytes(render(seal(rates)))


def rates(
    config: Config,
    out: Annotated[Path, Option(help="The file to write.", metavar="FILE")],
    num_dense: Annotated[int, Option(min=0, help="Dense features of that job's samples.")] = 13,
    network_gbs: Annotated[
        float | None, Option(help="What the network between hosts carries, in 10^9 bytes/s.", show_default=False)
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, Option(min=1, help="Threads of torch, as trainer.threads.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Raises ConfigError."""
    setup_logging("trainer", "warning", None)
    job = load_job(config, tuple(overrides or ()))
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written; name a file in a folder that exists, such as rates.json")
    if network_gbs is not None and not 0 < network_gbs < math.inf:
        raise ConfigError(f"--network-gbs {network_gbs}: give a number above 0")
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise ConfigError(f"--device {device}: {error}") from None
    began_s = time.perf_counter()
    typer.echo("measuring; this takes less than a minute")
    found = measure(chosen, threads, job, num_dense, network_gbs)
    write_rates(found, out)
    typer.echo(f"{'kernel':<24}{'shapes':>8}{'mean error':>12}")
    for name, kernel in found.kernels.items():
        if name not in OVERHEADS:
            typer.echo(f"{name:<24}{kernel.samples:>8}" + ("" if kernel.error is None else f"{kernel.error:>12.1%}"))
    told = ", ".join(f"{name} {1e3 * found.kernels[name].terms.get('1', 0.0):.2f}" for name in OVERHEADS)
    typer.echo(f"ms of overhead a step: {told}")
    typer.echo(f"{out}: {len(found.kernels)} rates, in {time.perf_counter() - began_s:.0f} s")
