"""A mapped store and its file's surroundings: other processes, full disks, disks that fail."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rowcast.prefetcher.stores import table_file
from rowcast.prefetcher.stores.mapped_store import file_layout
from rowcast.runtime.errors import ConfigError
from tests.stores.every_store import (
    GROUP,
    all_keys,
    finish,
    groups,
    open_mapped,
    present,
    random_records,
    read,
)
from tests.stores.failing_calls import failing
from tests.stores.table_files import CHECKPOINT, KEYS, NBYTES, ROWS, assert_empty, leave_closed, reopened, rows_file
from tests.support.facts import facts
from tests.support.small_disk import small_disk

# one process


def test_a_second_opener_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    store = open_mapped(tmp_path)
    finish(store.write(KEYS, ROWS))
    with pytest.raises(ConfigError, match=facts("another process", "store.path")):
        open_mapped(tmp_path)
    assert read(store, KEYS).tobytes() == ROWS.tobytes()
    store.close()
    open_mapped(tmp_path).close()


def test_a_closed_file_is_free_even_while_somebody_holds_its_rows(tmp_path: Path) -> None:
    store = open_mapped(tmp_path)
    rows = store._words
    store.close()
    open_mapped(tmp_path).close()
    assert len(rows) == GROUP.num_rows


HOLDER = """
import sys, time
from pathlib import Path
from rowcast.runtime.telemetry.logs import setup_logging
from tests.stores.every_store import GROUP, all_keys, open_mapped, random_records
setup_logging("holder", "error")
store = open_mapped(Path(sys.argv[1]), GROUP, sys.argv[2])
store.write(all_keys(), random_records(len(all_keys())))
print("restored" if store.restored else "anew", flush=True)
time.sleep(60)
"""


def test_the_file_of_a_killed_process_is_free_and_made_anew(tmp_path: Path) -> None:
    leave_closed(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), CHECKPOINT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "restored\n"
            with pytest.raises(ConfigError, match="another process"):
                reopened(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert_empty(reopened(tmp_path))


# the disk


def test_the_whole_file_is_reserved_at_once(tmp_path: Path) -> None:
    store = open_mapped(tmp_path)
    assert rows_file(tmp_path).stat().st_blocks * 512 >= NBYTES
    store.close()


def test_a_large_table_is_neither_read_nor_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # shows what we write
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, start, nbytes: os.ftruncate(descriptor, nbytes))
    group = replace(GROUP, tables=(replace(GROUP.tables[0], num_embeddings=2**23),))
    store = open_mapped(tmp_path, group)
    finish(store.write(all_keys()[:1], random_records(1)))
    store.close(CHECKPOINT)
    found = rows_file(tmp_path).stat()
    assert found.st_size > 2**29
    assert found.st_blocks * 512 < 2**20


def test_too_little_space_is_refused_with_both_numbers_before_anything_is_changed(tmp_path: Path) -> None:
    content = leave_closed(tmp_path).read_bytes()
    needed = file_layout(groups(scale=2**32)[0])[1]
    with pytest.raises(ConfigError, match=facts(f"{needed} bytes", "free", "store.path")):
        open_mapped(tmp_path, groups(scale=2**32)[0])
    assert rows_file(tmp_path).read_bytes() == content
    with pytest.raises(ConfigError, match=f"{needed} bytes"):
        open_mapped(tmp_path / "new", groups(scale=2**32)[0])
    assert list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one file of GROUP and not for two."""
    with small_disk(tmp_path / "small", NBYTES * 3 // 2) as folder:
        yield folder


def test_a_full_disk_is_refused_and_does_not_kill(full_disk: Path) -> None:
    filler = full_disk / "filler"
    filler.write_bytes(b"x" * (NBYTES // 2 + 2**13))
    with pytest.raises(ConfigError, match=f"{NBYTES} bytes"):
        open_mapped(full_disk)
    assert list(full_disk.iterdir()) == [filler]
    filler.unlink()
    store = open_mapped(full_disk)
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * NBYTES)
    everything = all_keys()
    finish(store.write(everything, random_records(len(everything))))  # would be SIGBUS if space were not reserved
    assert len(present(store)) == len(everything)
    store.close(CHECKPOINT)
    again = reopened(full_disk)  # with no space free: what the file has is enough
    assert again.restored
    again.close()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            errno.ENOSPC,
            facts(f"{NBYTES} bytes", "free", "store.path", "larger disk"),
        ),
        (errno.EDQUOT, rf"needs {NBYTES} bytes, but \d+ are free"),
        (errno.EIO, facts(f"{NBYTES} bytes", "Input/output error", "store.path")),
    ],
)
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "pwrite"])
def test_a_disk_that_fails_at_the_start_is_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, sentence: str
) -> None:
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(ConfigError, match=sentence):
        open_mapped(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    open_mapped(tmp_path).close()


def test_a_file_system_that_cannot_reserve_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    leave_closed(tmp_path)
    store = reopened(tmp_path)
    assert store.restored
    assert read(store, KEYS).tobytes() == ROWS.tobytes()
    store.close()


@pytest.mark.parametrize("after", [0, 1], ids=["rows", "header"])
def test_a_disk_that_fails_at_the_end_costs_only_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    store = open_mapped(tmp_path)
    finish(store.write(KEYS, ROWS))
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, after))
    with capture_logs() as logs:
        store.close(CHECKPOINT)
    assert [log["event"] for log in logs] == ["table file cannot be kept; the next start restores"]
    monkeypatch.undo()
    again = reopened(tmp_path)
    if after == 0:
        assert_empty(again)
    elif again.restored:  # the header was written: nobody knows whether it is on the disk
        assert read(again, KEYS).tobytes() == ROWS.tobytes()
    again.close()


def test_rows_are_on_the_disk_before_the_header_that_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_mapped(tmp_path)
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("fsync"))
    monkeypatch.setattr(
        table_file.TableFile, "write_header", lambda file, header: done.append(f"header {header.closed_at}")
    )
    store.close("7")
    assert done == ["fsync", "header 7"]


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")], ids=["folder", "pipe", "link"]
)
def test_what_is_not_a_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(rows_file(tmp_path))
    with pytest.raises(ConfigError, match=r"store\.path"):
        open_mapped(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=facts("Not a directory", "store.path")):
        open_mapped(tmp_path / "file" / "tables")
