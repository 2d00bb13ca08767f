"""The rows of a group in one array, table after table, wherever the array lies: what the memory and the mapped store share."""

from collections.abc import Iterator

import numpy as np

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, make_keys
from rowcast.prefetcher.stores.first_values import first_records
from rowcast.prefetcher.stores.row_loops import (
    CHANGED,
    EACH_ROW,
    LANE_ROWS,
    PRESENT,
    Marks,
    Positions,
    Words,
    count_marked,
    find_marked,
    gather,
    scatter,
    settle_marks,
)
from rowcast.prefetcher.stores.store import FINISHED, Finished, Keys, Records

FOUND_AT_ONCE = 2**16  # keys of changed rows


def marks_bytes(group: GroupSpec) -> int:
    """Of the marks of a group's rows, whole lanes."""
    return -(-group.num_rows // LANE_ROWS) * LANE_ROWS


class TableStore:
    """Needs u64 `words` [num_rows, record_bytes / 8] and u8 `marks` [marks_bytes], as `loops` describes them."""

    def __init__(self, group: GroupSpec, seed: int, words: Words, marks: Marks) -> None:
        self._group = group
        self._seed = seed
        self._words = words
        self._marks = marks
        self._tables = {table.index: table for table in group.tables}
        sizes = [table.num_embeddings for table in group.tables]
        self._first = dict(zip(self._tables, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))

    def read(self, keys: Keys, out: Records) -> Finished:
        positions = self._positions(keys)
        if gather(self._words, self._marks, positions, out.view(np.uint64)):
            absent = np.flatnonzero(self._marks[positions] == 0)
            out[absent] = first_records(self._group, self._seed, keys[absent])
        return FINISHED

    def write(self, keys: Keys, rows: Records, step: int | None) -> Finished:
        scatter(rows.view(np.uint64), self._positions(keys), self._words, self._marks)
        return FINISHED

    def hint(self, keys: Keys, needed_at_step: int) -> None:
        """Reads are finished when they return: there is nothing to begin early."""

    def scan(self, table: int, block: int, *, changed: bool = False) -> Iterator[tuple[Keys, Records]]:
        for positions in self._marked(table, CHANGED if changed else PRESENT, block):
            records = np.empty((len(positions), self._words.shape[1]), np.uint64)
            gather(self._words, self._marks, positions, records)
            yield make_keys(table, positions - self._first[table]), records.view(np.uint8)

    def changed_keys(self, table: int) -> Keys:
        blocks = list(self._marked(table, CHANGED, FOUND_AT_ONCE))
        return make_keys(table, np.concatenate([np.empty(0, np.int64), *blocks]) - self._first[table])

    @property
    def num_changed(self) -> int:
        return count_marked(self._marks, CHANGED)

    def settle(self) -> None:
        settle_marks(self._marks.view(np.uint64))

    def forget(self, keys: Keys) -> None:
        self._marks[self._positions(keys)] = 0

    @property
    def host_bytes(self) -> int:
        return count_marked(self._marks, PRESENT) * self._group.record_bytes + len(self._marks)

    @property
    def restored(self) -> bool:
        return False

    def close_at(self, checkpoint: str) -> None:
        self._check_settled(checkpoint)
        self.close()

    def close(self) -> None:
        self._words, self._marks = np.empty((0, 0), np.uint64), np.empty(0, np.uint8)

    def _check_settled(self, checkpoint: str) -> None:
        changed = self.num_changed
        assert changed == 0, (
            f"group {self._group.name} is closed at checkpoint {checkpoint} with {changed} changed rows, expected 0"
        )

    def _marked(self, table: int, mark: int, block: int) -> Iterator[Positions]:
        """Positions of a table's rows that have the mark, ascending, in blocks."""
        lanes, lane = self._marks.view(np.uint64), np.uint64(mark * EACH_ROW)
        row, end = self._first[table], self._first[table] + self._tables[table].num_embeddings
        while row < end:
            positions = np.empty(block, np.int64)
            found, row = find_marked(self._marks, lanes, lane, row, end, positions)
            if found:
                yield positions[:found]

    def _positions(self, keys: Keys) -> Positions:
        """Where keys lie in the array; keys are ascending or ascending in two parts, so table by table costs little."""
        assert len(self._marks), f"the store of group {self._group.name} is closed, and {len(keys)} rows were asked for"
        positions = keys & ROW_MASK
        tables = keys >> KEY_SHIFT
        for table in np.unique(tables).tolist():
            positions[tables == table] += self._first[table]
        return positions
