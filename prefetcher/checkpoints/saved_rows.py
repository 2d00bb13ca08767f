"""Looks up single rows of a checkpoint where they lie on disk: any rows, in any order, without a store in memory.

Files are mapped, so that only the pages of rows that are looked up are read, and stay readable after a run has removed
them.
"""

from functools import cached_property
from pathlib import Path

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.row_files import Rows, row_file_header
from rowcast.prefetcher.stores.first_records import first_records
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.checkpoint_manifest import Manifest, RowFile
from rowcast.runtime.errors import DataError


class SavedRows:
    """The rows of one group."""

    def __init__(self, root: Path, manifest: Manifest, group: GroupSpec, seed: int) -> None:
        """The files were found whole (`Checkpoints.choose`)."""
        self._root, self._group, self._seed = root, group, seed
        self._files = [file for layer in reversed(manifest.layers) for file in layer.of_group(group.name)]

    @cached_property
    def _mapped(self) -> list[Rows]:
        """Newest first. Raises DataError."""
        return [self._map(file) for file in self._files]

    def _map(self, file: RowFile) -> Rows:
        path, header = self._root / file.file, len(row_file_header(file.num_rows, self._group.record_bytes))
        try:
            content = np.memmap(path, np.uint8, mode="r", shape=(file.nbytes,))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: a file of the checkpoint cannot be read ({error}); load the run again") from None
        keys_end = header + 8 * file.num_rows
        return content[header:keys_end].view(np.int64), content[keys_end:].reshape(file.num_rows, -1)

    def records(self, keys: Keys) -> Records:
        """Returns the records u8 [n, record_bytes] of rows by ascending key; first values of those never trained."""
        records = np.empty((len(keys), self._group.record_bytes), np.uint8)
        missing = np.arange(len(keys))
        for held, rows in self._mapped:
            at = np.minimum(np.searchsorted(held, keys[missing]), len(held) - 1)
            here = held[at] == keys[missing]
            records[missing[here]] = rows[at[here]]
            missing = missing[~here]
        records[missing] = first_records(self._group, self._seed, keys[missing])
        return records
