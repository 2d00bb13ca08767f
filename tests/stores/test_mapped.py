"""A mapped store's file is trusted at the checkpoint that it was closed at, and never otherwise."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.stores import mapped_store as mapped
from rowcast.prefetcher.stores.mapped_store import MappedStore, file_layout
from rowcast.prefetcher.stores.table_header import HEADER_BYTES, TableHeader
from tests.stores.every_store import (
    GROUP,
    SEED,
    all_keys,
    finish,
    groups,
    open_mapped,
    present,
    random_records,
    read,
)
from tests.stores.table_files import CHECKPOINT, KEYS, NBYTES, ROWS, assert_empty, leave_closed, reopened, rows_file


def test_a_file_closed_at_the_checkpoint_has_its_rows(tmp_path: Path) -> None:
    leave_closed(tmp_path)
    store = reopened(tmp_path)
    assert store.restored
    assert present(store) == {int(key): row.tobytes() for key, row in zip(KEYS, ROWS, strict=True)}
    finish(store.write(KEYS[1:2], ROWS[:1]))
    store.close("the next")
    again = reopened(tmp_path, "the next")
    assert again.restored
    assert read(again, KEYS[:2]).tobytes() == 2 * ROWS[0].tobytes()
    again.close()


def test_tables_larger_than_memory_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_closed(tmp_path)
    monkeypatch.setattr(mapped, "memory_limit", lambda: NBYTES)
    with closing(reopened(tmp_path)) as store:
        assert store.restored
        assert read(store, KEYS).tobytes() == ROWS.tobytes()


def test_a_file_that_is_open_says_so_before_anything_is_written(tmp_path: Path) -> None:
    path = leave_closed(tmp_path)
    for checkpoint in (CHECKPOINT, None):
        with closing(reopened(tmp_path, checkpoint)):
            header = TableHeader.decode(path.read_bytes()[:HEADER_BYTES])
            assert header is not None
            assert (header.closed_at, header.incarnation) == (None, 2)


def test_a_file_that_was_not_closed_at_a_checkpoint_is_made_anew(tmp_path: Path) -> None:
    leave_closed(tmp_path)
    reopened(tmp_path).close()
    with capture_logs() as logs:
        assert_empty(reopened(tmp_path))
    assert [log["rows"] for log in logs] == ["none: incarnation 2 did not close it"]


@pytest.mark.parametrize("checkpoint", [None, "step-000000000100 9999abcd", ""])
def test_a_file_closed_at_another_checkpoint_is_made_anew(tmp_path: Path, checkpoint: str | None) -> None:
    leave_closed(tmp_path)
    assert_empty(reopened(tmp_path, checkpoint))
    assert_empty(reopened(tmp_path))


def other_layouts() -> Iterator[GroupSpec]:
    """Tables with the same name, so that they have the same file."""
    first, *others = GROUP.tables
    yield replace(GROUP, tables=(replace(first, name="renamed"), *others))
    yield replace(GROUP, tables=(replace(first, num_embeddings=41), *others))
    yield replace(GROUP, tables=(replace(first, init="constant:1"), *others))
    yield replace(GROUP, tables=tuple(others))
    yield replace(GROUP, record_bytes=GROUP.record_bytes + 16)
    yield groups(scale=2)[0]


@pytest.mark.parametrize("group", list(other_layouts()))
def test_a_file_of_another_layout_is_made_anew(tmp_path: Path, group: GroupSpec) -> None:
    leave_closed(tmp_path)
    store = reopened(tmp_path, group=group)
    assert not store.restored
    ticket = store.read(make_keys(2, np.arange(7)), np.empty((7, group.record_bytes), np.uint8))
    assert list(ticket.absent) == list(range(7))
    store.close()
    assert rows_file(tmp_path).stat().st_size == file_layout(group)[1]


def test_a_file_of_another_seed_is_made_anew(tmp_path: Path) -> None:
    leave_closed(tmp_path)
    store = MappedStore.open(GROUP, SEED + 1, tmp_path, incarnation=2, checkpoint=CHECKPOINT)
    assert not store.restored
    store.close()


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    header = TableHeader(layout="layout", incarnation=3, closed_at=CHECKPOINT)
    page = bytearray(header.encode())
    assert TableHeader.decode(bytes(page)) == header
    for bit in range(8 * HEADER_BYTES):
        page[bit // 8] ^= 1 << bit % 8
        assert TableHeader.decode(bytes(page)) is None, f"bit {bit}"
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("length", [0, 1, 20, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_none(length: int) -> None:
    page = TableHeader(layout="layout", incarnation=3, closed_at=CHECKPOINT).encode()
    assert TableHeader.decode((page + b"\0")[:length]) is None


def test_a_header_of_another_version_is_none() -> None:
    assert (
        TableHeader.decode(TableHeader(version=2, layout="layout", incarnation=3, closed_at=CHECKPOINT).encode())
        is None
    )


@given(content=st.binary(max_size=100))
@example(content=b"\x81\xa4\x00\x00\x00\x80")  # a name that is no UTF-8
def test_a_page_with_a_right_checksum_over_anything_else_is_no_header(content: bytes) -> None:
    rest = len(content).to_bytes(4, "little") + content.ljust(HEADER_BYTES - 20, b"\0")
    assert TableHeader.decode(b"rowcastT" + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest) is None


@pytest.mark.parametrize("bit", [0, 77, 8 * 16, 8 * 40, 8 * HEADER_BYTES - 1])
def test_a_file_with_a_damaged_header_is_made_anew(tmp_path: Path, bit: int) -> None:
    path = leave_closed(tmp_path)
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with capture_logs() as logs:
        assert_empty(reopened(tmp_path))
    assert [log["rows"] for log in logs] == ["none: its header is damaged or of another version"]


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, NBYTES - 1, NBYTES + 1])
def test_a_file_cut_short_or_grown_is_made_anew(tmp_path: Path, nbytes: int) -> None:
    os.truncate(leave_closed(tmp_path), nbytes)
    assert_empty(reopened(tmp_path))
    assert rows_file(tmp_path).stat().st_size == NBYTES


def test_the_next_incarnation_trusts_only_what_the_last_one_closed(tmp_path: Path) -> None:
    """Any history of ends and restarts at checkpoints numbered from 0."""

    @settings(max_examples=30, deadline=None)
    @given(ends=st.lists(st.booleans(), min_size=1, max_size=5))
    def check(ends: list[bool]) -> None:
        rows_file(tmp_path).unlink(missing_ok=True)
        closed = False
        for number, in_order in enumerate(ends):
            store = open_mapped(tmp_path, GROUP, str(number - 1), incarnation=number)
            assert store.restored == closed
            assert len(present(store)) == (number if closed else 0)
            finish(store.write(all_keys()[: number + 1], random_records(number + 1, number)))
            if in_order:
                store.close(str(number))
            store.close()
            closed = in_order

    check()
