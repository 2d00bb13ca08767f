"""Writes a trace: every batch's ids and the planner's decisions for it, in one file that can be planned again anywhere.

The file is Arrow IPC, with one compressed record batch of one row per step, and a last row of kind "end":

    step, train_step, epoch, batch_size    as in ScheduledBatch; batch_size is in samples
    kind               train | eval | end
    ids                [N] feature-major, in the narrowest unsigned type that holds every table's ids
    offsets            [F * B + 1], or null if every bag holds one id
    weighted           whether the look-ups have weights, which are not saved: plans do not depend on their values
    rows_fetched, rows_evicted, rows_written_back, fill_after    one value per group; in the end row, rows_written_back
                       are the rows flushed
    after_step         or null
    batch_checksum     xxh3 of ids, offsets and weighted, 16 hex digits
    plan_checksum      xxh3 of the plan's scalars and arrays except the weights
    finished           in the end row: True if the data had ended, False if a stop was asked for

The schema's metadata are the version and the header (header.py). Writer and reader hold one step in memory. The file
appears only as a whole, and so only for a run that ended in order.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rowcast.prefetcher.planner.horizon import ScheduledLookups
from rowcast.prefetcher.traces.header import TraceHeader, feature_limits
from rowcast.protocol.batch import Batch, IdsBatch
from rowcast.protocol.plan import GroupPlan, StepPlan
from rowcast.protocol.plan_layout import GROUP_ARRAYS
from rowcast.runtime.checkpoint_manifest import sync_folder
from rowcast.runtime.disk import partial_of
from rowcast.runtime.errors import ConfigError

TRACE_VERSION = "3"
VERSION_KEY, HEADER_KEY = b"rowcast.trace.version", b"rowcast.trace.header"
END = "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What a trace keeps of a plan; each tuple has one value per group."""

    rows_fetched: tuple[int, ...]
    rows_evicted: tuple[int, ...]
    rows_written_back: tuple[int, ...]  # dirty victims
    fill_after: tuple[int | None, ...]
    after_step: int | None
    checksum: str  # of everything that was decided


def plan_facts(plan: StepPlan) -> PlanFacts:
    groups = plan.groups
    return PlanFacts(
        rows_fetched=tuple(len(group.fetch_keys) for group in groups),
        rows_evicted=tuple(len(group.evict_keys) for group in groups),
        rows_written_back=tuple(group.num_dirty for group in groups),
        fill_after=tuple(group.fill_after for group in groups),
        after_step=plan.after_step,
        checksum=plan_checksum(plan),
    )


def plan_checksum(plan: StepPlan) -> str:
    # the 0 keeps the checksums of traces saved before
    hasher = xxhash.xxh3_64(f"{plan.step} 0 {plan.kind} {plan.after_step}".encode())
    for group in plan.groups:
        hasher.update(f" {group.num_dirty} {group.fill_after} {group.weights is not None}".encode())
        for array in plan_arrays(group):
            add_array(hasher, array)
    return hasher.hexdigest()


def plan_arrays(group: GroupPlan) -> Iterator[npt.NDArray[Any] | None]:
    """Yields what the planner decided: all arrays except the weights, which are the batch's own."""
    for name in GROUP_ARRAYS:
        if name != "weights":
            yield getattr(group, name)
    yield from (group.fetch_keys, group.evict_keys, group.load_keys, group.spill_keys)


def batch_checksum(batch: Batch | IdsBatch) -> str:
    hasher = xxhash.xxh3_64(f"{batch.size} {batch.weights is not None}".encode())
    for array in (batch.ids, batch.offsets):
        add_array(hasher, array)
    return hasher.hexdigest()


def add_array(hasher: Any, array: npt.NDArray[Any] | None) -> None:
    """Hashes dtype and shape as well, so that no two lists of arrays look alike."""
    if array is None:
        hasher.update(b" none")
        return
    hasher.update(f" {array.dtype.str} {array.shape} ".encode())
    hasher.update(np.ascontiguousarray(array).data)


def trace_schema(header: TraceHeader) -> Any:
    largest = max(limit for _, limit in feature_limits(header)) - 1
    ids = next(kind for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()) if largest < 2**kind.bit_width)
    counts = [
        (name, pa.list_(pa.int64())) for name in ("rows_fetched", "rows_evicted", "rows_written_back", "fill_after")
    ]
    return pa.schema(
        [
            *((name, pa.int64()) for name in ("step", "train_step", "epoch", "batch_size")),
            ("kind", pa.string()),
            ("ids", pa.list_(ids)),
            ("offsets", pa.list_(pa.int64())),
            ("weighted", pa.bool_()),
            *counts,
            ("after_step", pa.int64()),
            ("batch_checksum", pa.string()),
            ("plan_checksum", pa.string()),
            ("finished", pa.bool_()),
        ],
        metadata={VERSION_KEY: TRACE_VERSION, HEADER_KEY: msgspec.json.encode(header)},
    )


class TraceWriter:
    """A context manager for one thread at a time; without `finish` it leaves no file."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Raises ConfigError if the file cannot be made, as all methods do if it cannot be written."""
        if path.exists() and not path.is_file():  # a rename would replace even a device by the trace
            raise ConfigError(
                f"--save-trace {path}: exists and is not a file; name a file, such as {path.parent / 'run.trace'}"
            )
        self._path = path
        self._partial = partial_of(path)
        self._schema = trace_schema(header)
        self._next_step = 0
        try:
            self._file = self._partial.open("wb")
            self._writer: Any = pa.ipc.new_file(
                self._file, self._schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
            )
        except OSError as error:
            raise self._refusal(error) from None

    def add(self, scheduled: ScheduledLookups, plan: StepPlan) -> None:
        assert scheduled.step == plan.step == self._next_step, (
            f"step {plan.step} was added, but step {self._next_step} follows"
        )
        self._next_step += 1
        batch, facts = scheduled.batch, plan_facts(plan)
        self._write(
            step=plan.step,
            train_step=plan.train_step,
            epoch=plan.epoch,
            batch_size=batch.size,
            kind=plan.kind,
            ids=batch.ids,
            offsets=batch.offsets,
            weighted=batch.weights is not None,
            rows_fetched=facts.rows_fetched,
            rows_evicted=facts.rows_evicted,
            rows_written_back=facts.rows_written_back,
            fill_after=facts.fill_after,
            after_step=facts.after_step,
            batch_checksum=batch_checksum(batch),
            plan_checksum=facts.checksum,
        )

    def finish(self, rows_flushed: tuple[int, ...], *, finished: bool) -> None:
        """Adds the barrier after the last step, with each group's rows that it brought home. The file appears."""
        try:
            self._write(step=self._next_step, kind=END, rows_written_back=rows_flushed, finished=finished)
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.rename(self._path)
            sync_folder(self._path.absolute().parent)
        except OSError as error:
            raise self._refusal(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the file is removed anyway
            self._file.close()
        with suppress(OSError):  # usually it was renamed
            self._partial.unlink()

    def _write(self, **values: Any) -> None:
        columns = [column(values.get(field.name), field.type) for field in self._schema]
        try:
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"--save-trace {self._path}: cannot be written ({error.strerror or error}); "
            "choose another file or free space"
        )


def column(value: Any, kind: Any) -> Any:
    if isinstance(value, np.ndarray):
        values = pa.array(value.astype(kind.value_type.to_pandas_dtype(), copy=False))
        return pa.ListArray.from_arrays(pa.array([0, len(value)], pa.int32()), values)
    return pa.array([value], kind)
