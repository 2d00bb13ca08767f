"""Says where each table of several ranks goes, and why: what the run's first batches send by rows and as vectors."""

from collections.abc import Callable, Iterator

from rowcast.analysis.check.findings import Finding, ok
from rowcast.job.schema import Job
from rowcast.prefetcher.planner.placement import Bytes, TableBytes, Traffic, everywhere
from rowcast.runtime.telemetry.format_numbers import human_bytes


def check_placement(asked: Job, placed: Job, count: Callable[[], Traffic]) -> Iterator[Finding]:
    """`asked`: the job as its file has it. `placed`: with every table placed as a run would. `count`: counts what the
    run's first batches send."""
    if placed.ranks.count == 1 or all(table.placement == "rows" for table in asked.tables):
        return
    traffic, found = count(), [table.placement for table in placed.tables]
    for table, own in zip(asked.tables, traffic.of_each(found), strict=True):
        if table.placement != "rows":
            yield ok(sentence_of(own))
    rows, chosen = traffic.of(everywhere(placed, "rows")), traffic.of(found)
    yield ok(f"all tables: {sum_of(chosen)} a step, both ways; with all tables by rows {sum_of(rows)}")


def sentence_of(own: TableBytes) -> str:
    rows, vectors = human_bytes(own.rows), human_bytes(own.vectors)
    if own.owners:
        ranks = ", ".join(map(str, own.owners))
        who = f"rank {ranks} pools it" if len(own.owners) == 1 else f"ranks {ranks} pool a piece of its columns each"
        return f"table {own.table}: {who} for all, {vectors} a rank and step; by rows {rows}"
    why = "; its owner would make the busiest rank busier" if own.vectors < own.rows else ""
    return f"table {own.table}: rows travel, {rows} a rank and step; as pooled vectors {vectors}{why}"


def sum_of(nbytes: Bytes) -> str:
    return f"{human_bytes(nbytes.mean)} a rank, {human_bytes(nbytes.most)} the busiest"
