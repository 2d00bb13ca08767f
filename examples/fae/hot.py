"""FAE's knob: a budget of hot rows -> the share of look-ups and of whole samples that are hot.

A row is *hot* if it is among the most popular ones of one epoch. A sample is hot if all of its rows are.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Lookups
from rowcast.runtime.arrays import I64

SHARES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # budgets of the table, in distinct rows


def row_keys(job: Job, batch: Lookups) -> tuple[I64, I64]:
    """Returns i64 [N], [N]: the row of each look-up as table << 48 | row, and its sample within the batch."""
    tables = {name: index for index, table in enumerate(job.tables) for name in table.features}
    counts = np.ones(len(job.features) * batch.size, np.int64) if batch.offsets is None else np.diff(batch.offsets)
    features, samples = np.divmod(np.repeat(np.arange(len(counts)), counts), batch.size)
    return np.array([tables[name] for name in job.features])[features] << KEY_SHIFT | batch.ids, samples


@dataclass(frozen=True)
class Popularity:
    """How often one epoch of training looks up each row."""

    keys: I64  # [R] distinct rows, ascending
    ranks: I64  # [R] of each row, by look-ups: 0 is the hottest; of equally popular rows, the lower key is hotter
    counts: I64  # [R] look-ups by rank
    coldest: I64  # [S] the rank of each sample's coldest row, in the reader's order; -1 for one without look-ups

    def shares(self, budget: int) -> tuple[float, float]:
        """Returns the shares of look-ups and of samples that are hot."""
        return float(self.counts[:budget].sum() / self.counts.sum()), float((self.coldest < budget).mean())


def popularity(job: Job) -> Popularity:
    """Reads an epoch of training twice. It takes 16 bytes for each distinct row of each batch."""
    reader = open_reader(job)
    of_batches = [np.unique(row_keys(job, batch)[0], return_counts=True) for batch in reader.batches("train", 0)]
    keys, places = np.unique(np.concatenate([keys for keys, _ in of_batches]), return_inverse=True)
    counts = np.bincount(places, np.concatenate([counts for _, counts in of_batches])).astype(np.int64)
    order, ranks = np.argsort(-counts, kind="stable"), np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys))
    coldest = []
    for batch in reader.batches("train", 0):
        own_keys, samples = row_keys(job, batch)
        coldest.append(np.full(batch.size, -1))
        np.maximum.at(coldest[-1], samples, ranks[np.searchsorted(keys, own_keys)])
    return Popularity(keys, ranks, counts[order], np.concatenate(coldest))


def knob_table(rows: Popularity, record_bytes: int) -> str:
    """Returns a table in Markdown. `record_bytes`: of a row with its optimizer state."""
    lines = ["| hot rows | of distinct rows | MB | hot look-ups | hot samples |", "|---|---|---|---|---|"]
    for share in SHARES:
        budget = round(share * len(rows.keys))
        lookups, samples = rows.shares(budget)
        megabytes = budget * record_bytes / 1e6
        lines.append(f"| {budget:,} | {share:.1%} | {megabytes:,.1f} | {lookups:.1%} | {samples:.1%} |")
    return "\n".join(lines)


def draw_knob(rows: Popularity, path: Path) -> None:
    budgets = np.unique(np.geomspace(1, len(rows.keys), 200).astype(int))
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(budgets, [rows.shares(budget) for budget in budgets.tolist()], label=["hot look-ups", "hot samples"])
    axes.set(xscale="log", xlabel="budget: hot rows", ylabel="share", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)
