"""Rows of a released model: tensors of safetensors files that no process holds as a whole.

find_released    a folder and a parameter's name -> where its rows are: one tensor, or pieces of it cut by rows

    memory.weight                              whole
    memory.weight.shard_0, .shard_1, ...       in pieces, in any of the files
    memory.shard_0.weight, memory.shard_1.weight, ...

ReleasedRows     reads rows: the pages of all of them are asked for, then copied
"""

import mmap
import os
import re
from pathlib import Path

import numpy as np

from rowcast.runtime.arrays import F32, I64, Bytes
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.disk import open_regular
from rowcast.runtime.errors import ConfigError, DataError, listed
from rowcast.runtime.first_values import FirstValues, ReleasedFile, ReleasedTable
from rowcast.runtime.mapped_pages import ask_for
from rowcast.runtime.tensor_file import PlacedTensor, read_header

DTYPES = ("F32", "BF16", "F16")


def find_released(folder: str | Path, name: str, num_rows: int, width: int) -> FirstValues:
    """Where the rows of parameter `name`, [num_rows, width], are in a folder of safetensors files. Raises ConfigError
    if they are not there, or are others; DataError for a damaged file."""
    root = Path(folder).absolute()
    pieces = pieces_of(root, name)
    for path, key, tensor in pieces:
        if tensor.dtype not in DTYPES or tensor.dtype != pieces[0][2].dtype:
            raise ConfigError(
                f"{path}: {key} is {tensor.dtype}; the rows of a table are read from tensors of one dtype, "
                f"{listed(DTYPES, len(DTYPES))}, so convert it first"
            )
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise ConfigError(f"{path}: {key} is {[*tensor.shape]}, and rows of the parameter have {width:,} values")
    total = sum(tensor.shape[0] for _, _, tensor in pieces)
    if total != num_rows:
        raise ConfigError(
            f"{root}: {listed([key for _, key, _ in pieces])} have {total:,} rows, and the parameter {name} has "
            f"{num_rows:,}; make the model as it was released"
        )
    paths = list(dict.fromkeys(path for path, _, _ in pieces))
    released = ReleasedTable(
        tensor=name,
        dtype=pieces[0][2].dtype,  # type: ignore[arg-type]
        files=tuple(ReleasedFile(path=str(path), nbytes=path.stat().st_size) for path in paths),
        parts=tuple((paths.index(path), tensor.start, tensor.shape[0]) for path, _, tensor in pieces),
    )
    return FirstValues(width=width, released=released)


def pieces_of(root: Path, name: str) -> list[tuple[Path, str, PlacedTensor]]:
    """The files, names and places of the tensors with the rows of a table, in the order of the rows."""
    stem, _, last = map(re.escape, name.rpartition("."))
    pattern = re.compile(rf"{re.escape(name)}(?:\.shard_(\d+))?|{stem}\.shard_(\d+)\.{last}")
    found: dict[int, tuple[Path, str, PlacedTensor]] = {}
    paths = sorted(root.glob("*.safetensors"))
    for path in paths:
        for key, tensor in read_header(path).items():
            if match := pattern.fullmatch(key):
                number = int(match[1] or match[2] or 0)
                if number in found:
                    raise ConfigError(
                        f"{path}: {key} and {found[number][1]} of {found[number][0].name} are both the rows of number "
                        f"{number} of {name}; keep one of them in the folder"
                    )
                found[number] = path, key, tensor
    missing = next(number for number in range(len(found) + 1) if number not in found)
    if found and missing < len(found):
        raise ConfigError(
            f"{root} has {len(found):,} pieces of {name} up to number {max(found):,}, and lacks number {missing:,}; "
            "complete the folder"
        )
    if not found:
        raise ConfigError(
            f"none of the {len(paths):,} files *.safetensors in {root} has a tensor {name} or {name}.shard_0; "
            "name the folder that has it, and the parameter as the files do"
        )
    return [found[number] for number in range(len(found))]


class ReleasedRows:
    """Implements `RowsOnDemand`. Several threads may read."""

    def __init__(self, first: FirstValues) -> None:
        """Raises DataError for a file that is not as long as it was."""
        assert first.released is not None
        self._table, self._width = first.released, first.width
        self._ends = np.cumsum([rows for _, _, rows in self._table.parts])
        self._files = [RowsFile(file) for file in self._table.files]
        for file, offset, rows in self._table.parts:
            self._files[file].check_holds(offset + rows * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return self._width * self._table.item_bytes

    def __call__(self, numbers: I64) -> F32:
        """Returns these rows, f32 [n, width]. Raises DataError if a file has changed since it was opened, or if one of
        the rows is not finite. Without rows it looks at all files."""
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], self._ends)
        begins = np.append(0, ends[:-1])
        parts = np.flatnonzero(ends > begins)
        used = {self._table.parts[part][0] for part in parts.tolist()} if len(parts) else range(len(self._files))
        for file in used:
            self._files[file].check()
        raw = np.empty((len(numbers), self._row_bytes), np.uint8)
        places = [(*self._place(part), order[begins[part] : ends[part]]) for part in parts.tolist()]
        for memory, offset, first, chosen in places:
            ask_for(memory, offset, self._row_bytes, numbers[chosen] - first)
        for memory, offset, first, chosen in places:
            copy_rows(memory, offset, numbers[chosen] - first, chosen, raw)
        values = as_f32(raw, self._table.dtype)
        bad = np.flatnonzero(~np.isfinite(values).all(1))
        if len(bad):
            row = int(numbers[bad[0]])
            file = self._table.parts[int(np.searchsorted(self._ends, row, side="right"))][0]
            raise DataError(
                f"{self._table.files[file].path}: row {row:,} of {self._table.tensor} has values that are not finite, "
                "and a step needs it; repair the file"
            )
        return values

    def _place(self, part: int) -> tuple[Bytes, int, int]:
        """The file of a part, and its first row: its byte there, and its number."""
        file, offset, rows = self._table.parts[part]
        return self._files[file].memory, offset, int(self._ends[part]) - rows


class RowsFile:
    def __init__(self, file: ReleasedFile) -> None:
        self._path = file.path
        try:
            with open_regular(Path(file.path)) as opened:
                self._was = state_of(os.fstat(opened.fileno()))
                mapping = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"{file.path} has rows of a table, but cannot be read ({error})") from None
        mapping.madvise(mmap.MADV_RANDOM)  # a fault reads its page alone
        self.memory: Bytes = np.frombuffer(mapping, np.uint8)

    def check_holds(self, nbytes: int) -> None:
        if len(self.memory) < nbytes:
            raise DataError(
                f"{self._path} has {len(self.memory):,} bytes, and rows of a table up to byte {nbytes:,}; bring the "
                "released file back"
            )

    def check(self) -> None:
        try:
            now = state_of(os.stat(self._path))
        except OSError as error:
            raise DataError(
                f"{self._path} has rows of a table, and is gone ({error.strerror}); bring it back"
            ) from None
        if now != self._was:
            raise DataError(
                f"{self._path} was changed or replaced while a table's rows are read from it: {now[2]:,} bytes, "
                f"{self._was[2]:,} before; leave released files as they are, and start again"
            )


def state_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """What changes with the file's content."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@compiled_loop
def copy_rows(memory: Bytes, offset: int, numbers: I64, places: I64, out: Bytes) -> None:
    """Sets out[places[i]], u8 [n, row_bytes], to row numbers[i] of a part that begins at `offset`."""
    row_bytes = out.shape[1]
    for i in range(len(numbers)):
        begin = offset + numbers[i] * row_bytes
        for at in range(row_bytes):
            out[places[i], at] = memory[begin + at]


def as_f32(raw: Bytes, dtype: str) -> F32:
    """u8 [n, bytes] -> f32 [n, width], exact."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32, copy=False)
