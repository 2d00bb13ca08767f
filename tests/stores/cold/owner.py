"""The tiered store's part in keeping cold rows, over a dictionary: knows each row's place and bytes."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS, SegmentFile
from rowcast.prefetcher.stores.cold.segments import page_layout
from rowcast.prefetcher.stores.store import NOWHERE, ColdRows, Keys, Moved, Places, Records
from rowcast.runtime.arrays import I64
from tests.stores.every_store import GROUP

TABLE = 2  # of GROUP; its name is "second"


def keys_of(rows: Iterable[int]) -> Keys:
    return make_keys(TABLE, np.array(list(rows), np.int64))


def group_of(record_bytes: int) -> GroupSpec:
    return replace(GROUP, record_bytes=record_bytes)


def open_small(
    folder: Path, record_bytes: int = 80, segment_pages: int = 2, most: int = NOWHERE - 1
) -> tuple[SegmentFile, "Owner"]:
    """A file of 64 segments, and its owner."""
    disk_bytes = SEGMENTS * segment_pages * page_layout(record_bytes).nbytes
    file = SegmentFile.open(group_of(record_bytes), folder, disk_bytes, most)
    return file, Owner(file, record_bytes)


def records_of(keys: Keys, versions: I64, record_bytes: int) -> Records:
    """Every word differs from all words of other rows and versions."""
    words = (keys[:, None] << 24) + (versions[:, None] << 12) + np.arange(record_bytes // 8)
    return words.view(np.uint8)


class Owner:
    """May be called by several threads. `read` fails the test if the bytes are not those of the newest write."""

    def __init__(self, cold: ColdRows, record_bytes: int) -> None:
        self.cold, self.record_bytes = cold, record_bytes
        self.rows = dict[int, tuple[int, int]]()  # place and version, by key
        self.num_moved = 0
        self._lock = threading.Lock()
        self._newest = 0
        cold.attach(self.places_of, self.settle)

    def write(self, keys: Keys) -> Places:
        with self._lock:
            first, self._newest = self._newest + 1, self._newest + len(keys)
        versions = np.arange(first, first + len(keys))
        places = self.cold.write(keys, records_of(keys, versions, self.record_bytes))
        with self._lock:
            self._free(keys)
            self.rows.update(zip(keys.tolist(), zip(places.tolist(), versions.tolist(), strict=True), strict=True))
        return places

    def drop(self, keys: Keys) -> None:
        with self._lock:
            self._free(keys)

    def _free(self, keys: Keys) -> None:
        known = [key for key in keys.tolist() if key in self.rows]
        old = [self.rows.pop(key)[0] for key in known]
        self.cold.free(np.array(known, np.int64), np.array(old, np.uint32))

    def read(self, keys: Keys) -> None:
        with self.cold.hold():
            with self._lock:
                keys = np.array([key for key in keys.tolist() if key in self.rows], np.int64)
                found = [self.rows[key] for key in keys.tolist()]
            places, versions = np.array(found, np.int64).reshape(-1, 2).T
            out = np.full((len(keys), self.record_bytes), 0xCD, np.uint8)
            self.cold.read(keys, places.astype(np.uint32), out)
        expected = records_of(keys, versions, self.record_bytes)
        wrong = np.flatnonzero((out != expected).any(axis=1))
        assert not len(wrong), f"{len(wrong)} of {len(keys)} rows have other bytes than were written"

    def read_all(self) -> None:
        self.read(np.random.default_rng(0).permutation(np.array(list(self.rows), np.int64)))

    def places_of(self, keys: Keys) -> Places:
        with self._lock:
            return np.array([self.rows.get(key, (NOWHERE, 0))[0] for key in keys.tolist()], np.uint32)

    def settle(self, moved: Moved) -> None:
        with self._lock:
            for key, old, new in zip(*(array.tolist() for array in moved), strict=True):
                place, version = self.rows.get(key, (NOWHERE, 0))
                taken = place == old
                if taken:
                    self.rows[key] = (new, version)
                self.cold.free(np.array([key]), np.array([old if taken else new], np.uint32))
            self.num_moved += len(moved.keys)
