"""The result of a profile, and its printed tables: the budgets, then what each covers table by table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.table import Table

from rowcast.analysis.profile.hot_rows import CoverageShares
from rowcast.analysis.profile.interval import METHOD, EstimatedShare
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent_number

HALF = "half the cache"  # the default budget
BUDGET_WIDTH = 33  # columns of the terminal per budget, besides the tables' names
NAME_WIDTH = 28


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
    confidence: float
    method: str = METHOD
    unseen_share: float  # of the data's batches: a rarer kind of batch may not be among the judged ones
    groups: tuple[GroupFacts, ...]
    budgets: tuple[BudgetCoverage, ...]  # ascending


def print_profile(profile: Profile, console: Console) -> None:
    console.print(title(profile), style="bold", markup=False)
    console.print()
    console.print(budgets_table(profile))
    for budgets in chunks(profile.budgets, max(1, (console.width - NAME_WIDTH) // BUDGET_WIDTH)):
        console.print()
        console.print(tables_table(budgets))
    console.print()
    for line in notes(profile):
        console.print(line, markup=False)


def title(profile: Profile) -> str:
    epoch = "" if profile.epoch_samples is None else f" (an epoch: {profile.epoch_samples:,})"
    return (
        f"{profile.picked_samples:,} samples chose the hot rows, {profile.judged_samples:,} others judged them{epoch}"
    )


def budgets_table(profile: Profile) -> Table:
    table = plain_table("budget", "hot rows", "bytes", "% of accesses", "% of whole inputs")
    for budget in profile.budgets:
        shares = budget.shares
        table.add_row(
            budget.budget,
            f"{budget.hot_rows:,}",
            human_bytes(budget.hot_bytes),
            percent_interval(shares.accesses),
            percent_interval(shares.inputs),
        )
    return table


def tables_table(budgets: Sequence[BudgetCoverage]) -> Table:
    table = plain_table("table", "rows", *(name for budget in budgets for name in (budget.budget, "% of accesses")))
    for own in zip(*(budget.shares.tables for budget in budgets), strict=True):
        cells = [cell for shares in own for cell in (f"{shares.hot_rows:,} hot", percent_interval(shares.accesses))]
        table.add_row(own[0].table, f"{own[0].num_rows:,}", *cells)
    return table


def plain_table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def notes(profile: Profile) -> Iterator[str]:
    yield (
        f"In brackets: {100 * profile.confidence:.4g} % intervals. {profile.judged_batches} batches were judged, each "
        "as a cluster of similar "
        f"samples; a kind of batch rarer than {percent_number(profile.unseen_share)} % of all may not be among them."
    )
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


def chunks(budgets: Sequence[BudgetCoverage], size: int) -> Iterator[tuple[BudgetCoverage, ...]]:
    left = iter(budgets)
    while chunk := tuple(islice(left, size)):
        yield chunk


def percent_interval(share: EstimatedShare | None) -> str:
    """`62.1 (60.0 to 64.2)`."""
    if share is None:
        return "none"
    if share.low == share.high:
        return percent_number(share.estimate)
    return f"{percent_number(share.estimate)} ({percent_number(share.low)} to {percent_number(share.high)})"
