"""What all ranks of a simulated run exchange and move, step by step and in the mean, and by other divisions of tables.

Rows and bytes are those that travel between ranks. What a rank keeps for itself is copied, but it takes no link.

rows        each distinct row that a rank looks up and does not own, and its gradient back: what ranks do
by table    each table on one rank, which sends pooled rows: one for each sample and feature, and their gradients back
by column   the same, with tables cut into columns, so that no rank holds a whole wide table

Rows that are not pooled count as one for each look-up. Samples of the rank that holds a table do not travel. Pooled
rows are fp32. Adding pooled rows of several owners of one table is left out: its bits depend on the number of ranks.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rowcast.analysis.scan.shares import GroupShares
from rowcast.job.schema import Horizon, Job
from rowcast.job.tables import ITEM_BYTES, GroupSpec
from rowcast.protocol.batch import Kind, ScheduledBatch
from rowcast.runtime.arrays import F64, I64, Bools

GRADIENT_BYTES = 4  # of a column: gradients and pooled rows travel as fp32
SENT, RECEIVED = 0, 1  # as seen from the rank
MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExchange:
    """One step of N ranks, M parts and, over all groups, T tables."""

    step: int
    kind: Kind
    num_lookups: int
    part_rows: I64  # [M] distinct rows of each part
    owner_rows: I64  # [N] distinct rows of the whole batch in each shard
    rows: I64  # [2, N] sent, received
    late: I64  # [N] of the received rows: used by some rank in the step before, so they cannot travel early
    row_bytes: I64  # [2, N]
    gradient_bytes: I64  # [2, N]; 0 in an evaluation
    vectors: I64  # [T] pooled rows of each table, or look-ups where they are not pooled


def step_exchange(
    groups: Sequence[GroupSpec], scheduled: ScheduledBatch, shares: Sequence[GroupShares]
) -> StepExchange:
    trains = scheduled.kind == "train"
    by_group = [travelled(own.exchanged) for own in shares]
    row_bytes = [group.embedding_dim * ITEM_BYTES[group.parts[0].dtype] for group in groups]
    gradient_bytes = [group.embedding_dim * GRADIENT_BYTES * trains for group in groups]
    return StepExchange(
        step=scheduled.step,
        kind=scheduled.kind,
        num_lookups=len(scheduled.batch.ids),
        part_rows=total(own.part_rows for own in shares),
        owner_rows=total(own.owner_rows for own in shares),
        rows=total(by_group),
        late=total(own.late for own in shares),
        row_bytes=total(rows * nbytes for rows, nbytes in zip(by_group, row_bytes, strict=True)),
        # they go back where the rows came from
        gradient_bytes=total(rows[::-1] * nbytes for rows, nbytes in zip(by_group, gradient_bytes, strict=True)),
        vectors=np.concatenate([own.vectors for own in shares]),
    )


def total(arrays: Iterable[I64]) -> I64:
    found: I64 = np.sum(list(arrays), axis=0)
    return found


def travelled(exchanged: I64) -> I64:
    """`GroupShares.exchanged` -> [2, N] rows sent and received."""
    others = exchanged - np.diag(np.diag(exchanged))
    return np.stack([others.sum(axis=0), others.sum(axis=1)])


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that travel, rows or pooled rows and gradients together."""

    mean: float  # that a rank receives in a train step, which is what it sends on average
    most: float  # that one rank sends or receives, in the mean over the steps


class Parallelisms(msgspec.Struct, frozen=True, kw_only=True):
    rows: Bytes
    by_table: Bytes
    by_column: Bytes


def parallelisms(groups: Sequence[GroupSpec], steps: Sequence[StepExchange], count: int) -> Parallelisms:
    """Averages over the train steps, of which there must be at least one."""
    tables = [table for group in groups for table in group.tables]
    dims = np.array([table.embedding_dim for table in tables])
    elements = np.mean([step.vectors for step in steps], axis=0) * dims  # pooled, of the whole batch
    pooled = float(elements.sum()) * 2 * GRADIENT_BYTES * (count - 1) / count**2
    both = np.mean([step.row_bytes + step.gradient_bytes for step in steps], axis=0)  # [2, N]
    return Parallelisms(
        rows=Bytes(mean=float(both[RECEIVED].mean()), most=float(both.max())),
        by_table=Bytes(mean=pooled, most=most_of(elements, count)),
        by_column=Bytes(mean=pooled, most=most_of(columns(elements, dims, count), count)),
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


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A count of each rank, or part, at each step."""

    mean: float  # over all steps and ranks
    most: int  # of one rank at one step
    imbalance: float | None  # the largest over the mean of a train step, in the mean; None if all are 0


class RankArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of each step and rank."""

    step: list[int]
    kind: list[str]  # train | eval
    owner_rows: list[list[int]]
    rows_sent: list[list[int]]
    rows_received: list[list[int]]
    rows_late: list[list[int]]
    rows_fetched: list[list[int]]
    rows_written_back: list[list[int]]  # dirty victims


class RanksSimulation(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. If `skipped` says why it cannot run, the fields below it are None."""

    ranks: int
    parts: int
    batch_size: int  # of all ranks together
    shuffle: str | None
    policy: str
    capacity: str | int  # of a rank
    horizon: Horizon
    skipped: str | None = None
    capacity_rows: int | None = None  # slots of all groups, in the mean over ranks
    steps: int | None = None  # train steps
    eval_steps: int | None = None
    lookups: int | None = None
    # distinct rows of a step: of a part, of the whole batch, of those in a rank's shard
    part_rows: Spread | None = None
    batch_rows: float | None = None
    owner_rows: Spread | None = None
    # rows that a rank receives from others in a step; as many gradients leave in a train step
    rows_received: Spread | None = None
    rows_late: float | None = None  # of these, in the mean: used by some rank in the step before
    row_bytes: float | None = None  # received per rank and step
    gradient_bytes: float | None = None  # sent by a rank in a train step
    rows_fetched: Spread | None = None
    rows_written_back: Spread | None = None  # dirty victims
    bytes_fetched: int | None = None  # row records of the whole run, all ranks
    bytes_written_back: int | None = None  # flushed rows included
    rows_flushed: int | None = None  # by barriers, all ranks
    parallelisms: Parallelisms | None = None
    per_step: RankArrays | None = None


def make_result(
    job: Job,
    groups: tuple[GroupSpec, ...],
    steps: Sequence[StepExchange],
    fetched: I64,
    written_back: I64,
    flushed: I64,
    *,
    capacity_rows: int,
    per_step: bool,
) -> RanksSimulation:
    """`fetched` and `written_back`: [P, N, G] rows of each step. `flushed`: [N, G] rows that barriers wrote back."""
    trains = np.array([step.kind == "train" for step in steps])
    received = np.array([step.rows[RECEIVED] for step in steps])
    late, owner_rows = (np.array([getattr(step, name) for step in steps]) for name in ("late", "owner_rows"))
    record_bytes = np.array([group.record_bytes for group in groups])
    train_steps = [step for step in steps if step.kind == "train"]
    return msgspec.structs.replace(
        outline(job),
        capacity_rows=capacity_rows,
        steps=len(train_steps),
        eval_steps=len(steps) - len(train_steps),
        lookups=sum(step.num_lookups for step in steps),
        part_rows=spread(np.array([step.part_rows for step in steps]), trains),
        batch_rows=float(owner_rows.sum(axis=1).mean()),
        owner_rows=spread(owner_rows, trains),
        rows_received=spread(received, trains),
        rows_late=float(late.mean()),
        row_bytes=float(np.mean([step.row_bytes[RECEIVED] for step in steps])),
        gradient_bytes=float(np.mean([step.gradient_bytes[SENT] for step in train_steps])) if train_steps else 0.0,
        rows_fetched=spread(fetched.sum(axis=2), trains),
        rows_written_back=spread(written_back.sum(axis=2), trains),
        bytes_fetched=int(fetched.sum(axis=(0, 1)) @ record_bytes),
        bytes_written_back=int((written_back.sum(axis=(0, 1)) + flushed.sum(axis=0)) @ record_bytes),
        rows_flushed=int(flushed.sum()),
        parallelisms=parallelisms(groups, train_steps, job.ranks.count) if train_steps else None,
        per_step=rank_arrays(steps, fetched, written_back) if per_step else None,
    )


def outline(job: Job, skipped: str | None = None) -> RanksSimulation:
    return RanksSimulation(
        ranks=job.ranks.count,
        parts=job.ranks.num_parts,
        batch_size=job.data.batch_size,
        shuffle=job.data.whole_order,
        policy=job.cache.policy,
        capacity=job.cache.capacity,
        horizon=job.lookahead.horizon,
        skipped=skipped,
    )


def spread(values: I64, trains: Bools) -> Spread:
    """`values`: [P, N]."""
    means = values.mean(axis=1)
    counted = trains & (means > 0)
    imbalance = float((values.max(axis=1)[counted] / means[counted]).mean()) if counted.any() else None
    return Spread(mean=float(values.mean()), most=int(values.max()), imbalance=imbalance)


def rank_arrays(steps: Sequence[StepExchange], fetched: I64, written_back: I64) -> RankArrays:
    return RankArrays(
        step=[step.step for step in steps],
        kind=[step.kind for step in steps],
        owner_rows=[step.owner_rows.tolist() for step in steps],
        rows_sent=[step.rows[SENT].tolist() for step in steps],
        rows_received=[step.rows[RECEIVED].tolist() for step in steps],
        rows_late=[step.late.tolist() for step in steps],
        rows_fetched=fetched.sum(axis=2).tolist(),
        rows_written_back=written_back.sum(axis=2).tolist(),
    )
