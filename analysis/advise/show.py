"""Says the results of `prefetcher advise`: the data read, the curve, its precision, memory, sections to paste."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from rowcast.analysis.advise.cost import Assumed, CoresNeed
from rowcast.analysis.advise.read import Read, WorkingSet
from rowcast.analysis.advise.recommend import KNEE_SAVING, Advice, Point
from rowcast.analysis.advise.tiers import MOST_WAITING, Budget, TierAdvice
from rowcast.analysis.show import CHOSEN, Part, table_of
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent, percent_number, plural

MIB = 2**20
WIDE, FOR_WIDE = 100, ("slots", "limit")  # columns of a terminal from which the curve shows these too
R = TypeVar("R")
SETTLED = 0.05  # a stretch half as long may differ by this much and still be trusted


def parts(advice: Advice, width: int) -> Iterator[Part]:
    """`width`: columns of the terminal."""
    yield title(advice.read)
    yield working_sets_table(advice)
    yield curve_table(advice, wide=width >= WIDE)
    yield from (f"{sentence}." for sentence in (*sentences(advice), *advice.notes))
    yield memory_table(advice)
    if advice.tier is not None:
        yield tier_table(advice.tier)
        said = tier_sentences(advice.tier, advice.assumed.step_ms, whole_run=advice.read.whole_run)
        yield from (f"{sentence}." for sentence in said)
    yield "These sections replace those of the job file:"
    yield ""
    yield Text(advice.recommended.toml.rstrip(), CHOSEN)


def title(read: Read) -> str:
    evaluated = f" and {plural(read.eval_steps, 'evaluation step')}" if read.eval_steps else ""
    part = "the whole run" if read.whole_run else "a stretch of an epoch"
    followed = f"{percent_number(min(read.followed_share.values()))} % of the rows followed"
    return (
        f"Read: {part}, {plural(read.samples, 'sample')} in {plural(read.steps, 'train step')}{evaluated}; {followed}"
    )


def working_sets_table(advice: Advice) -> Table:
    own, depth = advice.working_sets, advice.working_sets[0].depth
    lines: dict[str, Callable[[WorkingSet], int]] = {
        "a batch, median": lambda group: group.batch.median,
        "the largest batch": lambda group: group.batch.largest,
        f"{depth} batches, median": lambda group: group.flight.median,
        f"the largest {depth} batches": lambda group: group.flight.largest,
        "all batches": lambda group: group.touched,
        "all rows of the tables": lambda group: group.table_rows,
    }

    def rows_of(group: WorkingSet) -> Callable[[str], str]:
        return lambda name: f"{lines[name](group):,} = {human_bytes(lines[name](group) * group.record_bytes)}"

    columns: dict[str, Callable[[str], str]] = {"distinct rows": str, **{group.group: rows_of(group) for group in own}}
    return table_of(lines, columns, left=("distinct rows",))


CURVE: dict[str, Callable[[Point], str]] = {  # rows and MiB are per step
    "capacity": lambda point: human_bytes(point.capacity_bytes),
    "slots": lambda point: f"{point.capacity_rows:,}",
    "rows\nfetched": lambda point: f"{point.lookahead.rows_fetched_per_step:,.0f}",
    "MiB\nin": lambda point: mib(point.lookahead.bytes_fetched_per_step),
    "MiB\nout": lambda point: mib(point.lookahead.bytes_written_back_per_step),
    "hit\nratio": lambda point: "" if point.lookahead.hit_ratio is None else percent(point.lookahead.hit_ratio),
    "LRU\nfetches": lambda point: f"{point.lru.rows_fetched_per_step:,.0f}",
    "doubling\nsaves": lambda point: percent(point.doubling_saves),
    "rows\nmove\nin ms": lambda point: f"{point.move_ms:.3g}",
    "steps\nwait\nbelow ms": lambda point: f"{point.least_step_ms:.3g}" if point.least_step_ms else "-",
    "limit": lambda point: point.limit,
}


def curve_table(advice: Advice, *, wide: bool) -> Table:
    def chosen(point: Point) -> bool:
        return point.capacity_bytes == advice.recommended.predicted.capacity_bytes

    columns = {name: cell for name, cell in CURVE.items() if wide or name not in FOR_WIDE}
    left, padding = ("capacity", "limit"), 2 if wide else 1
    return table_of(advice.curve, marked(columns, chosen), left=left, padding=padding, chosen=chosen)


def marked(columns: Mapping[str, Callable[[R], str]], chosen: Callable[[R], bool]) -> dict[str, Callable[[R], str]]:
    """The columns, with a star before the first cell of a chosen row."""
    first, *_ = columns
    return {**columns, first: lambda row: f"{'*' if chosen(row) else ' '} {columns[first](row)}"}


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 or nbytes == 0 else f"{nbytes / MIB:.2g}"


def memory_table(advice: Advice) -> Table:
    host, device = advice.host, advice.device
    of_host = {
        "host: tables, all rows trained": host.tables_bytes,
        "tables, rows of this run": host.touched_bytes,
        "two rings": host.rings_bytes,
        "ids known ahead": host.ids_bytes,
        "the planner": host.planner_bytes,
        "batches decoded ahead": host.decoded_bytes,
    }
    on_device = {
        "device: capacity": device.capacity_bytes,
        "staging": device.staging_bytes,
        "plans": device.plans_bytes,
        "beside the dense model": device.capacity_bytes + device.staging_bytes + device.plans_bytes,
    }
    lines = {**of_host, **on_device}
    return table_of(lines, {"memory": str, "bytes": lambda name: human_bytes(lines[name])}, left=("memory",))


def tier_table(tier: TierAdvice) -> Table:
    columns: dict[str, Callable[[Budget], str]] = {  # rows are per step
        "store.memory": lambda budget: budget.memory,
        "rows in\nmemory": lambda budget: f"{budget.memory_rows:,}",
        "rows\nenter": lambda budget: f"{budget.rows_entered_per_step:,.0f}",
        "from the\ncold tier": lambda budget: f"{budget.rows_from_cold_per_step:,.0f}",
        f"of the\n{cold_tier(tier)}": lambda budget: "" if budget.disk_share is None else percent(budget.disk_share),
        "waits": lambda budget: "" if budget.waits is None else percent(budget.waits),
    }

    def chosen(budget: Budget) -> bool:
        return budget is tier.recommended

    return table_of(tier.budgets, marked(columns, chosen), left=("store.memory",), chosen=chosen)


def cold_tier(tier: TierAdvice) -> str:
    return "disk" if tier.server is None else "servers"


def tier_sentences(tier: TierAdvice, step_ms: float, *, whole_run: bool) -> Iterator[str]:
    if tier.disk is not None and tier.disk.pages_s is not None:
        yield (
            f"The disk of {tier.disk.folder} reads {tier.disk.pages_s:,.0f} random pages of 4 KiB a second past the "
            f"page cache; waits are those of steps of {step_ms:g} ms, if it does nothing else"
        )
    elif tier.disk is not None:
        yield f"The disk was not measured, so waits are unknown: {tier.disk.why_not}"
    elif tier.server is not None and tier.server.row_us is not None:
        rates = " and ".join(f"{1e6 / us:,.0f}" for us in tier.server.row_us)
        yield (
            f"{', '.join(tier.server.servers)}: {rates} rows a second (of each group) are read and written again, "
            f"{tier.server.rows_a_call:,} at a time; a round trip takes {tier.server.round_trip_ms:.2g} ms; waits are "
            f"those of steps of {step_ms:g} ms, if the servers do nothing else"
        )
    elif tier.server is not None:
        yield f"The servers were not measured, so waits are unknown: {tier.server.why_not}"
    if not tier.budgets:
        yield "No memory that this machine has is enough for this store; see `prefetcher check`"
    elif tier.recommended is None and tier.budgets[-1].waits is not None:
        yield (
            f"Every one of these waits for the {cold_tier(tier)} {100 * MOST_WAITING:g} % of the time or longer: use "
            f"a faster {'disk' if tier.server is None else 'network or more servers'}, or a machine with more memory"
        )
    margin = max((budget.margin for budget in tier.budgets), default=0.0)
    if margin:
        yield f"Rows from the cold tier are estimates, at most ± {percent_number(margin)} % (three standard errors)"
    if not whole_run:
        yield "Rows that were trained before the stretch count as never trained: omit --samples to count them"


def sentences(advice: Advice) -> Iterator[str]:
    choice, predicted, half = advice.choice, advice.recommended.predicted, advice.recommended.half
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
    if half is not None:
        more = half.lookahead.rows_fetched_per_step / max(1.0, predicted.lookahead.rows_fetched_per_step) - 1
        yield (
            f"Half of it, {human_bytes(half.capacity_bytes)}, would fetch {half.lookahead.rows_fetched_per_step:,.0f} "
            f"rows per step, {percent_number(max(0.0, more))} % more"
        )
    yield assumptions(advice.assumed)


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


def notes(job: Job, advice: Advice, shorter_rows_per_step: float | None) -> Iterator[str]:
    """`shorter_rows_per_step`: fetched, as estimated from a stretch half as long; None for a whole run."""
    read, assumed, choice, predicted = advice.read, advice.assumed, advice.choice, advice.recommended.predicted
    yield sureness(read, predicted)
    ranks = job.ranks
    if ranks.count > 1:
        yield (
            f"All numbers are of one of {ranks.count} ranks, the first, but for the memory of a host, which is that of "
            f"{plural(ranks.on_host, 'pair')} of prefetcher and trainer. The capacity holds the batches of the rank "
            "that owns most of them. Exchanges between ranks take time of their own: `prefetcher simulate --ranks`"
        )
    if shorter_rows_per_step is not None:
        yield settling(read, predicted, shorter_rows_per_step)
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
    of_what = "every batch of the run" if read.whole_run else "every batch that was read"
    if least == 1.0:
        return f"Every row was followed through {of_what}, so their traffic was counted, not estimated"
    return (
        f"{percent_number(least)} % of the rows, {read.followed_rows:,} chosen by a hash of their keys, were followed "
        f"through {of_what}. What they move stands for all rows, ± {percent_number(predicted.lookahead.margin)} % of "
        "the rows fetched (three standard errors). How many rows each batch touches was counted"
    )


def settling(read: Read, predicted: Point, shorter: float) -> str:
    now = predicted.lookahead.rows_fetched_per_step
    far = read.steps // 2
    what = (
        f"{plural(read.samples, 'sample')} from the middle of an epoch were read, and the second half of these steps "
        f"counts. Half as many would have given {shorter:,.0f} rows fetched per step instead of {now:,.0f}. Savings "
        f"from rows that return after more than {plural(far, 'step')} cannot be measured"
    )
    if now and abs(shorter / now - 1) < SETTLED:
        return what
    return f"{what}: treat this as a first guess, and the capacity as too small; give more --samples, or omit --samples"


def left_out(job: Job) -> Iterator[str]:
    for name, given in (("cache.groups", bool(job.cache.groups)), ("cache.pin", job.cache.pin is not None)):
        if given:
            yield f"{name} of the job was ignored, and is not in the sections below"
