"""Reads a saved trace (writer.py) step by step, and checks everything before anything is indexed with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa

from rowcast.prefetcher.traces.header import TraceHeader, feature_limits
from rowcast.prefetcher.traces.writer import (
    END,
    HEADER_KEY,
    TRACE_VERSION,
    VERSION_KEY,
    PlanFacts,
    batch_checksum,
    trace_schema,
)
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.errors import ConfigError, DataError, Mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBatch(ScheduledBatch):
    """A batch from a trace, with its plan's facts. It has no dense features; its labels and weights are zeros."""

    facts: PlanFacts


class TraceReader:
    """A trace's header and its steps, one in memory at a time. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there is no file, Mismatch for another version, DataError for an incomplete file."""
        self._path = path
        try:
            path.open("rb").close()  # its errors have a reason in words, unlike Arrow's
            self._file = pa.memory_map(str(path))
        except OSError as error:
            raise ConfigError(
                f"--trace {path}: cannot be read ({error.strerror or error}); name a file of --save-trace"
            ) from None
        try:
            self._reader: Any = pa.ipc.open_file(self._file)
        except (pa.ArrowException, OSError):
            raise self._refusal("not a whole trace file: it was cut off or is something else") from None
        self.header = self._read_header()
        end = self._row(self._reader.num_record_batches - 1) if self._reader.num_record_batches else {}
        if end.get("kind") != END:
            raise self._refusal("the last row is not an end row")
        # False: the run was stopped, with more batches known
        self.finished = bool(end["finished"])
        self.rows_flushed = tuple(end["rows_written_back"])  # of each group

    @property
    def num_steps(self) -> int:
        return int(self._reader.num_record_batches) - 1

    def steps(self) -> Iterator[TracedBatch]:
        """Yields every step from 0 on. Raises DataError for a damaged one."""
        for step in range(self.num_steps):
            yield self._step(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_header(self) -> TraceHeader:
        metadata = self._reader.schema.metadata or {}
        if VERSION_KEY not in metadata:
            raise self._refusal("an Arrow file, but not a trace")
        version = metadata[VERSION_KEY].decode(errors="replace")
        if version != TRACE_VERSION:
            raise Mismatch(
                f"--trace {self._path}: trace version {version}, but this version reads {TRACE_VERSION}; save it again"
            )
        try:
            header = msgspec.json.decode(metadata.get(HEADER_KEY, b""), type=TraceHeader)
            expected = trace_schema(header)
        except (ValueError, RecursionError, StopIteration):
            raise self._refusal("its header is damaged") from None
        if not self._reader.schema.equals(expected):
            raise self._refusal("its columns are not those of a trace")
        return header

    def _row(self, index: int) -> dict[str, Any]:
        try:
            batch = self._reader.get_batch(index)
            batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise self._refusal(f"row {index} is damaged ({' '.join(str(error).split())})") from None
        if batch.num_rows != 1:
            raise self._refusal(f"record batch {index} has {batch.num_rows} rows instead of 1")
        return {name: cell(batch.column(name), name) for name in batch.schema.names}

    def _step(self, step: int) -> TracedBatch:
        row = self._row(step)
        if row["step"] != step or row["kind"] not in ("train", "eval"):
            raise self._refusal(f"row {step} is step {row['step']} of kind {row['kind']}")
        missing = [name for name in row if row[name] is None and name not in ("offsets", "after_step", "finished")]
        if missing:
            raise self._refusal(f"step {step} has no {missing[0]}")
        batch = self._batch(step, row)
        if batch_checksum(batch) != row["batch_checksum"]:
            raise self._refusal(f"the ids of step {step} do not have the checksum that was written with them")
        facts = PlanFacts(
            **{name: tuple(row[name]) for name in ("rows_fetched", "rows_evicted", "rows_written_back", "fill_after")},
            after_step=row["after_step"],
            checksum=row["plan_checksum"],
        )
        return TracedBatch(
            step=step, kind=row["kind"], train_step=row["train_step"], epoch=row["epoch"], batch=batch, facts=facts
        )

    def _batch(self, step: int, row: dict[str, Any]) -> Batch:
        ids, offsets, size = row["ids"], row["offsets"], row["batch_size"]
        features = feature_limits(self.header)
        num_bags = size * len(features)
        bounds = np.arange(num_bags + 1) if offsets is None else offsets
        if (
            size < 1
            or len(bounds) != num_bags + 1
            or bounds[0] != 0
            or bounds[-1] != len(ids)
            or (np.diff(bounds) < 0).any()
        ):
            raise self._refusal(
                f"step {step} has {len(ids)} ids and {len(bounds) - 1} bags for {size} samples "
                f"of {len(features)} features"
            )
        for (feature, limit), start, end in zip(features, bounds[::size], bounds[size::size], strict=False):
            if (ids[start:end] >= np.uint64(limit)).any():
                raise self._refusal(f"step {step} has an id of feature {feature} that is not below {limit}")
        return Batch(
            dense=np.zeros((size, 0), np.float32),
            labels=np.zeros(size, np.float32),
            ids=ids.astype(np.int64),
            offsets=offsets,
            weights=np.zeros(len(ids), np.float32) if row["weighted"] else None,
        )

    def _refusal(self, what: str) -> DataError:
        return DataError(f"--trace {self._path}: {what}; save it again with --save-trace")


def cell(array: Any, name: str) -> Any:
    if name in ("ids", "offsets"):
        return array.flatten().to_numpy(zero_copy_only=False).copy() if array.is_valid()[0].as_py() else None
    return array[0].as_py()
