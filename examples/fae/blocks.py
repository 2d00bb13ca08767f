"""FAE's schedule: hot and cold batches in alternating blocks, as a reordered copy of the data.

    training rows   hot block | cold block | hot block | ... | the rest of the longer kind | samples of no full batch
    held-out rows   as they were

A run of the copy with `data.shuffle = "none"` trains this schedule, and restarts in it exactly.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.fae.hot import Popularity
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import RowOrder, open_reader
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError


def block_order(rows: Popularity, budget: int, batch_size: int, block: int) -> I64:
    """Returns i64 [S], the samples in FAE's order, numbered as in `rows`. `block`: batches of each block."""
    is_hot, numbers = rows.coldest < budget, np.full(len(rows.coldest), len(rows.coldest))
    for kind in (is_hot, ~is_hot):
        in_full = np.flatnonzero(kind)[: kind.sum() // batch_size * batch_size]
        numbers[in_full] = np.arange(len(in_full)) // (batch_size * block)
    return np.lexsort((~is_hot, numbers))


def write_blocks(job: Job, order: I64, folder: Path) -> Job:
    """Writes the job's data in this order; returns the job that trains it. `order`: of the first epoch's samples.

    Raises ConfigError for a format that is neither parquet nor criteo-npy."""
    if job.data.format not in ("parquet", "criteo-npy"):
        raise ConfigError(
            f'data.format = "{job.data.format}": hot and cold blocks are written as parquet and criteo-npy; convert '
            "the data to one of these"
        )
    reader = open_reader(with_values(job, {"data": {"eval_path": None}}))
    shuffled = RowOrder(seed=job.job.seed, epoch=0, num_rows=len(order), window=job.data.shuffle_window)
    trained = shuffled.rows(0, len(order))[order]
    folder.mkdir(parents=True, exist_ok=True)
    if job.data.format == "parquet":
        table = pa.concat_tables([pq.read_table(path) for path in reader.paths])
        path = folder / "blocks.parquet"
        pq.write_table(pa.concat_tables([table.take(pa.array(trained)), table.slice(len(order))]), path)
    else:
        path = folder
        for part in ("dense", "sparse", "labels"):
            values = np.concatenate([np.load(day) for day in reader.paths if day.stem.endswith(f"_{part}")])
            np.save(folder / f"day_0_{part}.npy", np.concatenate([values[trained], values[len(order) :]]))
    return with_values(job, {"data": {"path": str(path), "shuffle": "none"}})
