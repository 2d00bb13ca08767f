"""Cold rows in a dictionary that soon gives places away again and moves rows often."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from rowcast.prefetcher.stores.store import NOWHERE, Keys, Moved, Places, Records
from rowcast.runtime.errors import DataError, RowcastError


class ColdDict:
    """Implements ColdRows. A freed place whose readers are gone is taken first by the next row."""

    def __init__(self, most: int = 2**20, seed: int = 0) -> None:
        self.most = most
        self.rows_read = self.rows_written = self.bytes_read = self.bytes_written = 0
        self.used_bytes = self.garbage_bytes = 0
        self.read_seconds = 0.0
        self.moved_rows = 0
        self.fails: Exception | None = None  # raised by the next read or write
        # called, without a lock, within each read and write before it is done
        self.on_read: Callable[[], None] = lambda: None
        self.on_write: Callable[[], None] = lambda: None
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._freed: set[int] = set()  # not to be given away while a reader holds
        self._free: list[int] = []
        self._num_held = 0
        self._is_untidy = False  # rows were freed since `tidy` has last looked
        self._lock = threading.Lock()
        self._chance = random.Random(seed)

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        self._places_of, self._settle = places_of, settle

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            self._num_held += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_held -= 1
                self._clear_freed()

    def write(self, keys: Keys, records: Records) -> Places:
        self._fail()
        places = self._store(keys, records)
        self.on_write()
        return places

    def read(self, keys: Keys, places: Places, out: Records) -> None:
        assert self._num_held, "places are held before they are looked up"
        self._fail()
        self.on_read()
        with self._lock:
            for i, (key, place) in enumerate(zip(keys.tolist(), places.tolist(), strict=True)):
                found = self._rows.get(place)
                if found is None or found[0] != key:
                    raise DataError(f"place {place} has {found and found[0]}, expected row {key}")
                out[i] = np.frombuffer(found[1], np.uint8)
        self.rows_read += len(keys)
        self.bytes_read += out.nbytes

    def free(self, keys: Keys, places: Places) -> None:
        with self._lock:
            for key, place in zip(keys.tolist(), places.tolist(), strict=True):
                assert place in self._rows, f"place {place} of row {key} is freed, but was never in use"
                assert self._in_use(place), f"place {place} of row {key} is freed twice"
                assert self._rows[place][0] == key, f"place {place} is freed by row {key}, not {self._rows[place][0]}"
                self._freed.add(place)
                self._is_untidy = True
            self._clear_freed()

    def tidy(self) -> bool:
        if not self._is_untidy or self._chance.random() < 0.5:
            return False
        self._is_untidy = False
        with self._lock:
            rows = [(place, *row) for place, row in self._rows.items() if self._in_use(place)]
        rows = self._chance.sample(rows, min(len(rows), 8))
        if not rows:
            return False
        keys = np.array([key for _, key, _ in rows], np.int64)
        if len(np.unique(keys)) < len(keys):
            return False  # a row that is being written has two places
        old = np.array([place for place, _, _ in rows], np.uint32)
        mine = self._places_of(keys) == old
        if mine.any():
            records = np.array([np.frombuffer(row, np.uint8) for _, _, row in rows])[mine]
            self._settle(Moved(keys[mine], old[mine], self._store(keys[mine], records)))
            self.moved_rows += int(mine.sum())
            self._is_untidy = False
        return bool(mine.any())

    def close(self) -> None:
        self._rows.clear()

    @property
    def places(self) -> dict[int, int]:
        """The place of each row that was not freed. Raises where a row has two."""
        live = [(key, place) for place, (key, _) in self._rows.items() if self._in_use(place)]
        assert len(dict(live)) == len(live), f"{len(live)} places are in use by {len(dict(live))} rows"
        return dict(live)

    def _in_use(self, place: int) -> bool:
        return place not in self._freed and self._rows[place][0] != NOWHERE

    def _store(self, keys: Keys, records: Records) -> Places:
        with self._lock:
            if len(self._rows) - len(self._free) + len(keys) > self.most:
                raise RowcastError(f"no room for {len(keys)} cold rows")
            places = []
            for key, record in zip(keys.tolist(), records, strict=True):
                place = self._free.pop() if self._free else len(self._rows)
                self._rows[place] = key, record.tobytes()
                places.append(place)
        self.rows_written += len(keys)
        self.bytes_written += records.nbytes
        return np.array(places, np.uint32)

    def _clear_freed(self) -> None:
        if self._num_held == 0:
            for place in self._freed:
                self._rows[place] = NOWHERE, b""
            self._free += self._freed
            self._freed.clear()

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error
