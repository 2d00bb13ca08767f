"""Defines the results of `simulate --ranks`, one per setting, and prints their tables."""

from collections.abc import Sequence

import msgspec
import numpy as np
from rich.table import Table

from rowcast.analysis.simulate.ranks.counts import RECEIVED, SENT, RunCounts
from rowcast.analysis.simulate.ranks.parallelisms import Parallelisms, parallelisms
from rowcast.job.schema import Horizon, Job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.arrays import I64

MB = 1e6
COUNTS = (
    *("ranks", "parts", "batch", "rows of\na part", "rows of\nthe batch", "rows of\nan owner", "max over\nmean"),
    *("rows\nreceived", "of these\nlate", "rows\nfetched", "max over\nmean", "written\nback"),
)


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
    ranks_per_host: int | None = None
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
    rows_early: float | None = None  # of these, in the mean: used by no rank in the step before
    rows_late: float | None = None
    rows_across_hosts: float | None = None  # of these
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
    counts: RunCounts,
    flushed: I64,
    *,
    on_host: int,
    capacity_rows: int,
    per_step: bool,
) -> RanksSimulation:
    """`flushed`: [N, G] rows that barriers wrote back."""
    steps = counts.steps
    trains = np.array([step.kind == "train" for step in steps])
    rows, row_bytes = (np.array([getattr(step, name) for step in steps]) for name in ("rows", "row_bytes"))
    gradient_bytes = np.array([step.gradient_bytes for step in steps])[trains]
    received, late = rows[:, RECEIVED].sum(axis=1), np.array([step.late for step in steps])
    fetched, written_back = np.array(counts.fetched), np.array(counts.written_back)
    owner_rows = np.array([step.owner_rows for step in steps])
    record_bytes = np.array([group.record_bytes for group in groups])
    return msgspec.structs.replace(
        outline(job),
        ranks_per_host=on_host,
        capacity_rows=capacity_rows,
        steps=int(trains.sum()),
        eval_steps=int((~trains).sum()),
        lookups=sum(step.num_lookups for step in steps),
        part_rows=spread(np.array([step.part_rows for step in steps]), trains),
        batch_rows=float(owner_rows.sum(axis=1).mean()),
        owner_rows=spread(owner_rows, trains),
        rows_received=spread(received, trains),
        rows_early=float((received - late).mean()),
        rows_late=float(late.mean()),
        rows_across_hosts=float(rows[:, RECEIVED, 1].mean()),
        row_bytes=float(row_bytes[:, RECEIVED].sum(axis=1).mean()),
        gradient_bytes=float(gradient_bytes[:, SENT].sum(axis=1).mean()) if trains.any() else 0.0,
        rows_fetched=spread(fetched.sum(axis=2), trains),
        rows_written_back=spread(written_back.sum(axis=2), trains),
        bytes_fetched=int(fetched.sum(axis=(0, 1)) @ record_bytes),
        bytes_written_back=int((written_back.sum(axis=(0, 1)) + flushed.sum(axis=0)) @ record_bytes),
        rows_flushed=int(flushed.sum()),
        parallelisms=parallelisms(groups, counts) if trains.any() else None,
        per_step=rank_arrays(counts) if per_step else None,
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


def spread(values: I64, trains: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Spread:
    """`values`: [P, N]."""
    means = values.mean(axis=1)
    counted = trains & (means > 0)
    imbalance = float((values.max(axis=1)[counted] / means[counted]).mean()) if counted.any() else None
    return Spread(mean=float(values.mean()), most=int(values.max()), imbalance=imbalance)


def rank_arrays(counts: RunCounts) -> RankArrays:
    steps = counts.steps
    rows = [step.rows.sum(axis=1).tolist() for step in steps]
    return RankArrays(
        step=[step.step for step in steps],
        kind=[step.kind for step in steps],
        owner_rows=[step.owner_rows.tolist() for step in steps],
        rows_sent=[own[SENT] for own in rows],
        rows_received=[own[RECEIVED] for own in rows],
        rows_late=[step.late.tolist() for step in steps],
        rows_fetched=[own.sum(axis=1).tolist() for own in counts.fetched],
        rows_written_back=[own.sum(axis=1).tolist() for own in counts.written_back],
    )


def counts_table(results: Sequence[RanksSimulation]) -> Table:
    """The counts of a mean step: those of the batch over all ranks, the others for one rank."""
    table = new_table(COUNTS)
    for own in results:
        spreads = (own.part_rows, own.owner_rows, own.rows_received, own.rows_fetched, own.rows_written_back)
        of_part, of_owner, received, fetched, written_back = (each for each in spreads if each is not None)
        late = (own.rows_late or 0) / received.mean if received.mean else None
        table.add_row(
            *(f"{value:,}" for value in (own.ranks, own.parts, own.batch_size)),
            *(f"{value:,.0f}" for value in (of_part.mean, own.batch_rows or 0, of_owner.mean)),
            ratio(of_owner.imbalance),
            f"{received.mean:,.0f}",
            "" if late is None else f"{late:.0%}",
            f"{fetched.mean:,.0f}",
            ratio(fetched.imbalance),
            f"{written_back.mean:,.0f}",
        )
    return table


def bytes_table(results: Sequence[RanksSimulation]) -> Table:
    """MB that a rank receives in a train step, rows or pooled rows and gradients together, and what the busiest sends
    or receives."""
    table = new_table(["ranks", "rows", "most", "by table", "most", "by column", "most", "mixed", "tables pooled"])
    for own in results:
        ways = own.parallelisms
        if ways is not None:
            pairs = [(way.mean, way.most or 0.0) for way in (ways.rows, ways.by_table, ways.by_column)]
            cells = [f"{value / MB:,.3g}" for pair in pairs for value in pair]
            table.add_row(f"{own.ranks:,}", *cells, f"{ways.mixed.mean / MB:,.3g}", str(len(ways.pooled_tables)))
    return table


def new_table(headings: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
