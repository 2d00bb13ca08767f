"""Writes `report.json`, made from the counters that /metrics serves."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from rowcast.protocol.messages import DataDelay, RowCopies, TierTotals
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.format_numbers import LOST
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation, place_of_best
from rowcast.trainer.step.metrics import TrainerCounters

RECENT = 100  # losses in the average
# what the counters of all groups add up to, by the same names
COUNTED = ("lookups", "unique_rows", "rows_fetched", "rows_evicted", "rows_written_back", "rows_flushed")
EXCHANGED = (
    *("rows_sent", "rows_received", "bytes_sent", "bytes_received"),
    *("vector_bytes_sent", "vector_bytes_received"),
)
OF_EVALUATION = ("auc", "logloss", "is_own_loss", "accuracy", "normalized_entropy", "ranking", "means", "tasks")


class RankFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's figures, which the report adds up. A single trainer is rank 0."""

    rank: int
    samples: int  # of train steps
    rows_owned: int  # distinct rows of this rank's shard, summed over steps
    waited_for_rows_s: float
    waited_for_ranks_s: float  # until the others reached the same point, and during the transfer
    rows_sent: int  # to other ranks
    rows_received: int
    bytes_sent: int  # of these rows, of pooled vectors, and of the gradients of those received
    bytes_received: int
    vector_bytes_sent: int = 0  # of these, vectors' of tables that one rank owns whole, and their gradients'
    vector_bytes_received: int = 0
    device: str
    pids: dict[str, int]  # prefetcher, trainer


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's figures. Rows, bytes and look-ups are sums over ranks, unless a field says otherwise."""

    train_steps: int  # in the whole run
    # train steps of this process: fewer if it continued from a checkpoint, more if it repeated some
    steps: int
    eval_steps: int
    skipped_steps: int = 0  # of the whole run's: the model's own step left the dense weights as they were
    samples: int  # of train steps
    samples_per_s: float = 0.0  # samples / wall_s
    wall_s: float  # from the first step to the last barrier
    startup_s: float  # from the handshake to the first step
    loss: float | None  # mean of the last 100 train steps, or of all if there are fewer; None without steps
    first_loss: float | None = None  # of the run's first train step
    auc: float | None  # the last evaluation's; None without one
    logloss: float | None
    accuracy: float | None
    is_own_loss: bool = False  # `logloss` is the model's own loss
    normalized_entropy: float | None = None  # log loss over that of the labels' base rate
    ranking: dict[str, float] = {}  # the last evaluation's HR, NDCG and MRR at each k of eval.ranks, if there are ranks
    means: dict[str, float | None] = {}  # the last evaluation's sum over weight of each of the model's eval_names
    tasks: tuple[TaskEvaluation, ...] = msgspec.field(default=())  # each of several labels, by the last evaluation
    lookups: int
    unique_rows: int
    rows_fetched: int
    rows_evicted: int
    rows_written_back: int  # dirty victims and flushed rows
    rows_flushed: int  # at barriers
    hit_ratio: float | None = None  # distinct rows resident when planned / distinct rows; None without a look-up
    trainer_wait_s: float  # waiting for rows; of the rank that waited longest
    # process -> reason -> seconds, of the rank that waited longest for it; threads of a process wait in parallel
    waits_s: dict[str, dict[str, float]]
    # per step, by the device's clock, the mean over ranks; gather and fill run in parallel with the others
    phase_ms: dict[str, float]
    stall_share: float = 0.0  # trainer_wait_s / wall_s
    tier: TierTotals | None  # rows between memory and cold tier; None if the store has none
    row_copies: RowCopies = RowCopies()
    data_delay: DataDelay | None = None  # rank 0's, at the end; None without data.follow
    # 10^9 bytes of these rows a second, of each thread that shares them; None without rows
    read_gb_s: float | None = None
    write_gb_s: float | None = None
    bytes_to_device: int  # rows and arrays of plans
    bytes_from_device: int  # rows
    rank_imbalance: float  # rows of a train step that a rank owns, maximum over mean, averaged over steps
    ranks: tuple[RankFigures, ...]  # by rank
    table_bytes: int  # row records of all rows of all tables: what the device would hold without a cache
    cache_bytes: int  # row records of all slots
    staging_bytes: int  # rows in transit, in both directions
    plans_bytes: int  # arrays of `depth` + 2 plans
    device_bytes: int  # peak on the device: these three, and on a GPU all other memory
    host_bytes: int  # peak resident bytes of the prefetcher
    threads: int
    pinned: bool
    device: str
    versions: dict[str, str]  # rowcast, torch, numpy, python
    pids: dict[str, int]  # prefetcher, trainer; of rank 0
    finished: bool
    stopped_by: str | None  # what ended the run early; None if the data ended
    evaluations: tuple[Evaluation, ...] = ()  # of the whole run
    best_train_step: int | None = None  # of the evaluation with the lowest loss; None if none has a finite one
    ended_early: str = ""  # why, if eval.patience ended the run
    lines_lost: int = 0  # lines that stdout or stderr of the trainers could not take


def make_report(
    counters: TrainerCounters,
    *,
    evaluations: Sequence[Evaluation],
    prefetcher_waits_s: dict[str, float],
    device: str,
    pids: dict[str, int],
    **facts: Any,
) -> Report:
    """Makes the report of one rank. `facts`: the fields that no counter has."""
    none = Evaluation(train_step=0, auc=None, logloss=None, accuracy=None)
    last, place = evaluations[-1] if evaluations else none, place_of_best(evaluations)
    figures = RankFigures(
        rank=counters.rank,
        samples=counters.samples,
        rows_owned=counters.total("unique_rows"),
        waited_for_rows_s=counters.stalls["rows"],
        waited_for_ranks_s=counters.stalls["ranks"],
        device=device,
        pids=pids,
        **{name: counters.total(name) for name in EXCHANGED},
    )
    facts |= {name: counters.total(name) for name in COUNTED}
    report = Report(
        steps=counters.train_steps,
        eval_steps=counters.eval_steps,
        samples=counters.samples,
        trainer_wait_s=counters.stalls["rows"],
        waits_s={
            "prefetcher": prefetcher_waits_s,
            "trainer": {str(reason): seconds for reason, seconds in counters.stalls.items()},
        },
        phase_ms={name: 1e3 * seconds / max(counters.train_steps, 1) for name, seconds in counters.phases.items()},
        bytes_to_device=counters.total("row_bytes_to_device") + counters.plan_bytes_to_device,
        bytes_from_device=counters.total("row_bytes_from_device"),
        rank_imbalance=counters.mean_imbalance,
        ranks=(figures,),
        device=device,
        pids=pids,
        lines_lost=LOST.lines,
        evaluations=tuple(evaluations),
        best_train_step=None if place < 0 else evaluations[place].train_step,
        **{name: getattr(last, name) for name in OF_EVALUATION},
        **facts,
    )
    return report_of_all([report])


# of all ranks


# quantities that ranks divide; the other fields are the same on all, or rank 0's
ADDED = (
    *("samples", *COUNTED, "bytes_to_device", "bytes_from_device"),
    *("cache_bytes", "staging_bytes", "plans_bytes", "device_bytes", "host_bytes", "lines_lost"),
)


def report_of_all(ranks: Sequence[Report]) -> Report:
    """`ranks`: each rank's report, by rank. Reports may have different names."""
    added = msgspec.structs.replace(ranks[0], **sums(ranks, ADDED))
    unique_rows, wall_s = added.unique_rows, added.wall_s
    waited_s = max(rank.trainer_wait_s for rank in ranks)
    tiers = [rank.tier for rank in ranks if rank.tier is not None]
    copies = RowCopies(**sums([rank.row_copies for rank in ranks], RowCopies.__struct_fields__))
    return msgspec.structs.replace(
        added,
        samples_per_s=added.samples / wall_s if wall_s else 0.0,
        hit_ratio=(unique_rows - added.rows_fetched) / unique_rows if unique_rows else None,
        trainer_wait_s=waited_s,
        stall_share=waited_s / wall_s if wall_s else 0.0,
        waits_s={
            process: by_name(max, [rank.waits_s.get(process, {}) for rank in ranks]) for process in ranks[0].waits_s
        },
        phase_ms=by_name(fmean, [rank.phase_ms for rank in ranks]),
        tier=TierTotals(**sums(tiers, TierTotals.__struct_fields__)) if tiers else None,
        row_copies=copies,
        read_gb_s=copies.bytes_read / copies.read_s / 1e9 if copies.bytes_read else None,
        write_gb_s=copies.bytes_written / copies.write_s / 1e9 if copies.bytes_written else None,
        ranks=tuple(figures for rank in ranks for figures in rank.ranks),
    )


def sums(parts: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def by_name(put_together: Callable[[list[float]], float], parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: put_together([part.get(name, 0.0) for part in parts]) for name in parts[0]}


# the file


def write_report(path: Path, report: Report) -> None:
    """Writes JSON atomically: `path` holds the old report or the whole new one. Raises RowcastError."""
    try:
        write_durably(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise RowcastError(
            f"{path}: cannot write the report ({error.strerror}); free space there or make it writable"
        ) from None


def read_report(path: Path) -> Report:
    """Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
