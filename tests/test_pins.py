"""Pin files: what is written comes back as keys, and every fault is one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.readers.pin_files import PIN_FORMAT, PIN_VERSION, checksum, load_pins, save_pins
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.support.batches import small_job
from tests.support.facts import facts

FACTS = {"made_by": "a test"}


def groups() -> tuple[GroupSpec, ...]:
    """Tables narrow_a 0, narrow_b 2 | wide_a 1, wide_b 3, of 400, 2000 | 300, 100 rows."""
    return group_specs(small_job("adagrad"))


def rows(*numbers: int) -> I64:
    return np.array(numbers, np.int64)


def test_pins_come_back_as_ascending_keys_one_array_a_group(tmp_path: Path) -> None:
    save_pins(tmp_path / "pins", {"wide_b": rows(0, 99), "narrow_b": rows(1999), "narrow_a": rows(3, 7, 399)}, FACTS)
    narrow, wide = load_pins(tmp_path / "pins", groups())
    assert narrow.tolist() == [3, 7, 399, 2 * 2**48 + 1999]
    assert wide.tolist() == [3 * 2**48, 3 * 2**48 + 99]
    assert narrow.dtype == wide.dtype == np.int64


def test_tables_without_pins_and_files_without_any_are_allowed(tmp_path: Path) -> None:
    save_pins(tmp_path / "one", {"wide_a": rows(5), "narrow_a": rows()}, FACTS)
    assert [keys.tolist() for keys in load_pins(tmp_path / "one", groups())] == [[], [2**48 + 5]]
    save_pins(tmp_path / "none", {}, FACTS)
    assert [(len(keys), str(keys.dtype)) for keys in load_pins(tmp_path / "none", groups())] == [(0, "int64")] * 2


def test_a_pin_file_says_where_it_came_from(tmp_path: Path) -> None:
    save_pins(tmp_path / "pins", {"wide_a": rows(5)}, FACTS)
    with safe_open(tmp_path / "pins", framework="numpy") as file:
        assert file.metadata().items() >= {"made_by": "a test", "format": PIN_FORMAT, "version": PIN_VERSION}.items()


def test_writing_leaves_no_second_file_and_replaces_an_older_one(tmp_path: Path) -> None:
    save_pins(tmp_path / "pins", {"wide_a": rows(5)}, FACTS)
    save_pins(tmp_path / "pins", {"wide_a": rows(6)}, FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["pins"]
    assert load_pins(tmp_path / "pins", groups())[1].tolist() == [2**48 + 6]


def test_a_place_that_cannot_be_written_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts("pin file", "No such file or directory", "--out")):
        save_pins(tmp_path / "nowhere" / "pins", {"wide_a": rows(5)}, FACTS)


def test_rows_that_do_not_ascend_are_our_own_mistake_when_saving(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=facts("table wide_a", 5, 4, "ascend")):
        save_pins(tmp_path / "pins", {"wide_a": rows(5, 4)}, FACTS)
    assert not list(tmp_path.iterdir())


def raw(tensors: dict[str, Any], **facts: str | None) -> Callable[[Path], None]:
    """Writes a safetensors file with the metadata of a good pin file, changed by `facts`; None leaves one out."""
    metadata = {"format": PIN_FORMAT, "version": PIN_VERSION, "checksum": checksum(tensors)} | facts
    given = {name: value for name, value in metadata.items() if value is not None}
    return lambda path: save_file(tensors, path, metadata=given)


def good(path: Path) -> None:
    save_pins(path, {"wide_a": rows(*range(0, 300, 2)), "narrow_a": rows(3)}, FACTS)


def truncated(path: Path) -> None:
    good(path)
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    """The last row, 298, becomes 299: still ascending and inside the table."""
    good(path)
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(bytes(content))


FAULTS: dict[str, tuple[Callable[[Path], object], type[RowcastError], str]] = {
    "missing": (lambda path: None, ConfigError, "cannot be read (No such file or directory"),
    "a folder": (lambda path: path.mkdir(), ConfigError, "cannot be read ("),
    "empty": (lambda path: path.write_bytes(b""), DataError, "not a whole pin file ("),
    "no safetensors": (lambda path: path.write_text("rows of text\n" * 9), DataError, "not a whole pin file ("),
    "truncated": (truncated, DataError, "not a whole pin file ("),
    "a changed byte": (changed, DataError, "the rows do not have the checksum that was written with them"),
    "another safetensors file": (lambda path: save_file({"wide_a": rows(5)}, path), DataError, "but not a pin file"),
    "another format": (raw({"wide_a": rows(5)}, format="model"), DataError, "but not a pin file"),
    "another version": (raw({"wide_a": rows(5)}, version="2"), DataError, "version 2, but this version reads 1"),
    "no version": (raw({"wide_a": rows(5)}, version=None), DataError, "version None, but this version reads 1"),
    "no checksum": (raw({"wide_a": rows(5)}, checksum=None), DataError, "do not have the checksum"),
    "unknown table": (raw({"t_cat_0": rows(5)}), ConfigError, "table t_cat_0 is not a table of this job"),
    "row outside": (raw({"wide_a": rows(5, 300)}), ConfigError, "row 300 is outside table wide_a (num_embeddings"),
    "negative row": (raw({"wide_a": rows(-1, 3)}), DataError, "table wide_a do not ascend from 0, each once"),
    "descending": (raw({"wide_a": rows(5, 4)}), DataError, "table wide_a do not ascend from 0, each once"),
    "twice the same": (raw({"wide_a": rows(5, 5)}), DataError, "table wide_a do not ascend from 0, each once"),
    "other numbers": (raw({"wide_a": np.ones(3, np.float32)}), DataError, "are float32[3]; they must be int64[n]"),
    "two dimensions": (raw({"wide_a": np.ones((1, 3), np.int64)}), DataError, "are int64[1, 3]; they must be int64[n]"),
    "no rows": (raw({"wide_a": rows()}), DataError, "are int64[0]; they must be int64[n], n at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_no_run_can_pin_is_refused_with_one_sentence(fault: str, tmp_path: Path) -> None:
    make, kind, sentence = FAULTS[fault]
    path = tmp_path / "pins.safetensors"
    make(path)
    with pytest.raises(kind) as raised:
        load_pins(path, groups())
    assert str(raised.value).startswith(f"cache.pin = {str(path)!r}: ")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
