"""Turns a log of (owner, item, time) into histories and next items, for `sasrec` and `hstu`.

    python -m examples.next_item log.parquet --owner CustomerID --item StockCode --time InvoiceDate --out data/next-item

The folder gets

    train.parquet    a row for each window of an owner's items, without the last one:
                     history    list of i64: ids of the items, oldest first, at most --history
                     positive   list of i64: for each of them the id of the item that came next
                     time       list of i64: when each item of the history came, in seconds, or the log's integers
    eval.parquet     a row for each owner: the newest items before the last one, which is the only positive
    counts.npy       i64: how often each item is in the training windows, by id
    items.parquet    the log's value of each id

Ids are numbered by how frequent items are, the most frequent is 0.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

I64 = npt.NDArray[np.int64]


class Log(NamedTuple):
    """The lines of a log, by owner and then by time."""

    owner: I64  # numbered from 0
    item: I64  # numbered from 0
    time: I64
    names: pa.Array  # the log's value of each item


def read_log(path: Path, columns: list[str], missing: str) -> Log:
    """Reads the columns of owner, item and time. Leaves out the lines without one of them, and the owner `missing`."""
    table = pq.read_table(path, columns=columns).combine_chunks()
    owner, item, time = (table.column(name).combine_chunks() for name in columns)
    known = pc.and_(pc.and_(owner.is_valid(), item.is_valid()), time.is_valid())
    is_missing = pc.equal(pc.cast(owner, pa.string()), missing)
    kept = pc.and_(known, pc.invert(pc.fill_null(is_missing, fill_value=True)))
    print(f"{len(table):,} lines, {len(table) - pc.sum(kept).as_py():,} left out: no owner, item or time")
    owners, items = (column.filter(kept).dictionary_encode() for column in (owner, item))
    times = time.filter(kept)
    if pa.types.is_timestamp(times.type):
        times = pc.divide(pc.cast(pc.cast(times, pa.timestamp("us")), pa.int64()), 1_000_000)
    found = [owners.indices.to_numpy(), items.indices.to_numpy(), times.cast(pa.int64()).to_numpy()]
    order = np.lexsort((found[2], found[0]))  # stable: lines of one time keep their order
    by_owner, of_item, at = (column[order].astype(np.int64) for column in found)
    return Log(owner=by_owner, item=of_item, time=at, names=items.dictionary)


def by_frequency(log: Log, trained: npt.NDArray[np.bool_]) -> Log:
    """Numbers the items by their lines in `trained`; of equal ones the first in the log first."""
    counts = np.bincount(log.item[trained], minlength=len(log.names))
    order = np.argsort(-counts, kind="stable")
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    return log._replace(item=numbers[log.item], names=log.names.take(pa.array(order)))


def lists(values: I64, bounds: I64) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(values))


def windows(log: Log, starts: I64, stops: I64, num_positives: I64) -> pa.Table:
    """Returns a row for each window of lines [start, stop): all but its last line are the history, and the last
    `num_positives` lines are the positives."""
    lengths = stops - starts - 1
    history, positive = ranges(starts, lengths), ranges(stops - num_positives, num_positives)
    bounds, of_positives = np.append(0, np.cumsum(lengths)), np.append(0, np.cumsum(num_positives))
    return pa.table(
        {
            "history": lists(log.item[history], bounds),
            "positive": lists(log.item[positive], of_positives),
            "time": lists(log.time[history], bounds),
        }
    )


def ranges(starts: I64, lengths: I64) -> I64:
    """Returns start, start + 1, ... of each range, one after another."""
    return np.repeat(starts - np.append(0, np.cumsum(lengths))[:-1], lengths) + np.arange(lengths.sum())


def make_windows(log: Log, least: int, history: int) -> tuple[Log, pa.Table, pa.Table]:
    """Returns the log with ids by frequency, the training windows, and the evaluation windows of the last items."""
    firsts = np.flatnonzero(np.diff(log.owner, prepend=-1))
    ends = np.append(firsts[1:], len(log.owner))
    long = ends - firsts >= least
    print(f"{len(firsts):,} owners, {np.sum(~long):,} left out: fewer than {least} items")
    firsts, ends = firsts[long], ends[long]
    trained = np.zeros(len(log.item), bool)
    trained[ranges(firsts, ends - 1 - firsts)] = True
    log = by_frequency(log, trained)
    # training: lines [first, end - 1), cut from the newest line into windows of history + 1 lines that share one line
    pieces = -(-(ends - firsts - 2) // history)
    last = np.repeat(ends - 1, pieces) - history * ranges(np.zeros_like(pieces), pieces)
    starts = np.maximum(last - history - 1, np.repeat(firsts, pieces))
    train = windows(log, starts, last, last - starts - 1)
    held_out = windows(log, np.maximum(ends - history - 1, firsts), ends, np.ones_like(ends))
    return log, train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    for role in ("owner", "item", "time"):
        parser.add_argument(f"--{role}", required=True, help=f"the column of the {role}")
    parser.add_argument("--missing", default="", help="an owner that stands for a missing one, such as -1")
    parser.add_argument("--least", type=int, default=5, help="items of an owner, at least")
    parser.add_argument("--history", type=int, default=50, help="items of a history, at most")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.least < 3 or options.history < 1:
        parser.error(f"--least {options.least} --history {options.history}: give at least 3 and 1")
    log = read_log(options.log, [options.owner, options.item, options.time], options.missing)
    log, train, held_out = make_windows(log, options.least, options.history)
    options.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(train, options.out / "train.parquet")
    pq.write_table(held_out, options.out / "eval.parquet")
    pq.write_table(pa.table({"item": log.names}), options.out / "items.parquet")
    seen = train["positive"].combine_chunks().flatten().to_numpy()
    np.save(options.out / "counts.npy", np.bincount(seen, minlength=len(log.names)).astype(np.int64))
    print(f"{len(train):,} training windows, {len(held_out):,} to evaluate, {len(log.names):,} items: {options.out}")


if __name__ == "__main__":
    main()
