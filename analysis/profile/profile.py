"""`rowcast profile`: which rows are worth pinning, and what they would cover.

    half of the sample --> look-ups of each row --> hot rows of each budget --> pin file of the largest
    the other half                                      --> share of look-ups and of whole inputs covered
    the first half again                                --> share of the whole inputs that chose them

The halves are disjoint batches drawn in the same strata of the epoch (see `sample`), so the shares are those of a hot
set on data that had no part in choosing it, and the pin file holds exactly the rows that were judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option

from rowcast.analysis.profile.hot_rows import (
    Coverage,
    CoverageShares,
    HotSet,
    Popularity,
    TableShares,
    hot_set,
)
from rowcast.analysis.progress import AnalysisProgress, ProgressBar
from rowcast.analysis.scan.sample import Amount, draw_batches, read_drawn, reader_for_another_pass
from rowcast.analysis.show import Part, show, table_of
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, group_specs
from rowcast.job.units import parse_bytes, parse_rows
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots, measure
from rowcast.prefetcher.readers.pin_files import save_pins
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import I64
from rowcast.runtime.command_options import AsJson, Config, Overrides, options_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent_number

PICK, JUDGE = 0, 1  # draws of the sample
DEFAULT_AMOUNT = Amount(share=0.05, least_batches=64)
HALF = "half the cache"  # the default budget
MEMORY_SHARE = 0.5  # share of the free memory that counting may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    text: str
    nbytes: int
    room: tuple[int, ...] | None  # rows that each group may pin at most; None: as many as the budget holds


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    sample: Annotated[
        float | None, Option(help="Share of an epoch to read.", show_default="0.05, and at least 64 batches")
    ] = None
    budgets: Annotated[
        Sequence[str],
        Option("--budget", help="Bytes for hot rows, such as 16MiB. Repeatable.", show_default="half the cache"),
    ] = ()
    out: Annotated[Path | None, Option(help="Write the largest budget's rows, for cache.pin.", metavar="FILE")] = None
    json: AsJson = False

    @property
    def amount(self) -> Amount:
        return DEFAULT_AMOUNT if self.sample is None else Amount(share=self.sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    group: str
    slots: int
    record_bytes: int
    largest_batch_rows: int  # of the first batches and the sample


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCoverage:
    budget: str  # as requested
    budget_bytes: int
    hot_rows: int
    hot_bytes: int
    threshold: dict[str, int | None]  # group -> look-ups in the picking half of its least looked-up hot row
    shares: CoverageShares
    chosen_inputs: float  # share of whole inputs among the samples that chose the rows, which data.order also reads
    too_large: str | None  # what to change before this job can pin these rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    epoch_samples: int | None
    picked_batches: int
    picked_samples: int
    judged_batches: int
    judged_samples: int
    rows_seen: int  # distinct, in the picking half
    groups: tuple[GroupFacts, ...]
    budgets: tuple[BudgetCoverage, ...]  # ascending


def profile_job(job: Job, options: ProfileOptions, progress: AnalysisProgress) -> tuple[Profile, dict[str, I64]]:
    """Returns the profile, and the hot rows of the largest budget by table. Raises ConfigError and DataError."""
    amount, tick = options.amount, progress.begin("reading", None)
    groups, reader = group_specs(job), open_reader(job)

    def half(draw: int) -> Iterator[Batch]:
        again = reader_for_another_pass(job, reader)
        own = (place for place in draw_batches(job, again, amount, draws=2) if place.draw == draw)
        for batch in read_drawn(job, again, own):
            yield batch
            tick()

    asked = [parse_budget(text, groups) for text in options.budgets]
    measured = list(islice(schedule(job, reader), MEASURED_BATCHES))
    slots, touched = job_slots(job, groups, measured), measure(groups, measured)
    popularity = Popularity(groups, MEMORY_SHARE * free_memory())
    for batch in half(PICK):
        popularity.add(batch)
    largest = list(map(max, touched.largest_batch_rows, popularity.largest_batch_rows))
    budgets = sorted(asked or [default_budget(groups, slots, largest)], key=lambda budget: budget.nbytes)
    hot_sets = [hot_set(popularity, budget.nbytes, budget.room) for budget in budgets]
    coverages, chosen = ([Coverage(groups, hot) for hot in hot_sets] for _ in range(2))
    for draw, judges in ((JUDGE, coverages), (PICK, chosen)):
        for batch in half(draw):
            for coverage in judges:
                coverage.add(batch)
    refuse_small(popularity.num_batches, coverages[0].num_batches)
    facts = tuple(map(group_facts, groups, slots, map(max, largest, coverages[0].largest_batch_rows)))
    covered = tuple(
        budget_coverage(budget, hot, coverage.shares(), own.shares().inputs, facts)
        for budget, hot, coverage, own in zip(budgets, hot_sets, coverages, chosen, strict=True)
    )
    profile = Profile(
        epoch_samples=reader.num_samples("train"),
        picked_batches=popularity.num_batches,
        picked_samples=popularity.num_samples,
        judged_batches=coverages[0].num_batches,
        judged_samples=coverages[0].num_samples,
        rows_seen=popularity.num_rows,
        groups=facts,
        budgets=covered,
    )
    return profile, rows_by_table(groups, hot_sets[-1])


def group_facts(group: GroupSpec, slots: int, largest_batch_rows: int) -> GroupFacts:
    return GroupFacts(
        group=group.name, slots=slots, record_bytes=group.record_bytes, largest_batch_rows=largest_batch_rows
    )


def refuse_small(num_picked: int, num_judged: int) -> None:
    if num_picked < 1 or num_judged < 1:
        raise ConfigError(
            f"--sample: {num_picked} batches to pick hot rows and {num_judged} to judge them are too few; "
            "give a larger --sample, or smaller batches with --set data.batch_size=N"
        )


def parse_budget(text: str, groups: tuple[GroupSpec, ...]) -> Budget:
    """Parses `"16MiB"`, or `"20000 rows"` if all records have the same size. Raises ConfigError."""
    rows = parse_rows(text)
    if rows is not None and len(groups) > 1:
        raise ConfigError(
            f'--budget "{text}" counts rows, but the tables have records of {len(groups)} sizes; '
            "give bytes, such as 16MiB"
        )
    try:
        nbytes = parse_bytes(text) if rows is None else rows * groups[0].record_bytes
    except ValueError as error:
        raise ConfigError(f"--budget {error}") from None
    return Budget(text=text, nbytes=nbytes, room=None)


def default_budget(groups: tuple[GroupSpec, ...], slots: tuple[int, ...], largest_batch_rows: list[int]) -> Budget:
    """Half of the cache: the other half is for rows that change from batch to batch. A pinned row never leaves its
    slot, so every group keeps room for a batch without hot rows that is slightly larger than the largest one seen."""
    room = tuple(max(0, n - with_margin(largest)) for n, largest in zip(slots, largest_batch_rows, strict=True))
    cache_bytes = sum(n * group.record_bytes for n, group in zip(slots, groups, strict=True))
    return Budget(text=HALF, nbytes=cache_bytes // 2, room=room)


def with_margin(largest_batch_rows: int) -> int:
    """A tenth more than the largest batch seen, because another may be larger."""
    return largest_batch_rows - (-largest_batch_rows // 10)


def budget_coverage(
    budget: Budget, hot: HotSet, shares: CoverageShares, chosen_inputs: float, groups: tuple[GroupFacts, ...]
) -> BudgetCoverage:
    return BudgetCoverage(
        budget=budget.text,
        budget_bytes=budget.nbytes,
        hot_rows=sum(map(len, hot.keys)),
        hot_bytes=hot.nbytes,
        threshold={group.group: threshold for group, threshold in zip(groups, hot.threshold, strict=True)},
        shares=shares,
        chosen_inputs=chosen_inputs,
        too_large=too_large(hot, groups),
    )


def too_large(hot: HotSet, groups: tuple[GroupFacts, ...]) -> str | None:
    for group, keys in zip(groups, hot.keys, strict=True):
        needed = len(keys) + group.largest_batch_rows
        if needed > group.slots:
            enough = (
                f'cache.capacity to "{needed} rows" or more'
                if len(groups) == 1
                else f'cache.groups.{group.group} to "{needed} rows"'
            )
            return (
                f"{len(keys)} hot rows and the {group.largest_batch_rows} rows of the largest batch seen do not fit in "
                f"the {group.slots} slots of group {group.group}: to pin them set {enough}"
            )
    return None


def rows_by_table(groups: tuple[GroupSpec, ...], hot: HotSet) -> dict[str, I64]:
    return {
        table.name: keys[keys >> KEY_SHIFT == table.index] & ROW_MASK
        for group, keys in zip(groups, hot.keys, strict=True)
        for table in group.tables
    }


@options_of(ProfileOptions)
def profile(config: Config, overrides: Overrides = None, *, options: ProfileOptions) -> None:
    run_profile(load_job(config, tuple(overrides or ())), options)


def run_profile(job: Job, options: ProfileOptions) -> None:
    with ProgressBar() as progress:
        found, rows = profile_job(job, options, progress)
    if options.out is not None:
        write_pins(options.out, job, found, rows)
    show(found, [*parts(found), *pinned(found, options.out)], as_json=options.json)


def pinned(profile: Profile, out: Path | None) -> Iterator[str]:
    if out is not None:
        yield f'{out}: {profile.budgets[-1].hot_rows:,} rows; set cache.pin = "{out}"'


def parts(profile: Profile) -> Iterator[Part]:
    yield title(profile)
    yield table_of(profile.budgets, BUDGETS, left=("budget",))
    yield "Of each table, in hot rows and % of accesses:"
    columns: dict[str, Callable[[tuple[TableShares, ...]], str]] = {
        "table": lambda own: own[0].table,
        "rows": lambda own: f"{own[0].num_rows:,}",
    }
    for number, budget in enumerate(profile.budgets):
        columns[budget.budget] = partial(table_cell, number)
    of_tables = zip(*(budget.shares.tables for budget in profile.budgets), strict=True)
    yield table_of(of_tables, columns, left=("table",))
    yield from notes(profile)


BUDGETS: dict[str, Callable[[BudgetCoverage], str]] = {
    "budget": lambda own: own.budget,
    "hot rows": lambda own: f"{own.hot_rows:,}",
    "bytes": lambda own: human_bytes(own.hot_bytes),
    "% of accesses": lambda own: share_text(own.shares.accesses),
    "% of whole inputs": lambda own: share_text(own.shares.inputs),
}


def table_cell(number: int, own: tuple[TableShares, ...]) -> str:
    return f"{own[number].hot_rows:,}, {share_text(own[number].accesses)}"


def title(profile: Profile) -> str:
    epoch = "" if profile.epoch_samples is None else f" (an epoch: {profile.epoch_samples:,})"
    return (
        f"{profile.picked_samples:,} samples chose the hot rows, {profile.judged_samples:,} others judged them{epoch}"
    )


def notes(profile: Profile) -> Iterator[str]:
    if any(budget.hot_rows for budget in profile.budgets):
        least = ", ".join(least_lookups(budget, named=len(profile.budgets) > 1) for budget in profile.budgets)
        times = "once" if least == "1" else f"{least} times"
        yield f"Each hot row was looked up at least {times} by the samples that chose it."
        chosen = ", ".join(f"{percent_number(budget.chosen_inputs)} % ({budget.budget})" for budget in profile.budgets)
        yield f"Of the samples that chose the hot rows, {chosen} are whole inputs."
    if any(budget.budget == HALF for budget in profile.budgets):
        yield half_the_cache(profile)
    yield from (f"{budget.budget}: {budget.too_large}." for budget in profile.budgets if budget.too_large is not None)


def least_lookups(budget: BudgetCoverage, *, named: bool) -> str:
    own = [str(least or "-") for least in budget.threshold.values()]
    numbers = own[0] if len(set(own)) == 1 else "/".join(own)
    return f"{numbers} ({budget.budget})" if named else numbers


def half_the_cache(profile: Profile) -> str:
    groups = "; ".join(
        f"{group.slots:,} slots of {group.group}, {group.largest_batch_rows:,} rows" for group in profile.groups
    )
    return (
        f"{HALF}: the other half is for rows that change from batch to batch. The largest batch seen and a tenth more "
        f"must fit next to the hot rows ({groups})."
    )


def share_text(share: float | None) -> str:
    return "none" if share is None else percent_number(share)


def write_pins(path: Path, job: Job, profile: Profile, rows: Mapping[str, I64]) -> None:
    budget = profile.budgets[-1]
    facts = {
        "made_by": "rowcast profile",
        "job": job.job.name,
        "budget": budget.budget,
        "picked_samples": str(profile.picked_samples),
        "judged_samples": str(profile.judged_samples),
        "accesses": msgspec.json.encode(budget.shares.accesses).decode(),
        "inputs": msgspec.json.encode(budget.shares.inputs).decode(),
    }
    save_pins(path, rows, facts)
