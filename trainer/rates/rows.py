"""Times look-ups and row updates of each row optimizer, and the moves of rows, as a step makes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rowcast.job.device_rates import KernelRates
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import SparseOptimizer
from rowcast.job.tables import record_parts
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, Rule
from rowcast.trainer.kernels.chunks import Chunks, cut_long_rows
from rowcast.trainer.kernels.record_views import part_of
from rowcast.trainer.kernels.self_check import moved
from rowcast.trainer.rates.fit import Sample, fitted
from rowcast.trainer.rates.stopwatch import Stopwatch

FEATURES = 26
SKEW = 3  # of the look-ups of a feature: the exponent of a uniform random number
SLOTS_PER_ROW = 2  # rows of other batches lie between those of a step
LOOKUP_TERMS = ("1", "lookups", "lookups*dim", "rows*dim")
UPDATE_TERMS = ("1", "lookups", "lookups*dim", "rows", "rows*record_floats")
MOVE_TERMS = ("1", "rows", "rows*record_floats")
COPY_TERMS = ("1", "bytes")


@dataclass(frozen=True, slots=True)
class RowShapes:
    dims: tuple[int, ...]
    batches: tuple[int, ...]
    shares: tuple[float, ...]  # distinct rows of a step's look-ups
    moved_rows: tuple[int, ...]
    record_floats: tuple[int, ...]
    copied_bytes: tuple[int, ...]


SHAPES = {
    "cpu": RowShapes(
        dims=(8, 16, 24, 64),
        batches=(128, 512, 2048, 4096),
        shares=(0.1, 0.5),
        moved_rows=(300, 1000, 5000, 20_000),
        record_floats=(8, 16, 32, 64, 128, 192),
        copied_bytes=(10**4, 10**5, 10**6, 4 * 10**6, 16 * 10**6),
    ),
    "cuda": RowShapes(
        dims=(16, 64, 128),
        batches=(512, 4096, 16_384, 65_536),
        shares=(0.1, 0.5),
        moved_rows=(1000, 10_000, 100_000),
        record_floats=(16, 64, 128, 256),
        copied_bytes=(10**5, 10**6, 10**7, 10**8),
    ),
}


def row_kernels(watch: Stopwatch, kernels: Kernels) -> Iterator[tuple[str, KernelRates]]:
    shapes, rng = SHAPES[watch.device.type], np.random.default_rng(0)
    lookups = [random_lookup(batch, share, rng) for batch in shapes.batches for share in shapes.shares]
    on_device = [moved(lookup, watch.device) for lookup in lookups]
    looked_up: list[Sample] = []
    for kind in ROW_OPTIMIZERS:
        updated = []
        for dim in shapes.dims:
            for lookup in on_device:
                rows, counts = random_rows(kind, dim, lookup, watch.device)
                grads = torch.randn(len(lookup.slots), dim, device=watch.device)
                rule = Rule(kind=kind, lr=0.01, eps=1e-8, betas=(0.9, 0.999), step=3)
                update = partial(kernels.update, rows, grads, lookup, None, rule)
                updated.append(Sample(counts, watch.seconds(update)))
                if kind in ("sgd", "adam"):
                    looked_up.append(Sample(counts, watch.seconds(partial(kernels.lookup, rows, lookup, None))))
        yield f"update {kind}", fitted(updated, UPDATE_TERMS)
    yield "lookup", fitted(looked_up, LOOKUP_TERMS)


def random_rows(kind: str, dim: int, lookup: GroupLookup, device: torch.device) -> tuple[RecordViews, dict[str, float]]:
    parts, record_bytes = record_parts(SparseOptimizer(kind=kind, lr=0.01, eps=1e-8), "fp32", dim)
    records = torch.zeros(SLOTS_PER_ROW * len(lookup.unique_slots), record_bytes // 4, device=device)
    views = {part.name: part_of(records, part) for part in parts}
    counts = {
        "lookups": float(len(lookup.slots)),
        "rows": float(len(lookup.unique_slots)),
        "dim": float(dim),
        "record_floats": record_bytes / 4,
    }
    return RecordViews(weight=views.pop("weight"), master=None, states=tuple(views.values())), counts


def random_lookup(batch: int, share: float, rng: np.random.Generator) -> GroupLookup:
    """One look-up in each bag. The features' tables have from few rows to many, and few rows have most look-ups."""
    most = np.geomspace(2, 4 * batch * share * 4, FEATURES)  # rows of each table
    chosen = [(rng.random(batch) ** SKEW * rows).astype(np.int64) + (number << 32) for number, rows in enumerate(most)]
    _, inverse, uses = np.unique(np.concatenate(chosen), return_inverse=True, return_counts=True)
    places = rng.permutation(SLOTS_PER_ROW * len(uses))[: len(uses)].astype(np.int32)
    segments = np.concatenate([[0], np.cumsum(uses)]).astype(np.int32)
    return GroupLookup(
        batch_size=batch,
        slots=torch.from_numpy(places[inverse]),
        unique_slots=torch.from_numpy(places),
        segment_offsets=torch.from_numpy(segments),
        bag_order=torch.from_numpy(np.argsort(inverse, kind="stable").astype(np.int32)),
        chunks=Chunks(*map(torch.from_numpy, cut_long_rows(segments))),
    )


def move_kernels(watch: Stopwatch) -> Iterator[tuple[str, KernelRates]]:
    shapes, fill = SHAPES[watch.device.type], watch.streams.compute
    gathered, scattered = [], []
    for width in shapes.record_floats:
        for count in shapes.moved_rows:
            records = torch.zeros(4 * count, width, device=watch.device)
            staged = torch.zeros(count, width, device=watch.device)
            slots = torch.randperm(4 * count)[:count].to(watch.device)
            counts = {"rows": float(count), "record_floats": float(width)}
            gather = partial(fill.gather, records, slots.int(), staged)
            gathered.append(Sample(counts, watch.seconds(gather)))
            scattered.append(Sample(counts, watch.seconds(partial(fill.scatter, staged, slots, records))))
    yield "gather", fitted(gathered, MOVE_TERMS)
    yield "scatter", fitted(scattered, MOVE_TERMS)
    yield "copy in", fitted([copied(watch, nbytes, into=True) for nbytes in shapes.copied_bytes], COPY_TERMS)
    yield "copy out", fitted([copied(watch, nbytes, into=False) for nbytes in shapes.copied_bytes], COPY_TERMS)


def copied(watch: Stopwatch, nbytes: int, *, into: bool) -> Sample:
    """Between the ring, which is page-locked where there is a device, and staging."""
    ring: Tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
    staging = torch.zeros(nbytes, dtype=torch.uint8, device=watch.device)
    source, out = (ring, staging) if into else (staging, ring)
    return Sample({"bytes": float(nbytes)}, watch.seconds(partial(watch.streams.compute.copy, source, out)))
