"""What `prefetcher advise` shows a person: what was read, the curve, how to read it, memory, and the sections to paste."""

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowcast.analysis.advise.advice import Advice, Point, Read
from rowcast.analysis.advise.sentences import sentences
from rowcast.analysis.format_shares import percent
from rowcast.runtime.telemetry.format_numbers import human_bytes, plural

WIDE = 100  # columns from which on the curve shows slots and limits too
MIB = 2**20
CHOSEN = "bold green"


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
    console.print()
    console.print(Text(advice.recommended.toml.rstrip(), CHOSEN), soft_wrap=True)


def say(console: Console, text: str, style: str = "") -> None:
    console.print(Text("\n".join(textwrap.wrap(text, console.width)), style), soft_wrap=True)


def title(read: Read) -> str:
    evaluated = f" and {plural(read.eval_steps, 'evaluation step')}" if read.eval_steps else ""
    part = "the whole run" if read.whole_run else "a stretch of an epoch"
    followed = f"{percent(min(read.followed_share.values()))} % of the rows followed"
    return (
        f"Read: {part}, {plural(read.samples, 'sample')} in {plural(read.steps, 'train step')}{evaluated}; {followed}"
    )


def working_sets_table(advice: Advice) -> Table:
    """A column a group."""
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
    """Rows and MiB are those of a step."""
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
        "move\nms",
        "least\nms",
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
    yield "" if ahead.hit_ratio is None else f"{100 * ahead.hit_ratio:.1f} %"
    yield f"{point.lru.rows_fetched_per_step:,.0f}"
    yield f"{100 * point.doubling_saves:.1f} %"
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
        "batches decoded ahead": host.decoded_bytes,
    }
    right = {
        "capacity": device.capacity_bytes,
        "staging": device.staging_bytes,
        "plans": device.plans_bytes,
        "beside the dense model": device.capacity_bytes + device.staging_bytes + device.plans_bytes,
    }
    pairs = [(name, human_bytes(nbytes)) for name, nbytes in right.items()] + [("", "")]
    for (name, nbytes), pair in zip(left.items(), pairs, strict=True):
        table.add_row(name, human_bytes(nbytes), *pair)
    return table


def plain_table(first: str, *others: str, padding: int = 2) -> Table:
    table = Table(box=None, padding=(0, padding, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table
