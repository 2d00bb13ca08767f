"""Ranks the positives of a next-item model among all items, however many there are, in a bounded memory.

    rowcast export --run runs/sasrec --out sasrec.safetensors
    python -m examples.all_items --config examples/sasrec.toml --export sasrec.safetensors --items 3413 --memory 64

The job's data.eval_path has the histories and positives (examples/next_item.py). The item table stays in the file: rows
of histories and positives are read one by one, and all items in blocks.
"""

import argparse
import io
import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor

from rowcast.job.file import load_job
from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.trainer.models import Sequences, build_model
from rowcast.trainer.models.evaluate import RANK_BINS, count_ranks, ranking_figures
from rowcast.trainer.models.next_item import History, NextItemModel, rounding_of

WINDOWS = 16  # histories that are computed together


class ItemRows:
    """The rows of an fp32 table in an export, read from the file when they are needed."""

    def __init__(self, export: io.BufferedReader, table: str) -> None:
        self._file = export
        (length,) = struct.unpack("<Q", self._file.read(8))
        entry = json.loads(self._file.read(length))[f"embedding_bags.{table}.weight"]
        if entry["dtype"] != "F32":
            raise SystemExit(f"{export.name}: table {table} has dtype {entry['dtype']}; this example reads F32")
        self.count, self.width = entry["shape"]
        self._start = 8 + length + entry["data_offsets"][0]

    def read(self, first: int, out: npt.NDArray[np.float32]) -> None:
        """Reads the rows from `first` on into `out`, f32 [n, width]."""
        self._file.seek(self._start + 4 * self.width * first)
        self._file.readinto(out.data)

    def of(self, items: npt.NDArray[np.int64]) -> Tensor:
        rows = np.empty((len(items), self.width), np.float32)
        for place, item in enumerate(items.tolist()):
            self.read(item, rows[place : place + 1])
        return torch.from_numpy(rows)


def load_model(job: Job, export: Path) -> NextItemModel:
    model = build_model(job, num_dense=0).eval()
    assert isinstance(model, NextItemModel), f"model.kind = {job.model.kind} has no next items"
    with safe_open(export, "pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in model.state_dict()})
    return model


def vectors_of(model: NextItemModel, rows: ItemRows, histories: list[list[int]], times: list[list[int]]) -> Tensor:
    """Returns the vector of each history's newest place, f32 [S, D]."""
    vectors = torch.empty(len(histories), rows.width)
    for start in range(0, len(histories), WINDOWS):
        own = histories[start : start + WINDOWS]
        offsets = torch.tensor([0, *(len(history) for history in own)]).cumsum(0).int()
        items = Sequences(values=rows.of(joined(own)), offsets=offsets)
        when = Sequences(values=torch.from_numpy(joined(times[start : start + WINDOWS])), offsets=offsets)
        padded, mask = items.padded(model.length)
        encoded = model.encode(History(padded, mask, when.padded(model.length)[0]))
        vectors[start : start + WINDOWS] = encoded[:, -1]
    return vectors


def joined(lists: list[list[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(np.array(own, np.int64) for own in lists)])


def ranks_of(vectors: Tensor, positives: npt.NDArray[np.int64], rows: ItemRows, memory: int) -> Tensor:
    """Returns how many other items do not score less than each positive, i64 [S]. `memory`: bytes of a block and of its
    scores."""
    items = rows.of(positives)
    least = (vectors * items).sum(1) - rounding_of(vectors, items)
    size = min(rows.count, max(1, memory // (4 * rows.width + 5 * len(positives))))
    block, ranks = np.empty((size, rows.width), np.float32), np.zeros(len(positives), np.int64)
    scores, behind = (torch.empty(len(positives), size, dtype=dtype) for dtype in (torch.float32, torch.bool))
    for first in range(0, rows.count, size):
        own = block[: rows.count - first]
        rows.read(first, own)
        torch.mm(vectors, torch.from_numpy(own).T, out=scores[:, : len(own)])
        torch.lt(scores, least[:, None], out=behind)
        inside = (positives >= first) & (positives < first + len(own))
        behind[torch.from_numpy(np.flatnonzero(inside)), torch.from_numpy(positives[inside] - first)] = True
        ranks += len(own) - behind[:, : len(own)].numpy().sum(1)
    return torch.from_numpy(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--items", type=int, help="items, as next_item prints; later rows are none. Default: all rows")
    parser.add_argument("--memory", type=int, default=64, help="MiB of a block of items and their scores")
    options = parser.parse_args()
    job = load_job(options.config)
    assert isinstance(job.model, NextItemSettings), "the model has next items"
    history, positive = job.model.history_feature, job.model.positive_feature
    table = next(table for table in job.tables if history in table.features)
    windows = pq.read_table(job.data.eval_path).to_pydict()
    with torch.no_grad(), options.export.open("rb") as file:
        rows, model = ItemRows(file, table.name), load_model(job, options.export)
        rows.count = min(rows.count, options.items or rows.count)
        vectors = vectors_of(model, rows, windows[history], windows[job.model.time])
        positives = np.array([own[-1] for own in windows[positive]])
        ranks = ranks_of(vectors, positives, rows, options.memory * 2**20)
    bins = torch.zeros(RANK_BINS, dtype=torch.int64)
    count_ranks(bins, ranks)
    print(f"{len(positives):,} positives among {rows.count:,} items")
    for name, value in ranking_figures(bins.tolist(), job.eval.ranks).items():
        print(f"{name.upper():8} {value:.6f}")


if __name__ == "__main__":
    main()
