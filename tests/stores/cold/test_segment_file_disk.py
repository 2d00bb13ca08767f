"""A segment file on disks that are full, fail or return other bytes; and what it leaves in its folder: nothing."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.prefetcher.stores.cold import segment_file, segments
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS, SegmentFile
from rowcast.prefetcher.stores.cold.segments import BLOCK_BYTES, UNREADABLE, page_layout
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.stores.cold.owner import Owner, group_of, keys_of, open_small
from tests.stores.failing_calls import failing
from tests.support.facts import facts
from tests.support.repeats import count
from tests.support.small_disk import small_disk

ROWS = page_layout(80).num_rows  # rows of a page
SEGMENT = 2 * ROWS
RESTART = "then start again, from the newest checkpoint"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[SegmentFile, Owner]]:
    """Four segments are on the file, half a page is in the buffer."""
    file, owner = open_small(tmp_path)
    with closing(file):
        owner.write(keys_of(range(4 * SEGMENT + ROWS // 2)))
        yield file, owner


def name_of(folder: Path) -> str:
    return f"the file of cold rows of group fp32_d6_adagrad in {folder}"


def page_bytes(file: SegmentFile, page: int) -> bytes:
    return os.pread(file._file.fileno(), BLOCK_BYTES, page * BLOCK_BYTES)


def put_page(file: SegmentFile, page: int, content: bytes) -> None:
    os.pwrite(file._file.fileno(), content, page * BLOCK_BYTES)


def assert_damaged(owner: Owner, page: int, row: int, folder: Path) -> None:
    """Reading one row of a page is refused, with its name; reading all others of other pages is not."""
    with pytest.raises(DataError) as error:
        owner.read(keys_of([row]))
    assert error.value.exit_code == 4
    assert str(error.value) == (
        f"page {page} of {name_of(folder)}, which has row {row} of table second, has other bytes than were written "
        f"there; check that disk and this machine's memory, {RESTART}"
    )
    others = [key for key, (place, _) in owner.rows.items() if place // ROWS != page]
    owner.read(np.array(others, np.int64))


def tidy_all(file: SegmentFile) -> None:
    while file.tidy():
        pass


def fill(owner: Owner) -> None:
    """Writes a segment after the other."""
    for start in range(0, SEGMENTS * SEGMENT, SEGMENT):
        owner.write(keys_of(range(start, start + SEGMENT)))


# damage


def test_a_flipped_bit_anywhere_on_a_page_is_found(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, owner = opened
    whole, random = page_bytes(file, 1), np.random.default_rng(0)
    flipped = [bit + int(random.integers(count(32, 1))) for bit in range(0, 8 * BLOCK_BYTES, count(32, 1))]
    for bit in (*range(64), *flipped):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        put_page(file, 1, bytes(content))
        with pytest.raises(DataError, match=f"row {ROWS} of table second, has other bytes"):
            owner.read(keys_of([ROWS]))
    assert_damaged(owner, 1, ROWS, tmp_path)
    put_page(file, 1, whole)
    owner.read_all()


@pytest.mark.parametrize("page", [3, 4, 5], ids=["of its segment", "as far into its segment", "elsewhere"])
def test_a_page_that_another_one_was_written_over_is_found(
    opened: tuple[SegmentFile, Owner], tmp_path: Path, page: int
) -> None:
    file, owner = opened
    put_page(file, page, page_bytes(file, 2))
    assert_damaged(owner, page, page * ROWS + 3, tmp_path)


def test_a_page_of_zeros_is_found(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, owner = opened
    put_page(file, 0, bytes(BLOCK_BYTES))
    assert_damaged(owner, 0, 0, tmp_path)


def test_a_page_that_the_disk_forgot_to_write_is_found_although_it_has_older_bytes_of_the_same_rows(
    opened: tuple[SegmentFile, Owner], tmp_path: Path
) -> None:
    file, owner = opened
    old = page_bytes(file, 0)
    owner.write(keys_of(range(4 * SEGMENT)))  # the first four segments are empty now
    owner.write(keys_of(range(4 * SEGMENT, 5 * SEGMENT - ROWS // 2)))  # to the end of a segment
    owner.write(keys_of(range(SEGMENT)))
    assert [owner.rows[int(key)][0] for key in keys_of(range(SEGMENT))] == list(range(SEGMENT))
    assert page_bytes(file, 0) != old
    put_page(file, 0, old)
    assert_damaged(owner, 0, 7, tmp_path)


def test_a_row_that_is_not_where_its_place_says_is_found(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, owner = opened
    out = np.empty((1, 80), np.uint8)
    for place, page in ((5, 0), (8 * ROWS, 8)):  # on the file, in the buffer
        with pytest.raises(DataError) as error:
            file.read(keys_of([6]), np.array([place], np.uint32), out)
        assert error.value.exit_code == 4
        assert str(error.value) == (
            f"page {page} of {name_of(tmp_path)} has another row where row 6 of table second was written; "
            f"check this machine's memory, {RESTART}"
        )
    owner.read_all()


def test_a_damaged_page_is_not_moved(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, owner = opened
    owner.drop(keys_of(row for row in range(4 * SEGMENT) if row % 4))
    content = bytearray(page_bytes(file, 1))
    content[100] ^= 1
    put_page(file, 1, bytes(content))
    with pytest.raises(DataError, match=facts("page 1", name_of(tmp_path), "other bytes")):
        tidy_all(file)


# reading


def test_a_file_that_has_become_short_is_a_sentence(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, owner = opened
    os.ftruncate(file._file.fileno(), 7 * BLOCK_BYTES + 100)
    with pytest.raises(DataError) as error:
        owner.read(keys_of([2, 7 * ROWS + 1]))
    assert error.value.exit_code == 4
    assert str(error.value) == (
        f"{name_of(tmp_path)} cannot be read at page 7, which has row {7 * ROWS + 1} of table second (it has 100 of "
        f"4096 bytes); check that disk or set store.path to another one, {RESTART}"
    )
    owner.drop(keys_of(row for row in range(4 * SEGMENT) if row % 4))
    os.ftruncate(file._file.fileno(), BLOCK_BYTES + 100)
    with pytest.raises(DataError, match=facts("page 1", "it ends before")):
        tidy_all(file)


def test_a_disk_that_fails_to_read_is_a_sentence(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    """Nothing lies at the first addresses of this process: the kernel answers EIO, as a broken disk would."""
    file, owner = opened
    with open("/proc/self/mem", "rb") as broken:
        os.dup2(broken.fileno(), file._file.fileno())
    with pytest.raises(DataError) as error:
        owner.read(keys_of([3 * ROWS]))
    assert error.value.exit_code == 4
    assert str(error.value) == (
        f"{name_of(tmp_path)} cannot be read at page 3, which has row {3 * ROWS} of table second (Input/output "
        f"error); check that disk or set store.path to another one, {RESTART}"
    )
    owner.read(keys_of(range(4 * SEGMENT, 4 * SEGMENT + ROWS // 2)))  # in the buffer
    owner.drop(keys_of(row for row in range(4 * SEGMENT) if row % 4))
    with pytest.raises(DataError, match=facts("page 0", "Input/output error")):
        file.tidy()


def test_a_page_that_can_be_read_at_a_second_try_is(
    opened: tuple[SegmentFile, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a signal, which ends a read from some network file systems."""
    _, owner = opened
    read_rows: Any = segments.read_rows
    tries = 0

    def interrupted(*arguments: Any) -> tuple[int, int, int]:
        nonlocal tries
        tries += 1
        if tries == 3:
            return read_rows(*arguments)  # type: ignore[no-any-return]
        *others, places, order, keys, out = arguments
        _, found, num_pages = read_rows(*others, places[:50], order[:50], keys, out)
        return UNREADABLE, found, num_pages

    monkeypatch.setattr(segment_file, "read_rows", interrupted)
    owner.read_all()
    assert tries == 3


# writing


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (
            errno.ENOSPC,
            RowcastError,
            "has no space for {nbytes} more bytes (No space left on device); free space there",
        ),
        (errno.EDQUOT, RowcastError, "has no space for {nbytes} more bytes (Disk quota exceeded); free space there"),
        (errno.EIO, DataError, "cannot be written at page {page} (Input/output error); check that disk"),
    ],
)
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fails_to_write_is_a_sentence_and_what_was_written_stays(
    opened: tuple[SegmentFile, Owner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    kind: type[RowcastError],
    sentence: str,
) -> None:
    file, owner = opened
    before, num_live = dict(owner.rows), file._segments.num_live
    monkeypatch.setattr(os, call, failing(code))
    more = keys_of(range(5 * SEGMENT, 6 * SEGMENT))  # fills the buffer, and begins a segment
    page, nbytes = (10 if call == "posix_fallocate" else 8), 2 * BLOCK_BYTES
    for _ in range(2):
        with pytest.raises(kind) as error:
            owner.write(more)
        assert error.value.exit_code == (4 if kind is DataError else 1)
        assert str(error.value).startswith(f"{name_of(tmp_path)} {sentence.format(page=page, nbytes=nbytes)}")
        assert str(error.value).endswith(RESTART)
        assert file._segments.num_live == num_live
    assert owner.rows == before
    owner.read_all()
    monkeypatch.undo()
    if call == "pwrite":
        with pytest.raises(kind, match=r"store\.path"):  # the pages would be missing
            owner.write(more)
    else:
        owner.write(more)
    owner.read_all()


def test_a_disk_that_takes_a_part_of_what_is_written_gets_the_rest(
    opened: tuple[SegmentFile, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, owner = opened
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, at: pwrite(descriptor, content[:1000], at))
    owner.write(keys_of(range(5 * SEGMENT, 6 * SEGMENT)))
    monkeypatch.undo()
    assert file.bytes_written == 10 * BLOCK_BYTES
    owner.read_all()


def test_a_disk_that_is_full_after_a_part_is_told(
    opened: tuple[SegmentFile, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, owner = opened
    pwrite, fail = os.pwrite, failing(errno.ENOSPC, after=1)

    def write_a_part(descriptor: int, content: memoryview, at: int) -> int:
        fail()
        return pwrite(descriptor, content[:5000], at)

    monkeypatch.setattr(os, "pwrite", write_a_part)
    with pytest.raises(RowcastError, match="has no space for 8192 more bytes"):
        owner.write(keys_of(range(5 * SEGMENT, 6 * SEGMENT)))
    owner.read_all()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "small", 2**18) as folder:
        yield folder


@pytest.mark.parametrize("fallocate", [True, False], ids=["reserved", "not reserved"])
def test_a_disk_that_others_fill_is_told_when_a_segment_begins_or_a_page_is_written(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch, fallocate: bool
) -> None:
    if not fallocate:
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    file, owner = open_small(full_disk)
    with closing(file):
        with pytest.raises(RowcastError, match=facts("8192 more bytes", "No space left on device")):
            fill(owner)
        assert len(owner.rows) == 32 * SEGMENT
        owner.read_all()
    assert list(full_disk.iterdir()) == []


# file systems and folders


def test_a_file_system_without_unnamed_files_and_without_reservations_serves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    file, owner = open_small(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with closing(file):
        owner.write(keys_of(range(25 * SEGMENT)))
        owner.write(keys_of(range(25 * SEGMENT)))
        owner.read_all()


def test_a_file_system_in_memory_serves_too() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("/dev/shm is missing")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file, owner = open_small(Path(folder))
        with closing(file):
            owner.write(keys_of(range(25 * SEGMENT)))
            owner.write(keys_of(range(25 * SEGMENT)))
            owner.read_all()


def test_a_folder_is_made_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    SegmentFile.open(group_of(80), tmp_path / "new" / "folder", SEGMENTS * BLOCK_BYTES).close()
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        SegmentFile.open(group_of(80), tmp_path / "file" / "folder", SEGMENTS * BLOCK_BYTES)
    assert str(error.value) == (
        f"no file for cold rows can be made in {tmp_path}/file/folder (Not a directory); "
        "set store.path to another folder"
    )


HOLDER = """
import sys, time
from pathlib import Path
from tests.stores.cold.owner import keys_of, open_small
file, owner = open_small(Path(sys.argv[1]))
owner.write(keys_of(range(5000)))
print(file.used_bytes, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_the_file_of_a_process_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) > 400_000
        holder.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_be_closed_twice_and_leaves_nothing(opened: tuple[SegmentFile, Owner], tmp_path: Path) -> None:
    file, _ = opened
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []
