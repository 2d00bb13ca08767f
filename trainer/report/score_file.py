"""Writes scores as CSV or Parquet, a row per sample, under another name until all are there.

model                                  columns            with --probability     of labels click and buy
binary cross entropy; own `logits`     logit              probability            click_logit, buy_logit
another loss of its own                score              refused                click_score, buy_score
with `score_name`                      that               refused, but "logit"   click_..., buy_...
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv
from pyarrow import parquet as pq

from rowcast.runtime.arrays import F32
from rowcast.runtime.disk import partial_of
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.report.score_place import check_place

ROWS_AT_ONCE = 65536  # in memory, and in a row group
WRITERS = {".csv": csv.CSVWriter, ".parquet": pq.ParquetWriter}


class ScoreFile:
    """Takes the scores of all samples, in their order. `finish` gives the file its name."""

    def __init__(self, path: Path, labels: Sequence[str], *, probability: bool) -> None:
        """`labels`: their names if there are several. Raises ConfigError."""
        check_place(path, "--scores")
        self._path, self._partial = path, partial_of(path)
        self._labels, self._probability = labels, probability
        self._writer: Any = None
        self._held: list[F32] = []
        self._num_held = 0

    def begin(self, name: str) -> None:
        """`name`: of the scores, as `JobModel.score_name`. Raises ConfigError."""
        if self._probability and name != "logit":
            raise ConfigError(
                f"--probability: the model has a loss of its own, and its outputs are called {name!r}, not logits; "
                "leave out --probability, or give the model a method logits(outputs)"
            )
        column = "probability" if self._probability else name
        names = [f"{label}_{column}" for label in self._labels] or [column]
        self._schema = pa.schema([(name, pa.float32()) for name in names])
        self._held, self._num_held = [], 0
        self._writer = self._told(lambda: WRITERS[self._path.suffix](self._partial, self._schema))

    def write(self, scores: F32) -> None:
        self._held.append(probabilities(scores) if self._probability else scores)
        self._num_held += len(scores)
        if self._num_held >= ROWS_AT_ONCE:
            self._write_held()

    def finish(self) -> None:
        def finish() -> None:
            self._writer.close()
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())
            self._partial.rename(self._path)

        self._write_held()
        self._told(finish)

    def _write_held(self) -> None:
        if self._held:
            scores = np.concatenate(self._held).reshape(self._num_held, len(self._schema))
            table = pa.Table.from_arrays([arrow_array(column) for column in scores.T], schema=self._schema)
            self._told(lambda: self._writer.write_table(table))
            self._held, self._num_held = [], 0

    def _told(self, write: Any) -> Any:
        try:
            return write()
        except OSError as error:
            raise RowcastError(
                f"{self._partial}: scores cannot be written ({error.strerror or error}); free space there, or "
                "give another folder"
            ) from None


def probabilities(logits: F32) -> F32:
    return torch.from_numpy(logits).double().sigmoid().float().numpy()


def arrow_array(values: F32) -> Any:
    """`pa.array` imports pandas where it is installed, which takes 40 MiB."""
    return pa.Array.from_buffers(pa.float32(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])
