"""The newest published version, for processes that answer requests: no torch, no sockets, no cache of its own."""

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowcast.job.units import parse_bytes
from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import DataError
from rowcast.serving.snapshot import CHECKS, LookupCounts, Snapshot, open_snapshot
from rowcast.serving.version_file import CURRENT, VersionFile, read_current, read_version

TRIES = 5  # versions may be removed between CURRENT and their opening

UNBOUND = (
    "{}: an earlier rowcast wrote these versions without checksums of those they stand on, so a version that another "
    "one has replaced is not noticed; the next `rowcast publish` writes a whole version"
)


class Model:
    """All methods may be called from any thread. `now` gives one version that stays the same."""

    def __init__(self, folder: str | Path, warm: str | int = "0", check: str = "changed") -> None:
        """`warm`: bytes of the newest rows to read at the start, such as "64MiB". `check`: "all" also reads
        all rows of whole versions. Raises DataError if there is no version or it is damaged, ValueError."""
        if check not in CHECKS:
            raise ValueError(f"check = {check!r} is not one of {', '.join(CHECKS)}")
        self._folder, self._check = Path(folder), check
        self._counts = LookupCounts()
        self._lock = threading.Lock()
        nbytes = 0 if str(warm) == "0" else parse_bytes(warm)
        self._now = self._open(None)
        every = sum(table.rows.nbytes for opened in self._now.versions for table in opened.file.tables)
        for index, view in enumerate(self._now.tables.values()):
            own_bytes = sum(len(opened.rows[index]) for opened in self._now.versions)
            view.warm(min(own_bytes, nbytes * own_bytes // max(1, every)))

    def now(self) -> Snapshot:
        """Returns the present version, which never changes. A request that holds one sees one step."""
        return self._now

    @property
    def version(self) -> VersionFile:
        return self._now.version

    def rows(self, feature: str, ids: Any) -> F32:
        """As `Snapshot.rows`, of the present version."""
        return self._now.rows(feature, ids)

    def look_up(self, ids: Mapping[str, Any]) -> dict[str, F32]:
        """As `Snapshot.look_up`, of the present version."""
        return self._now.look_up(ids)

    def bags(self, feature: str, ids: Any, offsets: Any, weights: Any = None) -> F32:
        """As `Snapshot.bags`, of the present version."""
        return self._now.bags(feature, ids, offsets, weights)

    def dense_features(self, columns: Mapping[str, Any]) -> F32:
        """As `Snapshot.dense_features`, of the present version."""
        return self._now.dense_features(columns)

    def dense(self) -> dict[str, Any]:
        """As `Snapshot.dense`, of the present version."""
        return self._now.dense()

    def counts(self) -> dict[str, int]:
        """Returns look-ups since the model was opened, how many found a trained row, and calls that waited for
        pages."""
        counts = self._counts
        with counts.lock:
            return {"lookups": counts.lookups, "trained": counts.trained, "waits": counts.waits}

    def refresh(self) -> bool:
        """Opens the newest version next to the present one, if it is newer. Returns whether it did.

        Raises DataError if that version is damaged, or if CURRENT went back or names another version under the present
        one's number; the present one stays.
        """
        with self._lock:
            before, named = self._now, read_current(self._folder)
            own = before.version.named
            if named.number == own.number and not named.checksum:
                named = read_version(self._folder, named).named
            if named.number < own.number or (named != own and named.number == own.number):
                raise DataError(
                    f"{self._folder / CURRENT}: it names version {named.number} {named.checksum}, but this reader has "
                    f"version {own.number} {own.checksum}, and numbers ascend; open the folder again"
                )
            if named == own:
                return False
            self._now = self._open(before)
            return True

    def _open(self, before: Snapshot | None) -> Snapshot:
        for attempt in range(TRIES):
            named = read_current(self._folder)
            if not named.number:
                raise DataError(
                    f"{self._folder} holds no version yet; `rowcast publish --to {self._folder}` writes one"
                )
            try:
                snapshot = open_snapshot(self._folder, named, before, self._check, self._counts)
            except DataError:
                if attempt + 1 == TRIES or read_current(self._folder) == named:
                    raise
            else:
                if not snapshot.is_bound and (before is None or before.is_bound):
                    warnings.warn(UNBOUND.format(self._folder), stacklevel=3)
                return snapshot
        raise AssertionError("the last try returns or raises")
