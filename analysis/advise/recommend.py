"""Recommends a capacity: finds the knee of the cost curve, and writes sections to paste, with reasons.

knee    the smallest capacity from which doubling it saves less than a tenth of the bytes fetched

Says the results of `rowcast advise`: the data read, the curve, its precision, sections to paste.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from rowcast.analysis.advise.cost import Assumed, CoresNeed, Demand, Rates, cost, demand
from rowcast.analysis.advise.read import Observed, Read
from rowcast.analysis.advise.tiers import MOST_WAITING, Budget, TierAdvice, Traffic, Trials
from rowcast.analysis.show import CHOSEN, Part, table_of
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent, percent_number, plural, size_text

KNEE_SAVING = 0.1
MOST_STALLING = 0.5  # of the stretches, at any capacity; if more stall, the trainer is not waiting for capacity
USUAL_DEPTH, MOST_DEPTH = 4, 16
TOML_WIDTH = 78


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    capacity_bytes: int
    traffic: Traffic
    doubling_saves: float  # share of the bytes fetched
    move_ms: float  # mean time per step of the slowest stage that moves rows
    limit: str  # that stage, or planning if it takes longer
    least_step_ms: float  # a shorter step waits for rows that a larger cache would have kept; 0 if there are none
    stalls: bool  # for such rows, at the assumed step time


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    knee_bytes: int
    no_stall_bytes: int | None  # None: the trainer waits most of the time at any capacity
    stalling_anyway: float  # share of the stretches of depth + 1 steps that take longer than a step at any capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    capacity: str
    depth: int
    id_bytes: str | None  # None: as the job has it
    reasons: dict[str, str]  # section.key -> a sentence
    toml: str
    predicted: Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    read: Read
    assumed: Assumed
    cores: CoresNeed
    curve: tuple[Point, ...]  # by capacity, ascending; the last one holds all rows that were touched
    choice: Choice
    recommended: Recommendation
    tier: (
        TierAdvice | None
    )  # at the recommended capacity, or the job's if that is smaller; None: the job's store has no memory tier
    notes: tuple[str, ...]  # what is guessed, and what else matters


def knee(savings: Sequence[float]) -> int:
    """Returns the index of the knee. `savings`: the bytes that doubling each capacity saves, by ascending capacity."""
    worth = [index for index, saving in enumerate(savings) if saving >= KNEE_SAVING]
    return min(len(savings) - 1, max(worth, default=-1) + 1)


def first_without(stalls: Sequence[bool]) -> int:
    """Returns the index of the smallest capacity from which none stalls; the last one never does."""
    assert not stalls[-1], "the largest capacity stalls although it holds every row"
    return max((index for index, stall in enumerate(stalls) if stall), default=-1) + 1


class Points:
    def __init__(self, observed: Observed, trials: Trials, rates: Rates, step_s: float, depth: int) -> None:
        self._observed, self._trials, self._rates = observed, trials, rates
        self._step_s, self._depth = step_s, depth
        self._everything = self.demand(trials.capacities[-1])

    def demand(self, capacity_bytes: int) -> Demand:
        return demand(self._observed, self._trials.moved(capacity_bytes), self._rates, self._depth)

    def curve(self) -> tuple[Point, ...]:
        return tuple(map(self.at, self._trials.capacities))

    def at(self, capacity_bytes: int) -> Point:
        own = cost(self.demand(capacity_bytes), self._everything)
        return Point(
            capacity_bytes=capacity_bytes,
            traffic=self._trials.traffic(capacity_bytes),
            doubling_saves=self._doubling_saves(capacity_bytes),
            move_ms=1e3 * own.mean_s,
            limit=own.stage if own.mean_s > self._rates.plan_s else "planning",
            least_step_ms=1e3 * own.least_step_s,
            stalls=own.least_step_s > self._step_s,
        )

    def choice(self, curve: tuple[Point, ...]) -> Choice:
        anyway = 1.0 - float(self._everything.fits(self._step_s).mean())
        enough = curve[first_without([point.stalls for point in curve])].capacity_bytes
        return Choice(
            knee_bytes=curve[knee([point.doubling_saves for point in curve])].capacity_bytes,
            no_stall_bytes=enough if anyway <= MOST_STALLING else None,
            stalling_anyway=anyway,
        )

    def _doubling_saves(self, capacity_bytes: int) -> float:
        before = self._trials.fetched_bytes(capacity_bytes)
        after = self._trials.fetched_bytes(min(2 * capacity_bytes, self._trials.capacities[-1]))
        return max(0.0, 1 - after / before) if before else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenValues:
    predicted: Point
    depth: int
    travel_ms: float  # of a step's rows, to the device and back
    step_ms: float
    horizon: int  # batches known ahead
    known_bytes: int  # of their ids
    id_bytes: int | None  # a larger budget for ids, if the job's is too small


def enough_depth(travel_s: float, step_s: float) -> int:
    """Returns the depth that hides the rows' travel behind earlier steps, and one step more for variation."""
    return min(MOST_DEPTH, max(USUAL_DEPTH, ceil(travel_s / step_s) + 1))


def sections(chosen: ChosenValues, tier: TierAdvice | None) -> dict[str, dict[str, str | int]]:
    lookahead: dict[str, str | int] = {"depth": chosen.depth, "horizon": "auto"}
    if chosen.id_bytes is not None:
        lookahead["id_bytes"] = size_text(chosen.id_bytes)
    found: dict[str, dict[str, str | int]] = {
        "cache": {"capacity": size_text(chosen.predicted.capacity_bytes), "policy": "lookahead"},
        "lookahead": lookahead,
    }
    if tier is not None and tier.recommended is not None:
        found["store"] = {"memory": tier.recommended.memory}
    return found


def reasons(job: Job, chosen: ChosenValues, choice: Choice, tier: TierAdvice | None) -> dict[str, str]:
    found = {
        "cache.capacity": capacity_reason(chosen, choice),
        "cache.policy": "keeps the rows of coming steps; `rowcast simulate` compares it with others",
        "lookahead.depth": (
            f"the rows of a step take {chosen.travel_ms:.2g} ms to the device and back; {chosen.depth} steps of "
            f"{chosen.step_ms:g} ms in flight cover that and even out busy ones"
        ),
        "lookahead.horizon": (
            f"grows until plans no longer guess: here to {chosen.horizon} batches, whose ids take "
            f"{human_bytes(chosen.known_bytes)} of the host's memory"
        ),
    }
    if chosen.id_bytes is not None:
        found["lookahead.id_bytes"] = (
            f"the ids known ahead would fetch more rows if they had to stay below {job.lookahead.id_bytes}"
        )
    if tier is not None and tier.recommended is not None:
        found["store.memory"] = (
            f"{tier.recommended.rows_from_cold_per_step:,.0f} rows from the cold tier per step; the smallest memory "
            f"with which steps of {chosen.step_ms:g} ms wait for it less than {100 * MOST_WAITING:g} % of the time"
        )
    return found


def capacity_reason(chosen: ChosenValues, choice: Choice) -> str:
    fetched = f"{chosen.predicted.traffic.rows_fetched_per_step:,.0f} rows fetched per step"
    if choice.no_stall_bytes is not None and choice.no_stall_bytes > choice.knee_bytes:
        step = f"a step of {chosen.step_ms:g} ms"
        return f"{fetched}; the smallest capacity at which {step} does not wait for rows that did not fit"
    saves = percent_number(max(0.0, chosen.predicted.doubling_saves))
    least = percent_number(KNEE_SAVING)
    return f"{fetched}; doubling it would save {saves} %; every doubling up to here saves {least} % or more"


def toml(values: Mapping[str, Mapping[str, str | int]], why: Mapping[str, str]) -> str:
    lines: list[str] = []
    for section, keys in values.items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in keys.items():
            lines += textwrap.wrap(why[f"{section}.{key}"], TOML_WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
    return "\n".join([*lines, ""])


MIB = 2**20
R = TypeVar("R")


def parts(advice: Advice) -> Iterator[Part]:
    yield title(advice.read)
    yield curve_table(advice)
    yield from (f"{sentence}." for sentence in (*sentences(advice), *advice.notes))
    if advice.tier is not None:
        yield tier_table(advice.tier)
        yield from (f"{sentence}." for sentence in tier_sentences(advice.tier, advice.assumed.step_ms))
    yield "These sections replace those of the job file:"
    yield ""
    yield Text(advice.recommended.toml.rstrip(), CHOSEN)


def title(read: Read) -> str:
    evaluated = f" and {plural(read.eval_steps, 'evaluation step')}" if read.eval_steps else ""
    followed = f"{percent_number(min(read.followed_share.values()))} % of the rows followed"
    return f"Read: {plural(read.samples, 'sample')} in {plural(read.steps, 'train step')}{evaluated}; {followed}"


CURVE: dict[str, Callable[[Point], str]] = {  # rows and MiB are per step
    "capacity": lambda point: human_bytes(point.capacity_bytes),
    "rows\nfetched": lambda point: f"{point.traffic.rows_fetched_per_step:,.0f}",
    "MiB\nin": lambda point: mib(point.traffic.bytes_fetched_per_step),
    "MiB\nout": lambda point: mib(point.traffic.bytes_written_back_per_step),
    "hit\nratio": lambda point: "" if point.traffic.hit_ratio is None else percent(point.traffic.hit_ratio),
    "doubling\nsaves": lambda point: percent(point.doubling_saves),
    "rows\nmove\nin ms": lambda point: f"{point.move_ms:.3g}",
    "steps\nwait\nbelow ms": lambda point: f"{point.least_step_ms:.3g}" if point.least_step_ms else "-",
}


def curve_table(advice: Advice) -> Table:
    def chosen(point: Point) -> bool:
        return point.capacity_bytes == advice.recommended.predicted.capacity_bytes

    return table_of(advice.curve, marked(CURVE, chosen), left=("capacity",), chosen=chosen)


def marked(columns: Mapping[str, Callable[[R], str]], chosen: Callable[[R], bool]) -> dict[str, Callable[[R], str]]:
    """The columns, with a star before the first cell of a chosen row."""
    first, *_ = columns
    return {**columns, first: lambda row: f"{'*' if chosen(row) else ' '} {columns[first](row)}"}


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 or nbytes == 0 else f"{nbytes / MIB:.2g}"


def tier_table(tier: TierAdvice) -> Table:
    columns: dict[str, Callable[[Budget], str]] = {  # rows are per step
        "store.memory": lambda budget: budget.memory,
        "rows in\nmemory": lambda budget: f"{budget.memory_rows:,}",
        "rows\nenter": lambda budget: f"{budget.rows_entered_per_step:,.0f}",
        "from the\ncold tier": lambda budget: f"{budget.rows_from_cold_per_step:,.0f}",
        "of its\nrate": lambda budget: percent(budget.cold_share),
        "waits": lambda budget: percent(budget.waits),
    }

    def chosen(budget: Budget) -> bool:
        return budget is tier.recommended

    return table_of(tier.budgets, marked(columns, chosen), left=("store.memory",), chosen=chosen)


def tier_sentences(tier: TierAdvice, step_ms: float) -> Iterator[str]:
    given = "" if tier.cold_rows_given else ", an assumption (--cold-rows-s)"
    yield (
        f"Waits are those of steps of {step_ms:g} ms, with a cold tier that gives {tier.cold_rows_s:,.0f} rows a second"
        f"{given}"
    )
    if not tier.budgets:
        yield "No memory that this machine has is enough for this store; see `rowcast check`"
    elif tier.recommended is None:
        yield (
            f"Every one of these waits for the cold tier {100 * MOST_WAITING:g} % of the time or longer: use a faster "
            "disk or network, more servers, or a machine with more memory"
        )
    margin = max((budget.margin for budget in tier.budgets), default=0.0)
    if margin:
        yield f"Rows from the cold tier are estimates, at most ± {percent_number(margin)} % (three standard errors)"


def sentences(advice: Advice) -> Iterator[str]:
    choice, predicted = advice.choice, advice.recommended.predicted
    yield (
        "Rows and MiB are per step. Rows move in: the time of the slowest stage that moves them. Steps wait below: of "
        "the busiest steps, shorter ones wait for rows that a larger cache would have kept"
    )
    yield (
        f"Diminishing returns: from {human_bytes(choice.knee_bytes)} up, doubling the capacity saves less than "
        f"{100 * KNEE_SAVING:g} % of the bytes fetched"
    )
    if choice.no_stall_bytes is not None:
        least = human_bytes(choice.no_stall_bytes)
        yield f"No stalls for lack of capacity: from {least} up, with steps of {advice.assumed.step_ms:g} ms"
    slowest_ms = max(predicted.move_ms, advice.assumed.plan_ms)
    here = human_bytes(predicted.capacity_bytes)
    yield f"Limit: at {here} the slowest stage is {predicted.limit}, {slowest_ms:.2g} ms per step"
    yield cores_text(advice.cores, advice.assumed.step_ms)
    yield assumptions(advice.assumed)
    yield "Memory: `rowcast check` with these sections compares what both processes need with what is free"


def cores_text(need: CoresNeed, step_ms: float) -> str:
    parts = (
        ("decoding ids", need.decode_ms),
        ("planning", need.plan_ms),
        ("reading rows", need.read_ms),
        ("writing rows", need.write_ms),
    )
    each = ", ".join(f"{name} {ms:.2g}" for name, ms in parts)
    total_ms = sum(ms for _, ms in parts)
    return (
        f"Cores: a step takes {total_ms:.2g} ms of a core on the host ({each}), as measured here and doubled; with "
        f"steps of {step_ms:g} ms that is {need.cores:.2g} cores, besides those of the trainer"
    )


def assumptions(assumed: Assumed) -> str:
    step = f"a step takes {assumed.step_ms:g} ms" + ("" if assumed.step_given else " (--step-ms)")
    link = f"the link moves {assumed.link_gbs:g} GB/s each way" + (
        "" if assumed.link_given else " (--link-gbs; PCIe 3.0 x16)"
    )
    if assumed.gather_given:
        rows = f"tables are read and written at {next(iter(assumed.tables_gbs.values()))['read']:g} GB/s"
        planning = f"planning takes {assumed.plan_ms:.2g} ms per batch"
        return f"Given or assumed: {step}, {link}, {rows}. Measured here, doubled: {planning}"
    each = "; ".join(
        f"{own['read']:.2g} GB/s read, {own['first']:.2g} made the first time, {own['write']:.2g} written"
        for own in assumed.tables_gbs.values()
    )
    return (
        f"Given or assumed: {step}, {link}. Measured here, half of it counted on: rows of the tables, {each} "
        f"(--gather-gbs); planning takes {assumed.plan_ms:.2g} ms per batch"
    )


def notes(job: Job, advice: Advice) -> Iterator[str]:
    read, assumed, choice, predicted = advice.read, advice.assumed, advice.choice, advice.recommended.predicted
    yield sureness(read, predicted)
    ranks = job.ranks
    if ranks.count > 1:
        yield (
            f"All numbers are of one of {ranks.count} ranks, the first. The capacity holds the batches of the rank "
            "that owns most of them. Exchanges between ranks take time of their own: `rowcast simulate --ranks`"
        )
    if assumed.plan_ms > assumed.step_ms:
        yield (
            f"Planning takes {assumed.plan_ms:.2g} ms per batch, more than a step of {assumed.step_ms:g} "
            "ms at any capacity; more prefetcher.threads may help"
        )
    if choice.no_stall_bytes is None:
        yield (
            f"A step of {assumed.step_ms:g} ms waits most of the time at any capacity: with every row on the "
            "device the slowest "
            f"stage still takes {advice.curve[-1].move_ms:.3g} ms for new rows. The capacity is where returns diminish"
        )
    elif choice.stalling_anyway > 0:
        yield (
            f"{percent_number(choice.stalling_anyway)} % of all stretches of "
            f"{plural(job.lookahead.depth + 1, 'step')} wait at any "
            f"capacity, as at the start, where every row is new"
        )
    yield from left_out(job)


def sureness(read: Read, predicted: Point) -> str:
    least = min(read.followed_share.values())
    if least == 1.0:
        return "Every row was followed through every batch, so their traffic was counted, not estimated"
    return (
        f"{percent_number(least)} % of the rows, {read.followed_rows:,} chosen by a hash of their keys, were followed "
        f"through every batch. What they move stands for all rows, ± {percent_number(predicted.traffic.margin)} % of "
        "the rows fetched (three standard errors). How many rows each batch touches was counted"
    )


def left_out(job: Job) -> Iterator[str]:
    if job.cache.groups:
        yield "cache.groups of the job was ignored, and is not in the sections below"
