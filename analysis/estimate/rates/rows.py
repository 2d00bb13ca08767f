"""Times look-ups, each row optimizer's updates, and moves of rows, as in a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.analysis.estimate.rates.kernel import Kernel, Shape
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.job.row_optimizers import ROW_OPTIMIZERS, SparseOptimizer
from rowcast.job.tables import record_parts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, part_of, rule_at
from rowcast.trainer.kernels.lookups import group_lookup, lookup_arrays, moved

FEATURES = 26
SKEW = 3  # of the look-ups of a feature: the exponent of a uniform random number
SLOTS_PER_ROW = 2  # rows of other batches are between those of a step
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


def row_kernels(watch: Stopwatch, kernels: Kernels) -> Iterator[Kernel]:
    shapes, rng = SHAPES[watch.device.type], np.random.default_rng(0)
    drawn = [(batch, random_lookup(batch, share, rng)) for batch in shapes.batches for share in shapes.shares]
    lookups = [moved(group_lookup(arrays, batch), watch.device) for batch, arrays in drawn]
    most = max(len(lookup.slots) for lookup in lookups) * max(shapes.dims)
    values = torch.randn(most, device=watch.device)

    def update(kind: str, dim: int, lookup: GroupLookup) -> float:
        rows = random_rows(kind, dim, lookup, watch.device)
        grads = values[: len(lookup.slots) * dim].view(-1, dim)
        rule = rule_at(settings_of(kind), 2)
        return watch.seconds(partial(kernels.update, rows, grads, lookup, None, rule))

    def look_up(kind: str, dim: int, lookup: GroupLookup) -> float:
        return watch.seconds(partial(kernels.lookup, random_rows(kind, dim, lookup, watch.device), lookup, None))

    def made(time: Callable[[str, int, GroupLookup], float], kind: str) -> list[Shape]:
        return [
            Shape(row_counts(kind, dim, lookup), partial(time, kind, dim, lookup))
            for dim in shapes.dims
            for lookup in lookups
        ]

    for kind in ROW_OPTIMIZERS:
        yield Kernel(name=f"update {kind}", shapes=made(update, kind), terms=UPDATE_TERMS)
    yield Kernel(name="lookup", shapes=[*made(look_up, "sgd"), *made(look_up, "adam")], terms=LOOKUP_TERMS)


def settings_of(kind: str) -> SparseOptimizer:
    return ROW_OPTIMIZERS[kind].settings(kind=kind, lr=0.01, eps=1e-8)


def row_counts(kind: str, dim: int, lookup: GroupLookup) -> dict[str, float]:
    _, record_bytes = record_parts(settings_of(kind), "fp32", dim)
    return {
        "lookups": float(len(lookup.slots)),
        "rows": float(len(lookup.unique_slots)),
        "dim": float(dim),
        "record_floats": record_bytes / 4,
    }


def random_rows(kind: str, dim: int, lookup: GroupLookup, device: torch.device) -> RecordViews:
    parts, record_bytes = record_parts(settings_of(kind), "fp32", dim)
    records = torch.zeros(SLOTS_PER_ROW * len(lookup.unique_slots), record_bytes // 4, device=device)
    views = {part.name: part_of(records, part) for part in parts}
    return RecordViews(weight=views.pop("weight"), master=None, states=tuple(views.values()))


def random_lookup(batch: int, share: float, rng: np.random.Generator) -> LookupArrays[npt.NDArray[Any]]:
    """One look-up in each bag. The features' tables have from few rows to many, and few rows have most look-ups."""
    most = np.geomspace(2, 4 * batch * share * 4, FEATURES)  # rows of each table
    chosen = [(rng.random(batch) ** SKEW * rows).astype(np.int64) + (number << 32) for number, rows in enumerate(most)]
    keys, rows = np.unique(np.concatenate(chosen), return_inverse=True)
    return lookup_arrays(rows, rng.permutation(SLOTS_PER_ROW * len(keys)).astype(np.int32)[rows])


def move_kernels(watch: Stopwatch) -> Iterator[Kernel]:
    shapes, fill = SHAPES[watch.device.type], watch.streams.compute

    def move(count: int, width: int, *, into_slots: bool) -> float:
        records = torch.zeros(4 * count, width, device=watch.device)
        staged = torch.zeros(count, width, device=watch.device)
        slots = torch.randperm(4 * count)[:count].to(watch.device)
        if into_slots:
            return watch.seconds(partial(fill.scatter, staged, slots, records))
        return watch.seconds(partial(fill.gather, records, slots.int(), staged))

    def copy(nbytes: int, *, into: bool) -> float:
        """Between the ring, which is page-locked where there is a device, and staging."""
        ring: Tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
        staging = torch.zeros(nbytes, dtype=torch.uint8, device=watch.device)
        source, out = (ring, staging) if into else (staging, ring)
        return watch.seconds(partial(fill.copy, source, out))

    for name, into_slots in (("gather", False), ("scatter", True)):
        moves = [
            Shape(
                {"rows": float(count), "record_floats": float(width)},
                partial(move, count, width, into_slots=into_slots),
            )
            for width in shapes.record_floats
            for count in shapes.moved_rows
        ]
        yield Kernel(name=name, shapes=moves, terms=MOVE_TERMS)
    for name, into in (("copy in", True), ("copy out", False)):
        copies = [Shape({"bytes": float(nbytes)}, partial(copy, nbytes, into=into)) for nbytes in shapes.copied_bytes]
        yield Kernel(name=name, shapes=copies, terms=COPY_TERMS)
