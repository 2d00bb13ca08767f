"""Checks a job with several ranks: parts, shards, hosts. Finds nothing for a single trainer."""

from collections.abc import Iterator, Sequence

import numpy as np

from rowcast.analysis.check.findings import Finding, ok, warning
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, TableSpec, make_keys
from rowcast.protocol.parts import part_bounds
from rowcast.protocol.shards import BLOCK_BITS, Shards
from rowcast.runtime.arrays import F64, I64
from rowcast.runtime.telemetry.format_numbers import human_bytes, plural

BLOCK_ROWS = 1 << BLOCK_BITS
MOST_BLOCKS = 2**20  # a table with more blocks is not counted: it is divided evenly enough
UNEVEN = 1.2  # the rows of the largest shard over the mean


def check_ranks(job: Job, groups: Sequence[GroupSpec]) -> Iterator[Finding]:
    ranks = job.ranks
    if ranks.num_parts == 1:
        return
    yield parts_finding(job)
    if ranks.count == 1:
        return
    yield shards_finding(groups, ranks.count)
    hosts = ranks.count // ranks.on_host
    if hosts > 1:
        yield warning(
            f"{ranks.on_host} of {ranks.count} ranks run on each of {hosts} hosts: job.run_dir = {str(job.run_dir)!r} "
            "must be the same folder on all of them, and this command sees only one"
        )


def parts_finding(job: Job) -> Finding:
    """Checks that each part of a batch has a sample. In the last batch of an epoch, a part may have none."""
    ranks, size = job.ranks, job.data.batch_size
    shared = f"{plural(ranks.count, 'rank')} of {plural(ranks.num_parts // ranks.count, 'part')}"
    sizes = np.diff(part_bounds(size, ranks.num_parts))
    if not sizes.min():
        return warning(
            f"{shared}: data.batch_size = {size} leaves {int((sizes == 0).sum())} of {ranks.num_parts} parts without a "
            f"sample; set {ranks.num_parts} or more, or fewer ranks.parts"
        )
    samples = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    return ok(f"{shared}, each of {samples} of the {size} samples of a batch")


def shards_finding(groups: Sequence[GroupSpec], count: int) -> Finding:
    rows = np.array([np.sum([shard_rows(table, count) for table in group.tables], axis=0) for group in groups])
    total, nbytes = rows.sum(axis=0), np.array([group.record_bytes for group in groups]) @ rows
    owned = f"a rank owns {round(total.min()):,} to {round(total.max()):,} of {round(total.sum()):,} rows"
    if total.max() > UNEVEN * total.mean():
        return warning(
            f"{owned}: rows are divided in blocks of {BLOCK_ROWS}, and these tables have few; use fewer ranks, which "
            "will have as much to do"
        )
    return ok(f"{owned}, up to {human_bytes(float(nbytes.max()))}")


def shard_rows(table: TableSpec, count: int) -> F64:
    """Returns the rows of each shard, [count]; their mean for a table that is too large to count."""
    num_blocks = -(-table.num_embeddings // BLOCK_ROWS)
    if num_blocks > MOST_BLOCKS:
        return np.full(count, table.num_embeddings / count)
    firsts: I64 = np.arange(num_blocks) * BLOCK_ROWS
    sizes = np.minimum(table.num_embeddings - firsts, BLOCK_ROWS)
    owners = Shards([table], count).owners(make_keys(table.index, firsts))
    found: F64 = np.bincount(owners, weights=sizes, minlength=count).astype(np.float64)
    return found
