"""`trainer rates`: measures what this device does with a job's kernels, for `rowcast estimate`.

Shapes lie around the job's own. Each is timed several times, in random rounds over all shapes. A shared machine is
slower for seconds at a time. Such seconds then fall on a few measurements of many shapes, and medians leave them out.

Times work under the cache conditions of a step.

rows    in no cache of a CPU: other rows were touched since. A sweep over more memory than they hold comes before
layers  in the last cache: weights and gradients were used a step ago. The sweep is over the caches of a core

CPU, one thread     processor time, so that other programs do not count
CPU, more threads   wall time: the processor time of threads that work at once would be added up
CUDA                marks on the stream; the sweep before all work lets the host run ahead, so no launch waits
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import Tensor
from typer import Option

from rowcast.analysis.estimate.overheads import BATCHES, NUM_DENSE, exchange_kernels, overheads, small_job
from rowcast.analysis.estimate.planned import DENSE_SUMS
from rowcast.analysis.estimate.rates_file import (
    OVERHEADS,
    RATES_VERSION,
    DeviceRates,
    KernelRates,
    KernelSample,
    fitted,
    model_fingerprint,
)
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import possible_groups, record_parts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.command_options import Config, Overrides
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import keep_freed_memory, processor
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.device.cuda import choose_device, device_name, make_streams
from rowcast.trainer.device.streams import move as move_of
from rowcast.trainer.kernels import GroupLookup, RecordViews, part_of, rule_at
from rowcast.trainer.kernels.choose import choose_kernels, group_lookup, lookup_arrays, moved
from rowcast.trainer.models.exchanges import PartVector, sum_in_order
from rowcast.trainer.models.job_model import JobModel

SWEPT_BYTES = {"cpu": 48 * 2**20, "cuda": 512 * 2**20}  # more than the last-level caches hold
CORE_BYTES = 4 * 2**20  # more than the caches of one core hold
REPEATS, MOST_REPEATS = 1, 4
LEAST_S = 1e-3  # spent on one shape at a time
Clock = Literal["cpu", "wall", "device"]


def nothing() -> None:
    pass


class Stopwatch:
    def __init__(self, device: torch.device, threads: int, *, cold: bool = True) -> None:
        """`cold`: the work's data is in no cache of a CPU; otherwise it is in the last one."""
        self.device = device
        self.streams = make_streams(device)
        self.clock: Clock = "device" if device.type == "cuda" else "cpu" if threads == 1 else "wall"
        self.now = time.process_time if self.clock == "cpu" else time.perf_counter
        swept_bytes = SWEPT_BYTES[device.type] if cold or device.type == "cuda" else CORE_BYTES
        self._swept = torch.zeros(swept_bytes // 4, device=device)

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = nothing) -> float:
        """The median of a few times, of more where they are short, after one that is not counted. `prepare` runs before
        each and is not timed."""
        times = list[float]()
        while len(times) <= REPEATS or (len(times) < MOST_REPEATS and sum(times) < LEAST_S):
            prepare()
            times.append(self._once(work))
        return median(times[1:])

    def _once(self, work: Callable[[], object]) -> float:
        if self.clock != "device":
            self._swept.add_(1.0)
            began_s = self.now()
            work()
            return self.now() - began_s
        stream = self.streams.compute
        times: list[float] = []

        def marked() -> None:
            self._swept.add_(1.0)
            began = stream.mark()
            work()
            ended = stream.mark()
            self.streams.settle()
            times.append(ended.seconds_since(began))

        stream.run(marked)
        return times[0]


SKEW = 3  # a feature looks up rows by a uniform random number to this power, so few rows have most look-ups
SLOTS_PER_ROW = 2  # rows of other batches are between those of a step
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


class KernelShape(NamedTuple):
    kernel: str
    counts: dict[str, float]
    time: Callable[[], float]  # seconds of one call


def measured(shapes: Sequence[KernelShape]) -> dict[str, KernelRates]:
    times: list[list[float]] = [[] for _ in shapes]
    orders = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for number in orders.permutation(len(shapes)):
            if sum(times[number]) < ENOUGH_S:
                times[number].append(shapes[number].time())
    samples: dict[str, list[KernelSample]] = {}
    for shape, seconds in zip(shapes, times, strict=True):
        samples.setdefault(shape.kernel, []).append(KernelSample(shape.counts, median(seconds)))
    return {name: fitted(of_kernel, TERMS.get(name) or TERMS[name.split()[0]]) for name, of_kernel in samples.items()}


def row_shapes(watch: Stopwatch, job: Job) -> Iterator[KernelShape]:
    """Look-ups, updates, and moves of rows, as in a step of the job."""
    kernels, rng, sparse = choose_kernels(watch.device, job), np.random.default_rng(0), job.optimizer.sparse
    groups = {(group.embedding_dim, group.record_floats): group for group in possible_groups(job)}
    features = sum(len(table.features) for table in job.tables)
    zeros, stream = partial(torch.zeros, device=watch.device), watch.streams.compute

    def update(rows: RecordViews, lookup: GroupLookup, dim: int) -> float:
        grads = torch.randn(len(lookup.slots), dim, device=watch.device)
        return watch.seconds(partial(kernels.update, rows, grads, lookup, None, rule_at(sparse, 2)))

    def move(count: int, width: int, into_slots: bool) -> float:
        records, staged = zeros(4 * count, width), zeros(count, width)
        slots = torch.randperm(4 * count)[:count].to(watch.device)
        if into_slots:
            return watch.seconds(partial(stream.scatter, [move_of(records, slots, staged)]))
        return watch.seconds(partial(stream.gather, [move_of(records, slots.int(), staged)]))

    def copy(nbytes: int, into: bool) -> float:
        """Between the ring, which is page-locked where there is a device, and staging."""
        ends = (
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=watch.device.type == "cuda"),
            zeros(nbytes, dtype=torch.uint8),
        )
        return watch.seconds(partial(stream.copy, *(ends if into else ends[::-1])))

    for (dim, width), batch, share in product(groups, batches_of(job), SHARES):
        lookup = moved(group_lookup(random_lookup(batch, share, rng, features), batch), watch.device)
        records = zeros(SLOTS_PER_ROW * len(lookup.unique_slots), width)
        views = {part.name: part_of(records, part) for part in record_parts(sparse, "fp32", dim)[0]}
        rows = RecordViews(weight=views.pop("weight"), master=None, states=tuple(views.values()))
        sizes = {"lookups": len(lookup.slots), "rows": len(lookup.unique_slots), "dim": dim, "record_floats": width}
        counts = {name: float(size) for name, size in sizes.items()}
        yield KernelShape("lookup", counts, partial(watch.seconds, partial(kernels.lookup, rows, lookup, None)))
        yield KernelShape(f"update {sparse.kind}", counts, partial(update, rows, lookup, dim))
    for width, count, into in product(sorted({*chain(*groups)}), MOVED_ROWS, (False, True)):
        counts = {"rows": float(count), "record_floats": float(width)}
        yield KernelShape("scatter" if into else "gather", counts, partial(move, count, width, into))
    for nbytes, into in product(COPIED_BYTES, (True, False)):
        yield KernelShape("copy in" if into else "copy out", {"bytes": float(nbytes)}, partial(copy, nbytes, into))


def random_lookup(batch: int, share: float, rng: np.random.Generator, features: int) -> LookupArrays[npt.NDArray[Any]]:
    """One look-up in each bag; `share`: of the look-ups that are of distinct rows, at most. The features' tables have
    from few rows to many, and few rows have most look-ups."""
    most = np.geomspace(2, 4 * batch * share * 4, features)  # rows of each table
    chosen = [(rng.random(batch) ** SKEW * rows).astype(np.int64) + (number << 32) for number, rows in enumerate(most)]
    keys, rows = np.unique(np.concatenate(chosen), return_inverse=True)
    return lookup_arrays(rows, rng.permutation(SLOTS_PER_ROW * len(keys)).astype(np.int32)[rows])


def batches_of(job: Job) -> list[int]:
    """Samples of a part, and others around it."""
    part = job.data.batch_size / job.ranks.num_parts
    return sorted({max(2, round(part * scale)) for scale in SCALES})


class TimedModel:
    """A job's model and one batch for it, made at random."""

    def __init__(self, job: Job, num_dense: int, batch: int, device: torch.device) -> None:
        self.side = JobModel(job, num_dense, device)
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
        self.side.model.zero_grad(set_to_none=True)
        self._loss = self.side.loss(self.side.forward(self._dense, self._rows, {}, training=True), self._labels)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        torch.autograd.backward(self._loss)

    def up_to_backward(self) -> None:
        self.forward()
        self.backward()


def model_shapes(watch: Stopwatch, job: Job, num_dense: int) -> Iterator[KernelShape]:
    """Raises ConfigError for a model of sequences, whose time depends on their lengths."""
    for table in job.tables:
        if table.pooling == "none":
            raise ConfigError(
                f'table {table.name} has pooling = "none": the time of the model depends on the lengths of sequences, '
                "which are not known here, so this job has no estimate"
            )
    for batch in batches_of(job):
        timed, counts = TimedModel(job, num_dense, batch, watch.device), {"batch": float(batch)}
        yield KernelShape("model forward", counts, partial(watch.seconds, timed.forward))
        yield KernelShape("model backward", counts, partial(watch.seconds, timed.backward, timed.forward))
        yield KernelShape("model update", {}, partial(watch.seconds, partial(timed.side.step, 0), timed.up_to_backward))
    if job.ranks.num_parts > 1:
        for parts in PARTS:
            yield KernelShape(
                DENSE_SUMS,
                {"parts": float(parts)},
                partial(watch.seconds, sums(list(timed.side.model.parameters()), parts, watch.device)),
            )


def sums(weights: list[torch.nn.Parameter], parts: int, device: torch.device) -> Callable[[], object]:
    """Does what `SharedRunner` does with dense gradients between backward passes and the optimizer, without
    exchanges."""
    ranks = 2
    gradients = [torch.ones_like(weight) for weight in weights]
    layout = PartVector({str(place): weight for place, weight in enumerate(weights)}, parts, ranks, device)
    loss, total = torch.zeros((), device=device), torch.zeros_like(layout.own)

    def work() -> None:
        for part in range(parts):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            layout.take(part, loss)
        layout.add_up()
        sum_in_order(total.view(ranks, -1))
        layout.give(total)

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
        kernels=kernels | measured_overheads(device, threads),
    )


def measured_overheads(device: torch.device, threads: int) -> dict[str, KernelRates]:
    with TemporaryDirectory(prefix="rowcast-rates-") as folder:
        _, small = small_job(Path(folder), BATCHES[0], device.type, threads)
    rows = row_shapes(Stopwatch(device, threads), small)
    model = model_shapes(Stopwatch(device, threads, cold=False), small, NUM_DENSE)
    return overheads(device.type, threads, measured([*rows, *model]))


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
    except ConfigError as error:
        raise ConfigError(f"--device {device}: {error}") from None
    began_s = time.perf_counter()
    typer.echo("measuring; this takes about a minute")
    device_rates = measure(chosen, threads, job, num_dense, network_gbs)
    out.write_bytes(render(seal(device_rates)))
    typer.echo(f"{'kernel':<24}{'shapes':>8}{'mean error':>12}")
    for name, kernel in device_rates.kernels.items():
        if name not in OVERHEADS:
            typer.echo(f"{name:<24}{kernel.samples:>8}" + ("" if kernel.error is None else f"{kernel.error:>12.1%}"))
    told = ", ".join(f"{name} {1e3 * device_rates.kernels[name].terms.get('1', 0.0):.2f}" for name in OVERHEADS)
    typer.echo(f"ms of overhead a step: {told}")
    typer.echo(f"{out}: {len(device_rates.kernels)} rates, in {time.perf_counter() - began_s:.0f} s")
