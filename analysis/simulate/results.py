"""Defines the result of each simulated setting and prints a table of them. Names are those of report.json."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from rowcast.analysis.simulate.grid import Setting
from rowcast.analysis.simulate.moves import Moves
from rowcast.analysis.simulate.recording import RunRecording
from rowcast.analysis.simulate.tier_moves import TierMoves
from rowcast.job.schema import Horizon
from rowcast.prefetcher.planner.level import Slots
from rowcast.runtime.arrays import I64
from rowcast.runtime.telemetry.format_numbers import PrintableConsole, percent

MIB = 2**20
FILE_WIDTH = 120  # if the output is not a terminal
HEADINGS = [
    *("capacity\nin rows", "policy", "horizon", "rows\nfetched", "written\nback"),
    *("MiB\nin", "MiB\nout", "hit\nratio", "to the\nbound"),
]
TIER_HEADINGS = ["memory\nin rows", "enter\nmemory", "from\ncold", "to the\nbound"]


class StepArrays(msgspec.Struct, frozen=True, kw_only=True):
    step: list[int]
    kind: list[str]  # train | eval
    rows_fetched: list[int]
    rows_evicted: list[int]
    rows_written_back: list[int]  # dirty victims
    # what the memory tier does; None if the store has no tier
    rows_entered: list[int] | None = None
    rows_from_cold: list[int] | None = None
    rows_left: list[int] | None = None


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one setting. `skipped`: why it cannot run; all counts are then None."""

    policy: str
    capacity: str | int  # as requested
    capacity_rows: int | None = None  # slots of all groups
    horizon: Horizon | None  # None: the policy looks at no future, or at all of it
    batch_size: int
    shuffle: str | None = None  # with data.order, if there is one; None: the order is that of a trace
    skipped: str | None = None
    steps: int | None = None  # training steps
    eval_steps: int | None = None
    lookups: int | None = None
    unique_rows: int | None = None
    rows_fetched: int | None = None
    rows_evicted: int | None = None
    rows_written_back: int | None = None  # dirty victims and flushed rows
    rows_flushed: int | None = None  # by the barrier at the end
    bytes_fetched: int | None = None  # row records
    bytes_written_back: int | None = None
    hit_ratio: float | None = None  # 1 - rows_fetched / unique_rows; None without look-ups
    bound_rows_fetched: int | None = None  # with the whole future known
    ratio_to_bound: float | None = None
    memory: str | int | None = None  # store.memory, as requested; None here and below: the store has no memory tier
    memory_rows: int | None = None  # slots of the tier, of all groups
    rows_entered: int | None = None  # the tier
    rows_from_cold: int | None = None  # how many of these the cold tier gives; the others were never trained
    rows_left: int | None = None  # the tier
    bytes_from_cold: int | None = None  # row records
    bound_rows_from_cold: int | None = None  # with the whole future known
    cold_ratio_to_bound: float | None = None
    per_step: StepArrays | None = None


def make_result(
    recording: RunRecording,
    setting: Setting,
    slots: Sequence[Slots],
    memory: str | int | None,
    moves: Moves,
    bound: Moves,
    *,
    per_step: bool,
) -> Simulation:
    """`slots`: of each level, from the device down."""
    bound_rows, record_bytes = int(bound.fetched.sum()), np.array([group.record_bytes for group in recording.groups])
    written_back = moves.written_back.sum(axis=0) + moves.flushed
    fetched, unique_rows = moves.fetched.sum(axis=0), recording.unique_rows
    rows_fetched = int(fetched.sum())
    return msgspec.structs.replace(
        outline(setting),
        capacity_rows=sum(slots[0]),
        steps=recording.num_train,
        eval_steps=len(recording) - recording.num_train,
        lookups=recording.num_lookups,
        unique_rows=unique_rows,
        rows_fetched=rows_fetched,
        rows_evicted=int(moves.evicted.sum()),
        rows_written_back=int(written_back.sum()),
        rows_flushed=int(moves.flushed.sum()),
        bytes_fetched=int(fetched @ record_bytes),
        bytes_written_back=int(written_back @ record_bytes),
        hit_ratio=1 - rows_fetched / unique_rows if unique_rows else None,
        bound_rows_fetched=bound_rows,
        ratio_to_bound=rows_fetched / bound_rows if bound_rows else None,
        per_step=step_arrays(recording, moves) if per_step else None,
        **tier_counts(slots, memory, moves.tier, bound.tier, record_bytes),
    )


def tier_counts(
    slots: Sequence[Slots], memory: str | int | None, tier: TierMoves | None, least: TierMoves | None, record_bytes: I64
) -> dict[str, Any]:
    if tier is None or least is None:
        return {}
    from_cold, bound_rows = tier.from_cold.sum(axis=0), int(least.from_cold.sum())
    return {
        "memory": memory,
        "memory_rows": sum(slots[1]),
        "rows_entered": int(tier.entered.sum()),
        "rows_from_cold": int(from_cold.sum()),
        "rows_left": int(tier.left.sum()),
        "bytes_from_cold": int(from_cold @ record_bytes),
        "bound_rows_from_cold": bound_rows,
        "cold_ratio_to_bound": int(from_cold.sum()) / bound_rows if bound_rows else None,
    }


def step_arrays(recording: RunRecording, moves: Moves) -> StepArrays:
    return StepArrays(
        step=[step.scheduled.step for step in recording.steps],
        kind=[step.scheduled.kind for step in recording.steps],
        rows_fetched=moves.fetched.sum(axis=1).tolist(),
        rows_evicted=moves.evicted.sum(axis=1).tolist(),
        rows_written_back=moves.written_back.sum(axis=1).tolist(),
        **({} if moves.tier is None else tier_arrays(moves.tier)),
    )


def tier_arrays(tier: TierMoves) -> dict[str, list[int]]:
    counts = {"rows_entered": tier.entered, "rows_from_cold": tier.from_cold, "rows_left": tier.left}
    return {name: values.sum(axis=1).tolist() for name, values in counts.items()}


def outline(setting: Setting, skipped: str | None = None) -> Simulation:
    job = setting.job
    return Simulation(
        policy=setting.policy,
        capacity=job.cache.capacity,
        horizon=setting.horizon,
        batch_size=job.data.batch_size,
        shuffle=job.data.whole_order,
        skipped=skipped,
    )


def print_results(results: Sequence[Simulation], console: Console | None = None) -> None:
    """Prints one table, on stdout unless `console` is given; settings that could not run are listed below it."""
    target = console or PrintableConsole(force_terminal=None if sys.stdout.isatty() else False)
    if not target.is_terminal:
        target.width = FILE_WIDTH
    simulated = [result for result in results if result.skipped is None]
    with target.capture() as text:
        if simulated:
            target.print(results_table(simulated))
            target.print()
        for sentence in facts(results):
            target.print(sentence, soft_wrap=True, markup=False, highlight=False)
    target.file.write("\n".join([*(line.rstrip() for line in text.get().splitlines()), ""]))


def results_table(results: Sequence[Simulation]) -> Table:
    """Rows and MiB are per step. Batch size and order are shown if there are several, tiers if there are any."""
    tiers = any(result.memory_rows is not None for result in results)
    sizes, orders = (len({getattr(result, name) for result in results}) > 1 for name in ("batch_size", "shuffle"))
    # fits 80 columns, and 92 with both
    table = Table(box=None, padding=(0, 1 if sizes or orders else 2, 0, 0), header_style="bold")
    for name in [
        *(["batch\nsize"] if sizes else []),
        *(["shuffle"] if orders else []),
        *HEADINGS,
        *(TIER_HEADINGS if tiers else []),
    ]:
        table.add_column(name, justify="left" if name in ("policy", "shuffle") else "right", no_wrap=True)
    for result in results:
        varied = [*([f"{result.batch_size:,}"] if sizes else []), *([result.shuffle or ""] if orders else [])]
        table.add_row(*varied, *cells(result), *(tier_cells(result) if tiers else []))
    return table


def cells(result: Simulation) -> list[str]:
    num_steps = max(1, (result.steps or 0) + (result.eval_steps or 0))
    return [
        f"{result.capacity_rows or 0:,}",
        result.policy,
        "" if result.horizon is None else str(result.horizon),
        f"{(result.rows_fetched or 0) / num_steps:,.0f}",
        f"{(result.rows_written_back or 0) / num_steps:,.0f}",
        mib((result.bytes_fetched or 0) / num_steps),
        mib((result.bytes_written_back or 0) / num_steps),
        "" if result.hit_ratio is None else percent(result.hit_ratio),
        "" if result.ratio_to_bound is None else f"{result.ratio_to_bound:.3f}",
    ]


def tier_cells(result: Simulation) -> list[str]:
    if result.memory_rows is None:
        return [""] * len(TIER_HEADINGS)
    num_steps = max(1, (result.steps or 0) + (result.eval_steps or 0))
    return [
        f"{result.memory_rows:,}",
        f"{(result.rows_entered or 0) / num_steps:,.0f}",
        f"{(result.rows_from_cold or 0) / num_steps:,.0f}",
        "" if result.cold_ratio_to_bound is None else f"{result.cold_ratio_to_bound:.3f}",
    ]


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 else f"{nbytes / MIB:.2g}"


def facts(results: Sequence[Simulation]) -> list[str]:
    read = {
        f"Batches of {batches_of(result)}: {result.steps:,} train and {result.eval_steps:,} evaluation steps, "
        f"{result.lookups:,} look-ups of {result.unique_rows:,} rows.": None
        for result in results
        if result.steps is not None
    }
    return [*(["Rows and MiB are per step."] if read else []), *read, *refusals(results)]


def batches_of(result: Simulation) -> str:
    return f"{result.batch_size:,}" + ("" if result.shuffle in (None, "none") else f", shuffle {result.shuffle}")


def refusals(results: Sequence[Simulation]) -> list[str]:
    policies: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.skipped is not None:
            where = f"{result.capacity} with batches of {batches_of(result)}"
            policies.setdefault((where, result.skipped), []).append(result.policy)
    return [
        f"Not simulated: {', '.join(dict.fromkeys(own))} at {where}: {why}." for (where, why), own in policies.items()
    ]
