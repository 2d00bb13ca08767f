"""Names the first values of a training script's tables: a rule, files of a released model, a file, or one number.

A checkpoint that names them holds only rows with other values. So a name identifies the values: a
rule by all that decides them, a file by its size and the checksum of a sample.
"""

import os
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from rowcast.runtime.disk import CHECKSUM, sampled_file
from rowcast.runtime.errors import DataError

NUM_BLOCKS, BLOCK_BYTES = 1024, 64 * 2**10  # of a file's sample
NUM_PAGES, PAGE_BYTES = 64, 4096  # of a released file's, of which there may be hundreds
NamedFiles = tuple[tuple[str, int, str], ...]  # name, bytes, checksum
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RowRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values as those of a job's table of this name and `init` (`protocol/first_values.py`)."""

    init: str
    seed: Count
    table: str
    num_rows: int
    width: int
    zero_row: int  # the row of the padding, which is zeros; -1: none


class ReleasedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    nbytes: Count
    checksum: str = ""  # in a checkpoint: xxh3_64 of a sample of its pages, 16 hex digits

    def __post_init__(self) -> None:
        if not os.path.isabs(self.path) or (self.checksum and not CHECKSUM.fullmatch(self.checksum)):
            raise ValueError(f"a released file {self.path!r} with checksum {self.checksum!r} is impossible")

    def sampled(self) -> "ReleasedFile":
        """Returns it with its size and checksum now. Raises DataError."""
        nbytes, checksum = sample_of(self.path, NUM_PAGES, PAGE_BYTES)
        return replace(self, nbytes=nbytes, checksum=checksum)


class ReleasedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values in safetensors files of a released model: one tensor, whole or cut by rows."""

    tensor: str  # the parameter's name
    dtype: Literal["F32", "BF16", "F16"]
    files: tuple[ReleasedFile, ...]
    parts: tuple[
        tuple[Count, Count, Count], ...
    ]  # in the order of rows: index of its file, byte of its first row, rows

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "F32" else 2


class FirstValues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First values of some columns of a table's records."""

    width: Annotated[int, msgspec.Meta(ge=1)]
    rule: RowRule | None = None
    released: ReleasedTable | None = None  # if None, and without a rule, they are in a file or all equal
    path: str = ""  # a file with f32 [rows, width]; "" if all have `value`
    offset: Count = 0  # bytes before the first row
    row_bytes: Count = 0  # from a row to the next; 0: rows follow each other
    value: float = 0.0
    # of the whole file, in a checkpoint: its size, and xxh3_64 of its sample, 16 hex digits
    nbytes: Count = 0
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.checksum and not (CHECKSUM.fullmatch(self.checksum) and os.path.isabs(self.path)):
            raise ValueError(f"first values in {self.path!r} with checksum {self.checksum!r} are impossible")

    @property
    def is_on_demand(self) -> bool:
        """Whether rows are made or read on demand, so that the table is nowhere stored whole."""
        return self.rule is not None or self.released is not None

    @property
    def files(self) -> "tuple[FirstValues | ReleasedFile, ...]":
        return self.released.files if self.released else (self,) if self.path else ()

    @property
    def named_files(self) -> "NamedFiles":
        """The same files in any folder."""
        return tuple((os.path.basename(file.path), file.nbytes, file.checksum) for file in self.files)

    def sampled(self) -> "FirstValues":
        """Returns it with the sizes and checksums of its files now. Raises DataError."""
        if self.released is not None:
            files = tuple(file.sampled() for file in self.released.files)
            return replace(self, released=replace(self.released, files=files))
        nbytes, checksum = sample_of(self.path, NUM_BLOCKS, BLOCK_BYTES)
        return replace(self, nbytes=nbytes, checksum=checksum)

    def check(self) -> None:
        """Raises DataError unless the files that a checkpoint names are as they were."""
        for file in self.files:
            if file.checksum and (now := file.sampled()) != file:
                raise DataError(
                    f"{file.path} holds first values of a table that the checkpoint names, {file.nbytes:,} bytes with "
                    f"checksum {file.checksum}, and has {now.nbytes:,} with {now.checksum}; bring that file back"
                )


def other_file(was: NamedFiles, now: NamedFiles) -> str:
    """Which file is the first that differs, as the end of a sentence; "" if none does."""
    for pair in zip_longest(was, now):
        if pair[0] != pair[1]:
            there, here = (
                "no file" if own is None else "{} of {:,} bytes with checksum {}".format(*own) for own in pair
            )
            return f"{there}, and there is now {here}"
    return ""


def sample_of(path: str, num_blocks: int, block_bytes: int) -> tuple[int, str]:
    """Returns the size of a file and the checksum of its sample. Raises DataError."""
    try:
        return sampled_file(Path(path), num_blocks, block_bytes)
    except OSError as error:
        raise DataError(f"{path} has first values of a table, but cannot be read ({error.strerror})") from None
