"""Makes records of rows that were never trained: their first values (`protocol/first_values.py`), and states."""

import numpy as np

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec
from rowcast.prefetcher.stores.elements import elements_of, rounded
from rowcast.protocol.first_values import Initializer, fill_row, initial_rows, table_initializer
from rowcast.runtime.arrays import F32, I64, Bytes
from rowcast.runtime.compiled import compiled_loop


def first_records(group: GroupSpec, seed: int, keys: I64) -> Bytes:
    """Returns records of untrained rows, u8 [n, record_bytes]: initial weights and optimizer state, zero padding.
    `keys` [n] ascend."""
    records = np.empty((len(keys), group.record_bytes), np.uint8)
    fill_first_records(group, seed, keys, np.arange(len(keys)), records)
    return records


def fill_first_records(group: GroupSpec, seed: int, keys: I64, places: I64, records: Bytes) -> None:
    """Sets records[places[i]] to the record of the untrained row keys[i]; `records`: u8 [any, record_bytes]."""
    floats, empty = records.view(np.float32), np.zeros((1, group.record_bytes), np.uint8)  # a record without weights
    for part in group.parts:
        elements_of(empty, part)[:] = part.initial or 0
    of_values = [part for part in group.parts if part.initial is None]
    exact = next((part for part in of_values if part.dtype == "fp32"), None)
    first = -1 if exact is None else exact.elements.start
    bounds = np.append(np.searchsorted(keys, [table.index << KEY_SHIFT for table in group.tables]), len(keys))
    for i in np.flatnonzero(np.diff(bounds)):
        table, chosen = group.tables[i], slice(bounds[i], bounds[i + 1])
        rows, own, initializer = keys[chosen] & ROW_MASK, places[chosen], table_initializer(seed, table)
        fill_records(initializer, rows, own, empty.view(np.float32)[0], first, table.embedding_dim, floats)
        for part in of_values:
            if part is not exact:
                values = initial_rows(seed, table, rows) if exact is None else floats[own, exact.elements]
                elements_of(records, part)[own] = rounded(values, part.dtype)


@compiled_loop
def fill_records(
    initializer: Initializer, rows: I64, places: I64, empty: F32, first: int, dim: int, records: F32
) -> None:
    """Sets records[places[i]] to `empty` with the first values of row rows[i] at element `first`, unless it is -1."""
    for i in range(len(rows)):
        record = records[places[i]]
        for element in range(len(empty)):
            record[element] = empty[element]
        if first >= 0:
            fill_row(initializer, rows[i], record[first : first + dim])
