"""Reads any rows of uncompressed Arrow files, which are mapped into memory as they lie on the disk.

file    | record batch  | record batch  | ...
column  | nulls, values | nulls, values |          the values of one width are gathered from the mapping at once
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rowcast.prefetcher.readers.columns import Ids
from rowcast.runtime.arrays import I64

NO_NULLS = -1


class MappedFile:
    def __init__(self, path: Path) -> None:
        """Raises OSError, and ArrowInvalid for a file of another kind."""
        with pa.memory_map(str(path)) as file:
            self.content = file.read_buffer()
        self._reader = pa.ipc.open_file(self.content)
        self.schema = self._reader.schema
        self._columns = {name: column for column, name in enumerate(self.schema.names)}
        self._kinds = self.schema.types
        self._widths = [width_of(kind) for kind in self._kinds]
        self._views = {
            column: np.frombuffer(self.content, kind.to_pandas_dtype(), self.content.size // width)
            for column, (kind, width) in enumerate(zip(self._kinds, self._widths, strict=True))
            if width
        }
        self._bytes = np.frombuffer(self.content, np.uint8)
        num_batches, num_columns = self._reader.num_record_batches, len(self._widths)
        self._batches: list[Any] = [None] * num_batches
        self._is_open = np.zeros(num_batches, np.bool_)
        self._compared: set[tuple[int, int]] = set()
        # where the values of each column and record batch begin in the file, in values; where their null bits do
        self._values = np.zeros((num_columns, num_batches), np.int64)
        self._nulls = np.full((num_columns, num_batches), NO_NULLS, np.int64)

    def open(self) -> list[int]:
        """Opens all record batches, and returns their numbers of rows. Raises ValueError for one that is compressed or
        has fewer values than rows, and pyarrow's errors for one that it cannot read."""
        for index in range(len(self._batches)):
            self._open(index)
        return [batch.num_rows for batch in self._batches]

    def take(self, rows: Ids, bounds: Ids, names: Sequence[str]) -> Any:
        """Returns a pyarrow.RecordBatch of the rows, in their order. `bounds`: of the record batches."""
        batches = np.searchsorted(bounds, rows, side="right") - 1
        where = rows - bounds[batches]
        for index in np.unique(batches[~self._is_open[batches]]).tolist():
            self._open(index)
        taken = [
            self._gathered(column, batches, where) if self._widths[column] else self._taken(column, batches, where)
            for column in map(self._columns.__getitem__, names)
        ]
        return pa.RecordBatch.from_arrays(taken, list(names))

    def batch(self, index: int) -> Any:
        return self._reader.get_batch(index)

    def _open(self, index: int) -> None:
        """Raises as `open`."""
        batch = self.batch(index)
        batch.validate()  # the lengths of columns against those of their buffers
        for column, width in enumerate(self._widths):
            nulls, values = batch.column(column).buffers()[:2] if width else (None, None)
            if values is not None and len(batch):
                self._values[column, index] = self._place(values) // width
                if batch.column(column).null_count:
                    self._nulls[column, index] = 8 * self._place(nulls)
        self._batches[index], self._is_open[index] = batch, True

    def _place(self, buffer: Any) -> int:
        place: int = buffer.address - self.content.address
        if not 0 <= place < self.content.size:
            raise ValueError("it is compressed")
        return place

    def _gathered(self, column: int, batches: I64, where: I64) -> Any:
        """Takes values of one width: `where` in each of `batches`."""
        values, bits = self._views[column].take(self._values[column].take(batches) + where), None
        if self._nulls[column].max(initial=NO_NULLS) > NO_NULLS:
            starts = self._nulls[column].take(batches)
            at = np.maximum(starts, 0) + where
            is_set = self._bytes[at // 8] >> (at % 8).astype(np.uint8) & 1
            bits = pa.py_buffer(np.packbits(is_set | (starts == NO_NULLS), bitorder="little"))
        return pa.Array.from_buffers(self._kinds[column], len(values), [bits, pa.py_buffer(values)])

    def _whole(self, column: int, index: int) -> Any:
        """Returns a column of a record batch after checking every offset and index against its target."""
        values = self._batches[index].column(column)
        if (column, index) not in self._compared:
            kind = values.type
            as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind)  # of any encoding
            (values if as_bytes is None else values.view(as_bytes)).validate(full=True)
            self._compared.add((column, index))
        return values

    def _taken(self, column: int, batches: I64, where: I64) -> Any:
        order = np.argsort(batches, kind="stable")
        firsts = np.flatnonzero(np.diff(batches[order], prepend=-1)).tolist()
        parts = [
            self._whole(column, int(batches[own[0]])).take(pa.array(where[own])) for own in np.split(order, firsts[1:])
        ]
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(places))


def width_of(kind: Any) -> int:
    """Returns the bytes of a number; 0 for other types."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return kind.bit_width // 8 if is_number else 0
