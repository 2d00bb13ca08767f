"""Prints the results of `prefetcher advise`: the data read, the curve, its precision, memory, sections to paste."""

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowcast.analysis.advise.cost import Assumed, CoresNeed
from rowcast.analysis.advise.read import Read
from rowcast.analysis.advise.recommend import KNEE_SAVING, Advice, Point
from rowcast.analysis.advise.tiers import MOST_WAITING, TierAdvice
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent, percent_number, plural

WIDE = 100  # columns from which the curve shows slots and limits too
MIB = 2**20
CHOSEN = "bold green"
SETTLED = 0.05  # a stretch half as long may differ by this much and still be trusted


def print_advice(advice: Advice, console: Console) -> None:
    say(console, title(advice.read), "bold")
    for table in (working_sets_table(advice), curve_table(advice, wide=console.width >= WIDE)):
        console.print()
        console.print(table)
    console.print()
    for sentence in (*sentences(advice), *advice.notes):
        say(console, f"{sentence}.")
    console.print()
    console.print(memory_table(advice))
    if advice.tier is not None:
        console.print()
        console.print(tier_table(advice.tier))
        console.print()
        for sentence in tier_sentences(advice.tier, advice.assumed.step_ms, whole_run=advice.read.whole_run):
            say(console, f"{sentence}.")
    console.print()
    say(console, "These sections replace those of the job file:")
    console.print()
    console.print(Text(advice.recommended.toml.rstrip(), CHOSEN), soft_wrap=True)


def say(console: Console, text: str, style: str = "") -> None:
    console.print(Text("\n".join(textwrap.wrap(text, console.width)), style), soft_wrap=True)


def title(read: Read) -> str:
    evaluated = f" and {plural(read.eval_steps, 'evaluation step')}" if read.eval_steps else ""
    part = "the whole run" if read.whole_run else "a stretch of an epoch"
    followed = f"{percent_number(min(read.followed_share.values()))} % of the rows followed"
    return (
        f"Read: {part}, {plural(read.samples, 'sample')} in {plural(read.steps, 'train step')}{evaluated}; {followed}"
    )


def working_sets_table(advice: Advice) -> Table:
    own = advice.working_sets
    depth = own[0].depth
    table = plain_table("distinct rows", *(group.group for group in own))

    def row(name: str, *rows: int) -> None:
        table.add_row(
            name, *(f"{n:,} = {human_bytes(n * group.record_bytes)}" for n, group in zip(rows, own, strict=True))
        )

    row("a batch, median", *(group.batch.median for group in own))
    row("the largest batch", *(group.batch.largest for group in own))
    row(f"{depth} batches, median", *(group.flight.median for group in own))
    row(f"the largest {depth} batches", *(group.flight.largest for group in own))
    row("all batches", *(group.touched for group in own))
    row("all rows of the tables", *(group.table_rows for group in own))
    return table


def curve_table(advice: Advice, *, wide: bool) -> Table:
    """Rows and MiB are per step."""
    extra = ("slots",) if wide else ()
    names = (
        "capacity",
        *extra,
        "rows\nfetched",
        "MiB\nin",
        "MiB\nout",
        "hit\nratio",
        "LRU\nfetches",
        "doubling\nsaves",
        "rows\nmove\nin ms",
        "steps\nwait\nbelow ms",
    )
    table = plain_table(*names, padding=2 if wide else 1)
    if wide:
        table.add_column("limit")
    for point in advice.curve:
        chosen = point.capacity_bytes == advice.recommended.predicted.capacity_bytes
        table.add_row(
            *curve_cells(point, wide=wide, chosen=chosen),
            *([point.limit] if wide else []),
            style=CHOSEN if chosen else "",
        )
    return table


def curve_cells(point: Point, *, wide: bool, chosen: bool) -> Iterator[str]:
    ahead = point.lookahead
    yield f"{'*' if chosen else ' '} {human_bytes(point.capacity_bytes)}"
    if wide:
        yield f"{point.capacity_rows:,}"
    yield f"{ahead.rows_fetched_per_step:,.0f}"
    yield mib(ahead.bytes_fetched_per_step)
    yield mib(ahead.bytes_written_back_per_step)
    yield "" if ahead.hit_ratio is None else percent(ahead.hit_ratio)
    yield f"{point.lru.rows_fetched_per_step:,.0f}"
    yield percent(point.doubling_saves)
    yield f"{point.move_ms:.3g}"
    yield f"{point.least_step_ms:.3g}" if point.least_step_ms else "-"


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes > MIB / 10 or nbytes == 0 else f"{nbytes / MIB:.2g}"


def memory_table(advice: Advice) -> Table:
    host, device = advice.host, advice.device
    table = plain_table("host memory", "", "on the device", "")
    left = {
        "tables, all rows trained": host.tables_bytes,
        "tables, rows of this run": host.touched_bytes,
        "two rings": host.rings_bytes,
        "ids known ahead": host.ids_bytes,
        "the planner": host.planner_bytes,
        "batches decoded ahead": host.decoded_bytes,
    }
    right = {
        "capacity": device.capacity_bytes,
        "staging": device.staging_bytes,
        "plans": device.plans_bytes,
        "beside the dense model": device.capacity_bytes + device.staging_bytes + device.plans_bytes,
    }
    pairs = [(name, human_bytes(nbytes)) for name, nbytes in right.items()] + 2 * [("", "")]
    for (name, nbytes), pair in zip(left.items(), pairs, strict=True):
        table.add_row(name, human_bytes(nbytes), *pair)
    return table


def tier_table(tier: TierAdvice) -> Table:
    """Rows are per step."""
    table = plain_table(
        "store.memory", "rows in\nmemory", "rows\nenter", "from the\ncold tier", f"of the\n{cold_tier(tier)}", "waits"
    )
    for budget in tier.budgets:
        chosen = budget is tier.recommended
        table.add_row(
            f"{'*' if chosen else ' '} {budget.memory}",
            f"{budget.memory_rows:,}",
            f"{budget.rows_entered_per_step:,.0f}",
            f"{budget.rows_from_cold_per_step:,.0f}",
            "" if budget.disk_share is None else percent(budget.disk_share),
            "" if budget.waits is None else percent(budget.waits),
            style=CHOSEN if chosen else "",
        )
    return table


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


def plain_table(first: str, *others: str, padding: int = 2) -> Table:
    table = Table(box=None, padding=(0, padding, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


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
