"""What a checkpoint knows of the contents of data files."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rowcast.prefetcher.readers import data_files
from rowcast.prefetcher.readers.data_files import sampled
from rowcast.runtime.checkpoint_manifest import SavedTable
from rowcast.runtime.disk import blocks
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.first_values import FirstValues
from tests.support.facts import facts

BLOCK = 64 * 2**10


def written(path: Path, nbytes: int) -> Path:
    path.write_bytes((np.arange(-(-nbytes // 4), dtype=np.uint32) * 2654435761).tobytes()[:nbytes])
    return path


# nbytes -> checksum; a checkpoint of any version has these, so none may ever change
CHECKSUMS = {
    0: "2d06800538d394c2",
    1: "c44bdff4074eecdb",
    100_000: "811311f613c3333c",
    2**20: "eb4d287582a7932d",
    2**20 + 1: "a5563c415813eb12",
    12_345_678: "f813b3b30bf935f2",
}


def test_checksums_are_those_of_earlier_versions(tmp_path: Path) -> None:
    found = {nbytes: sampled([written(tmp_path / "a", nbytes)])[0].checksum for nbytes in CHECKSUMS}
    assert found == CHECKSUMS


def test_first_values_that_a_save_names_are_those_of_the_same_file(tmp_path: Path) -> None:
    path = written(tmp_path / "weights", 4000)
    place = FirstValues(width=4, path=str(path)).sampled()
    place.check()
    SavedTable(name="a", num_rows=250, dim=4, states=(), first=(place, FirstValues(width=1)))
    path.write_bytes(b"1" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=facts("weights", "4,000 bytes", "bring that file back")):
        place.check()
    path.unlink()
    with pytest.raises(DataError, match=facts("weights", "No such file")):
        place.check()
    os.mkfifo(path)
    with pytest.raises(DataError, match=facts("weights", "not a regular file")):
        place.check()
    for first in ((place,), (FirstValues(width=4, path=str(path)), FirstValues(width=1))):
        with pytest.raises(ValueError, match="first values"):
            SavedTable(name="a", num_rows=250, dim=4, states=(), first=first)


def test_each_file_has_its_path_and_size_in_order(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, nbytes) for name, nbytes in (("b", 7), ("a", 3_000_000))]
    assert [(file.path, file.nbytes) for file in sampled(paths)] == [(str(paths[0]), 7), (str(paths[1]), 3_000_000)]
    assert sampled([]) == ()


def test_a_path_that_is_no_text_is_kept_readable(tmp_path: Path) -> None:
    [file] = sampled([written(Path(f"{tmp_path}/a\udcff"), 1)])
    assert file.path == f"{tmp_path}/a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, 16 * BLOCK - 1, 16 * BLOCK, 16 * BLOCK + 1, 10**9 + 7])
def test_blocks_lie_apart_from_the_first_byte_to_the_last(nbytes: int) -> None:
    found = list(blocks(nbytes, 16, BLOCK))
    assert (found[0][0], found[-1][1]) == (0, nbytes)
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    assert sum(stop - start for start, stop in found) == min(nbytes, 16 * BLOCK)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 100, 512, 1000, 10**4, 10**5])
def test_all_files_together_take_few_blocks_and_64_mib(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(data_files, "sample", lambda path, *rule: asked.append(rule))
    sampled([Path("a")] * count)
    [(num_blocks, block_bytes)] = set(asked)
    assert num_blocks >= 2
    assert count * num_blocks <= max(1024, 2 * count)
    assert 0 < count * num_blocks * block_bytes <= 64 * 2**20
    assert count > 64 or (num_blocks, block_bytes) == (16, BLOCK)


def test_a_change_in_any_block_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "a", 3_000_001)
    before = sampled([path])
    for start, stop in blocks(3_000_001, 16, BLOCK):
        for at in (start, stop - 1):
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            (tmp_path / "b").write_bytes(content)
            assert sampled([tmp_path / "b"])[0].checksum != before[0].checksum


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone: cannot be read"):
        sampled([tmp_path / "gone"])
