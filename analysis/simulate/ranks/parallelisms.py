"""Computes the traffic of other ways to divide the tables, for the same batches.

rows        each distinct row that a rank looks up and does not own, and its gradient back: what ranks do
by table    each table on one rank, which sends pooled rows: one for each sample and feature, and their gradients back
by column   the same, with tables cut into columns, so that no rank holds a whole wide table
mixed       rows or columns, whichever is less for a table

Rows that are not pooled count as one for each look-up. Samples of the rank that holds a table do not travel. Pooled
rows are fp32. Adding pooled rows of several owners of one table is left out: its bits depend on the number of ranks.
"""

import heapq
from collections.abc import Sequence

import msgspec
import numpy as np

from rowcast.analysis.simulate.ranks.counts import GRADIENT_BYTES, RunCounts
from rowcast.job.tables import ITEM_BYTES, GroupSpec
from rowcast.runtime.arrays import F64, I64


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that travel, rows or pooled rows and gradients together."""

    mean: float  # that a rank receives in a train step, which is what it sends on average
    most: float | None  # that one rank sends or receives, in the mean over the steps


class Parallelisms(msgspec.Struct, frozen=True, kw_only=True):
    rows: Bytes
    by_table: Bytes
    by_column: Bytes
    mixed: Bytes  # its `most` is None: it depends on where the columns lie
    pooled_tables: list[str]  # the tables with columns that "mixed" sends


def parallelisms(groups: Sequence[GroupSpec], counts: RunCounts) -> Parallelisms:
    """Averages over the train steps. There must be at least one."""
    steps = [step for step in counts.steps if step.kind == "train"]
    count, tables = counts.count, [(group, table) for group in groups for table in group.tables]
    column_bytes = [ITEM_BYTES[table.dtype] + GRADIENT_BYTES for _, table in tables]
    dims = np.array([table.embedding_dim for _, table in tables])
    rows = np.mean([step.travelling for step in steps], axis=0) * dims * column_bytes / count
    elements = np.mean([step.vectors for step in steps], axis=0) * dims  # pooled, of the whole batch
    travels = 2 * GRADIENT_BYTES * (count - 1) / count
    pooled = elements * travels / count
    both = np.mean([(step.row_bytes + step.gradient_bytes).sum(axis=1) for step in steps], axis=0)  # [2, N]
    mean = float(pooled.sum())
    return Parallelisms(
        rows=Bytes(mean=float(rows.sum()), most=float(both.max())),
        by_table=Bytes(mean=mean, most=most_of(elements, count)),
        by_column=Bytes(mean=mean, most=most_of(columns(elements, dims, count), count)),
        mixed=Bytes(mean=float(np.minimum(rows, pooled).sum()), most=None),
        pooled_tables=[table.name for (_, table), less in zip(tables, pooled < rows, strict=True) if less],
    )


def columns(elements: F64, dims: I64, count: int) -> F64:
    """The pieces of tables that are cut into as many slices of columns as there are ranks, or as they have columns."""
    cuts = [np.arange(n + 1) * dim // n / dim for dim in dims.tolist() for n in (min(dim, count),)]
    return np.concatenate([np.diff(cut) * own for cut, own in zip(cuts, elements, strict=True)])


def most_of(pieces: F64, count: int) -> float:
    """What the busiest rank sends or receives if the largest piece goes to the rank with the least, and so on: pooled
    rows of its pieces for the samples of others, and gradients of its samples for the pieces of others."""
    loads = [0.0] * count
    for piece in sorted(pieces.tolist(), reverse=True):
        heapq.heapreplace(loads, loads[0] + piece)
    most = max(loads)
    return float(GRADIENT_BYTES * (most * (count - 1) + pieces.sum() - most) / count)
