"""Names the first values of a training script's tables: a rule, a file, or one number for all rows.

A checkpoint that names them holds only rows with other values. So a name has what tells that the values are the same:
a rule all that decides them, a file its size and the checksum of a sample.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from rowcast.runtime.disk import CHECKSUM, sampled_file
from rowcast.runtime.errors import DataError

NUM_BLOCKS, BLOCK_BYTES = 1024, 64 * 2**10  # of a file's sample
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RowRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values as those of a job's table of this name and `init` (`protocol/first_values.py`)."""

    init: str
    seed: Count
    table: str
    num_rows: int
    width: int
    zero_row: int  # the row of the padding, which is zeros; -1: none


class FirstValues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values of some columns of a table's records."""

    width: Annotated[int, msgspec.Meta(ge=1)]
    rule: RowRule | None = None  # None: they are in a file, or all alike
    path: str = ""  # a file with f32 [rows, width]; "": all have `value`
    offset: Count = 0  # bytes before the first row
    row_bytes: Count = 0  # from a row to the next; 0: rows follow each other
    value: float = 0.0
    # of the whole file, in a checkpoint: its size, and xxh3_64 of its sample, 16 hex digits
    nbytes: Count = 0
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.checksum and not (CHECKSUM.fullmatch(self.checksum) and os.path.isabs(self.path)):
            raise ValueError(f"first values in {self.path!r} with checksum {self.checksum!r} are impossible")

    def sampled(self) -> "FirstValues":
        """Returns it with the size and checksum of its file now. Raises DataError."""
        try:
            nbytes, checksum = sampled_file(Path(self.path), NUM_BLOCKS, BLOCK_BYTES)
        except OSError as error:
            raise DataError(f"{self.path} has first values of a table, but cannot be read ({error.strerror})") from None
        return replace(self, nbytes=nbytes, checksum=checksum)

    def check(self) -> None:
        """Raises DataError unless a file that a checkpoint names is as it was."""
        if self.checksum and (now := self.sampled()) != self:
            raise DataError(
                f"{self.path} holds first values of a table that the checkpoint names, {self.nbytes:,} bytes with "
                f"checksum {self.checksum}, and has {now.nbytes:,} with {now.checksum}; bring that file back"
            )
