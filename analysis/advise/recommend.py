"""Recommends a capacity: finds the knee of the cost curve, and writes sections to paste, with reasons.

knee    the smallest capacity from which doubling it saves less than a tenth of the bytes fetched

Prints the results of `rowcast advise`: the data read, the curve, its precision, sections to paste.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rich.table import Table
from rich.text import Text

from rowcast.analysis.advise.cost import Rates
from rowcast.analysis.advise.read import ReadData
from rowcast.analysis.advise.trials import RowTraffic
from rowcast.analysis.show import CHOSEN, Part, table_of
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.units import parse_bytes
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent, percent_number, plural, size_text

KNEE_SAVING = 0.1
MOST_STALLING = 0.5  # of the stretches, at any capacity; if more stall, the trainer is not waiting for capacity
USUAL_DEPTH, MOST_DEPTH = 4, 16
TOML_WIDTH = 78


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    capacity_bytes: int
    traffic: RowTraffic
    doubling_saves: float  # share of the bytes fetched
    move_ms: float  # mean time per step of the slowest stage that moves rows
    limit: str  # that stage, or planning if it takes longer
    least_step_ms: float  # a shorter step waits for rows that a larger cache would have kept; 0 if there are none
    stalls: bool  # for such rows, at the assumed step time


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityChoice:
    knee_bytes: int
    no_stall_bytes: int | None  # None if the trainer waits most of the time at any capacity
    stalling_anyway: float  # share of the stretches of depth + 1 steps that take longer than a step at any capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    capacity: str
    depth: int
    id_bytes: str | None  # None if the job's stays
    reasons: dict[str, str]  # section.key -> a sentence
    toml: str
    predicted: Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    read: ReadData
    assumed: Rates
    cores: dict[str, float]  # milliseconds of a core on the host in a step, by work
    curve: tuple[Point, ...]  # by capacity, ascending; the last one holds all rows that were touched
    choice: CapacityChoice
    recommended: Recommendation
    notes: tuple[str, ...]  # what is guessed, and what else matters


def knee(savings: Sequence[float]) -> int:
    """Returns the index of the knee. `savings`: the bytes that doubling each capacity saves, by ascending capacity."""
    worth = [index for index, saving in enumerate(savings) if saving >= KNEE_SAVING]
    return min(len(savings) - 1, max(worth, default=-1) + 1)


def first_without(stalls: Sequence[bool]) -> int:
    """Returns the index of the smallest capacity from which none stalls; the last one never does."""
    assert not stalls[-1], "the largest capacity stalls although it holds every row"
    return max((index for index, stall in enumerate(stalls) if stall), default=-1) + 1


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


def sections(chosen: ChosenValues) -> dict[str, dict[str, str | int]]:
    lookahead: dict[str, str | int] = {"depth": chosen.depth, "horizon": "auto"}
    if chosen.id_bytes is not None:
        lookahead["id_bytes"] = size_text(chosen.id_bytes)
    return {
        "cache": {"capacity": size_text(chosen.predicted.capacity_bytes), "policy": "lookahead"},
        "lookahead": lookahead,
    }


def reasons(job: Job, chosen: ChosenValues, choice: CapacityChoice) -> dict[str, str]:
    why = {
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
        why["lookahead.id_bytes"] = (
            f"the ids known ahead would fetch more rows if they had to stay below {job.lookahead.id_bytes}"
        )
    return why


def capacity_reason(chosen: ChosenValues, choice: CapacityChoice) -> str:
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


def parts(advice: Advice) -> Iterator[Part]:
    yield title(advice.read)
    yield curve_table(advice)
    yield from (f"{sentence}." for sentence in (*sentences(advice), *advice.notes))
    yield "These sections replace those of the job file:"
    yield ""
    yield Text(advice.recommended.toml.rstrip(), CHOSEN)


def title(read: ReadData) -> str:
    evaluated = f" and {plural(read.eval_steps, 'evaluation step')}" if read.eval_steps else ""
    followed = f"{percent_number(min(read.followed_share.values()))} % of the rows followed"
    return f"Read: {plural(read.samples, 'sample')} in {plural(read.steps, 'train step')}{evaluated}; {followed}"


CURVE: dict[str, Callable[[Point], str]] = {  # rows and MiB are per step
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

    def capacity(point: Point) -> str:
        return f"{'*' if chosen(point) else ' '} {human_bytes(point.capacity_bytes)}"

    return table_of(advice.curve, {"capacity": capacity, **CURVE}, left=("capacity",), chosen=chosen)


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 or nbytes == 0 else f"{nbytes / MIB:.2g}"


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
    slowest_ms = max(predicted.move_ms, 1e3 * advice.assumed.plan_s)
    here = human_bytes(predicted.capacity_bytes)
    yield f"Limit: at {here} the slowest stage is {predicted.limit}, {slowest_ms:.2g} ms per step"
    yield cores_text(advice.cores, advice.assumed.step_ms)
    yield assumptions(advice.assumed)
    yield "Memory: `rowcast check` with these sections compares what both processes need with what is free"


def cores_text(need: Mapping[str, float], step_ms: float) -> str:
    each = ", ".join(f"{name} {ms:.2g}" for name, ms in need.items())
    total_ms = sum(need.values())
    return (
        f"Cores: a step takes {total_ms:.2g} ms of a core on the host ({each}), as measured here and doubled; with "
        f"steps of {step_ms:g} ms that is {total_ms / step_ms:.2g} cores, besides those of the trainer"
    )


def assumptions(assumed: Rates) -> str:
    step = f"a step takes {assumed.step_ms:g} ms" + ("" if "step_ms" in assumed.given else " (--step-ms)")
    link = f"the link moves {assumed.link_gbs:g} GB/s each way"
    link += "" if "link_gbs" in assumed.given else " (--link-gbs; PCIe 3.0 x16)"
    planning = f"planning takes {1e3 * assumed.plan_s:.2g} ms per batch"
    if "gather_gbs" in assumed.given:
        rows = f"tables are read and written at {next(iter(assumed.rows.values())).read / 1e9:g} GB/s"
        return f"Given or assumed: {step}, {link}, {rows}. Measured here, doubled: {planning}"
    each = "; ".join(
        f"{own.read / 1e9:.2g} GB/s read, {own.first / 1e9:.2g} made the first time, {own.write / 1e9:.2g} written"
        for own in assumed.rows.values()
    )
    return (
        f"Given or assumed: {step}, {link}. Measured here, half of it counted on: rows of the tables, {each} "
        f"(--gather-gbs); {planning}"
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
    if 1e3 * assumed.plan_s > assumed.step_ms:
        yield (
            f"Planning takes {1e3 * assumed.plan_s:.2g} ms per batch, more than a step of {assumed.step_ms:g} "
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
    if job.cache.groups:
        yield "cache.groups of the job was ignored, and is not in the sections below"
    store = job.store
    if isinstance(store, StoreWithTier) and store.memory_rows is None and ranks.count == 1:
        half = parse_bytes(store.memory) // 2
        memories = " ".join(f"--store-memory {size_text(nbytes)}" for nbytes in (half, 2 * half, 4 * half))
        yield (
            f"With these sections in the job file, `rowcast simulate --config job.toml {memories}` counts the rows "
            "that the cold tier gives at each store.memory"
        )


def sureness(read: ReadData, predicted: Point) -> str:
    least = min(read.followed_share.values())
    if least == 1.0:
        return "Every row was followed through every batch, so their traffic was counted, not estimated"
    return (
        f"{percent_number(least)} % of the rows, {read.followed_rows:,} chosen by a hash of their keys, were followed "
        f"through every batch. What they move stands for all rows, ± {percent_number(predicted.traffic.margin)} % of "
        "the rows fetched (three standard errors). How many rows each batch touches was counted"
    )
