"""`prefetcher profile`: which rows are worth pinning, and what they would cover.

    half of the sample --> look-ups of each row --> hot rows of each budget --> pin file of the largest
    the other half                                      --> share of look-ups and of whole inputs covered, with interval
    the first half again                                --> share of the whole inputs that chose them

The halves are disjoint batches drawn in the same strata of the epoch (see `sample`), so the shares are those of a hot
set on data that had no part in choosing it, and the pin file holds exactly the rows that were judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from typer import Option

from rowcast.analysis.profile.hot_rows import Coverage, CoverageShares, HotSet, Popularity, hot_set
from rowcast.analysis.profile.interval import unseen_share
from rowcast.analysis.profile.results import HALF, BudgetCoverage, GroupFacts, Profile, print_profile
from rowcast.analysis.scan.sample import Amount, SampledBatch, read_windows, reader_for_another_pass, sample_windows
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, group_specs
from rowcast.job.units import parse_bytes, parse_rows
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots, measure
from rowcast.prefetcher.readers.pin_files import save_pins
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.runtime.arrays import I64
from rowcast.runtime.command_options import AsJson
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console

PICK, JUDGE = 0, 1  # draws of the sample
DEFAULT_AMOUNT = Amount(share=0.05, least_batches=64)
Progress = Callable[[str], None]
MEMORY_SHARE = 0.5  # share of the free memory that counting may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    text: str
    nbytes: int
    room: tuple[int, ...] | None  # rows that each group may pin at most; None: as many as the budget holds


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    amount: Amount = DEFAULT_AMOUNT
    budgets: tuple[str, ...] = ()  # sizes as in the job file; none: half of the cache
    confidence: float = 0.99
    memory_bytes: float  # host memory that counting may take
    progress: Progress = field(default=lambda what: None)

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"--confidence {self.confidence}: give a probability from 0.5 to below 1, such as 0.99")


def profile_job(job: Job, request: ProfileRequest) -> tuple[Profile, dict[str, I64]]:
    """Returns the profile, and the hot rows of the largest budget by table. Raises ConfigError and DataError."""
    groups, reader = group_specs(job), open_reader(job)
    asked = [parse_budget(text, groups) for text in request.budgets]
    measured = list(islice(schedule(job, reader), MEASURED_BATCHES))
    slots, touched = job_slots(job, groups, measured), measure(groups, measured)
    popularity = pick(job, reader_for_another_pass(job, reader), request, Popularity(groups, request.memory_bytes))
    largest = list(map(max, touched.largest_batch_rows, popularity.largest_batch_rows))
    budgets = sorted(asked or [default_budget(groups, slots, largest)], key=lambda budget: budget.nbytes)
    hot_sets = [hot_set(popularity, budget.nbytes, budget.room) for budget in budgets]
    coverages, chosen = (
        judge(job, reader_for_another_pass(job, reader), request, draw, [Coverage(groups, hot) for hot in hot_sets])
        for draw in (JUDGE, PICK)
    )
    refuse_small(popularity.num_batches, coverages[0].num_batches)
    facts = tuple(map(group_facts, groups, slots, map(max, largest, coverages[0].largest_batch_rows)))
    covered = tuple(
        budget_coverage(budget, hot, coverage.shares(request.confidence), own.input_share, facts)
        for budget, hot, coverage, own in zip(budgets, hot_sets, coverages, chosen, strict=True)
    )
    profile = Profile(
        epoch_samples=reader.num_samples("train"),
        picked_batches=popularity.num_batches,
        picked_samples=popularity.num_samples,
        judged_batches=coverages[0].num_batches,
        judged_samples=coverages[0].num_samples,
        rows_seen=popularity.num_rows,
        confidence=request.confidence,
        unseen_share=unseen_share(coverages[0].num_batches, request.confidence),
        groups=facts,
        budgets=covered,
    )
    return profile, rows_by_table(groups, hot_sets[-1])


def pick(job: Job, reader: Reader, request: ProfileRequest, popularity: Popularity) -> Popularity:
    for sampled in half(job, reader, request, PICK):
        popularity.add(sampled.batch)
        request.progress(f"counted {popularity.num_samples:,} samples")
    return popularity


def judge(job: Job, reader: Reader, request: ProfileRequest, draw: int, coverages: list[Coverage]) -> list[Coverage]:
    for sampled in half(job, reader, request, draw):
        for coverage in coverages:
            coverage.add(sampled.batch)
        request.progress(f"judged {coverages[0].num_samples:,} samples")
    return coverages


def group_facts(group: GroupSpec, slots: int, largest_batch_rows: int) -> GroupFacts:
    return GroupFacts(
        group=group.name, slots=slots, record_bytes=group.record_bytes, largest_batch_rows=largest_batch_rows
    )


def half(job: Job, reader: Reader, request: ProfileRequest, draw: int) -> Iterator[SampledBatch]:
    windows = sample_windows(job, reader, request.amount, draws=2)
    return read_windows(job, reader, (window for window in windows if window.draw == draw))


def refuse_small(num_picked: int, num_judged: int) -> None:
    if num_picked < 1 or num_judged < 2:
        raise ConfigError(
            f"--sample: {num_picked} batches to pick hot rows and {num_judged} to judge them are too few for an "
            "interval; give a larger --sample, or smaller batches with --set data.batch_size=N"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    sample: Annotated[
        float | None, Option(help="Share of an epoch to read.", show_default="0.05, and at least 64 batches")
    ] = None
    samples: Annotated[int | None, Option(help="Samples to read instead.", show_default=False)] = None
    budgets: Annotated[
        Sequence[str],
        Option("--budget", help="Bytes for hot rows, such as 16MiB. Repeatable.", show_default="half the cache"),
    ] = ()
    confidence: Annotated[float, Option(help="How often an interval must hold.")] = 0.99
    out: Annotated[Path | None, Option(help="Write the largest budget's rows, for cache.pin.", metavar="FILE")] = None
    plot: Annotated[
        Path | None, Option(help="Instead: draw what the first steps look up, table by table.", metavar="PNG|SVG")
    ] = None
    max_steps: Annotated[int | None, Option(min=1, help="With --plot: train steps to read.", show_default="1000")] = (
        None
    )
    json: AsJson = False


def run_profile(job: Job, options: ProfileOptions) -> None:
    with Console(stderr=True).status("reading") as status:
        request = ProfileRequest(
            amount=amount_of(options),
            budgets=tuple(options.budgets),
            confidence=options.confidence,
            memory_bytes=MEMORY_SHARE * free_memory(),
            progress=status.update,
        )
        profile, rows = profile_job(job, request)
    if options.out is not None:
        write_pins(options.out, job, profile, rows)
    if options.json:
        print_json(profile)
        return
    console = stdout_console()
    print_profile(profile, console)
    if options.out is not None:
        console.print(
            f'{options.out}: {profile.budgets[-1].hot_rows:,} rows; set cache.pin = "{options.out}"',
            markup=False,
            soft_wrap=True,
        )


def amount_of(options: ProfileOptions) -> Amount:
    if options.sample is not None and options.samples is not None:
        raise ConfigError("--sample and --samples are both given; remove one, as each says how much to read")
    if options.sample is None and options.samples is None:
        return DEFAULT_AMOUNT
    return Amount(share=options.sample, samples=options.samples)


def write_pins(path: Path, job: Job, profile: Profile, rows: Mapping[str, I64]) -> None:
    budget = profile.budgets[-1]
    facts = {
        "made_by": "prefetcher profile",
        "job": job.job.name,
        "budget": budget.budget,
        "picked_samples": str(profile.picked_samples),
        "judged_samples": str(profile.judged_samples),
        "confidence": str(profile.confidence),
        "accesses": msgspec.json.encode(budget.shares.accesses).decode(),
        "inputs": msgspec.json.encode(budget.shares.inputs).decode(),
    }
    save_pins(path, rows, facts)
