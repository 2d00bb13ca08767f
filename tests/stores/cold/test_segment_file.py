"""Cold rows in a segment file: what is read is what was written, whatever is freed, moved and used again meanwhile."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS, SegmentFile
from rowcast.prefetcher.stores.cold.segments import BLOCK_BYTES, PAGES_AHEAD, page_layout
from rowcast.prefetcher.stores.store import Keys, Moved
from rowcast.runtime.errors import ConfigError, RowcastError
from tests.stores.cold.owner import group_of, keys_of, open_small
from tests.support.repeats import count

WIDTHS = [16, 80, 272, 528, 2048, 4080, 4096, 3 * BLOCK_BYTES - 16]


def disk_used(file: SegmentFile) -> int:
    return os.fstat(file._file.fileno()).st_size  # st_blocks counts blocks of the file system's own too


def room(file: SegmentFile) -> int:
    """How many live rows fit for certain: one segment stays free for tidying, one is not full."""
    return file.most // SEGMENTS * (SEGMENTS - 2)


@pytest.mark.parametrize("record_bytes", WIDTHS)
@pytest.mark.parametrize("seed", range(count(2, 20)))
def test_random_operations_give_what_a_dictionary_gives(tmp_path: Path, record_bytes: int, seed: int) -> None:
    random, (file, owner) = np.random.default_rng(seed), open_small(tmp_path, record_bytes)
    most = room(file)
    with closing(file):
        for _ in range(150):
            some = keys_of(random.permutation(most * 3 // 4)[: random.integers(1, 2 + most // 10)])
            match random.choice(["write", "write", "read", "drop", "tidy"]):
                case "write":
                    owner.write(some)
                case "read":
                    owner.read(some)
                case "drop":
                    owner.drop(some)
                case "tidy":
                    file.tidy()
            assert file.garbage_bytes <= file.used_bytes <= file._disk_bytes
        owner.read_all()
        assert all(place < file.most for place, _ in owner.rows.values())
        owner.drop(np.array(list(owner.rows), np.int64))
        assert file._segments.num_live == 0


def test_threads_that_write_read_drop_and_tidy_at_once_read_what_was_written(
    tmp_path: Path, quick_switches: None
) -> None:
    file, owner = open_small(tmp_path)
    most, rounds = room(file), count(60, 600)
    owner.write(keys_of(range(most * 2 // 3)))

    def work(seed: int, job: Callable[[np.random.Generator], object]) -> None:
        random = np.random.default_rng(seed)
        for _ in range(rounds):
            job(random)

    def some(random: np.random.Generator) -> Keys:
        return keys_of(random.permutation(most * 4 // 5)[: random.integers(1, most // 12)])

    jobs: list[Callable[[np.random.Generator], object]] = [
        lambda random: owner.write(some(random)),
        lambda random: owner.write(some(random)),
        lambda random: owner.read(some(random)),
        lambda random: owner.read(some(random)),
        lambda random: owner.drop(some(random)[:30]),
        lambda random: file.tidy(),
    ]
    with closing(file), ThreadPoolExecutor(len(jobs)) as threads:
        for result in [threads.submit(work, seed, job) for seed, job in enumerate(jobs)]:
            result.result()
        owner.read_all()
        assert owner.num_moved > 0
        assert disk_used(file) <= file._disk_bytes


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_rows_are_readable_before_they_are_on_the_file_and_after(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path, segment_pages=8)
    rows = page_layout(80).num_rows
    with closing(file):
        for start in range(0, 20 * rows, 7):
            owner.write(keys_of(range(start, start + 7)))
            owner.read(keys_of(range(max(0, start - 40), start + 7)))
        assert file.bytes_written == 16 * BLOCK_BYTES
        owner.read_all()


def test_a_batch_may_span_more_pages_than_are_read_ahead(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path, segment_pages=16)
    with closing(file):
        owner.write(keys_of(range((PAGES_AHEAD + 100) * page_layout(80).num_rows)))
        owner.read_all()
        owner.read(keys_of(range(5, 300_000, 97)))


def test_a_page_is_read_once_for_all_its_rows(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    rows = page_layout(80).num_rows
    with closing(file):
        owner.write(keys_of(range(10 * rows)))
        owner.read_all()
        assert (file.bytes_read, file.rows_read) == (10 * BLOCK_BYTES, 10 * rows)
        assert file.read_seconds > 0


def test_a_page_has_whole_rows_and_little_besides() -> None:
    for record_bytes in range(16, 5 * BLOCK_BYTES, 16):
        page = page_layout(record_bytes)
        used = page.num_rows * (8 + record_bytes)
        assert page.nbytes % BLOCK_BYTES == 0
        assert page.num_rows >= 1
        assert 0.75 * page.nbytes <= used <= page.nbytes - 8
        assert record_bytes > 1000 or page.nbytes == BLOCK_BYTES


# garbage


@pytest.mark.parametrize("live", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("tidied", [False, True], ids=["writes make room", "tidied between writes"])
def test_rows_that_are_written_again_and_again_stay_within_the_disk(tmp_path: Path, live: float, tidied: bool) -> None:
    file, owner = open_small(tmp_path)
    random, num_rows = np.random.default_rng(0), int(room(file) * live)
    with closing(file):
        owner.write(keys_of(range(num_rows)))
        for _ in range(30):
            owner.write(keys_of(random.permutation(num_rows)[: file.most // 20]))
            while tidied and file.tidy():
                pass
            assert disk_used(file) <= file.used_bytes <= file._disk_bytes
        assert file.rows_written > 2 * file.most
        owner.read_all()


def test_more_live_rows_than_the_disk_holds_are_refused_and_the_others_stay(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    most = room(file)
    with closing(file):
        owner.write(keys_of(range(most)))
        with pytest.raises(RowcastError) as error:
            owner.write(keys_of(range(most, most + file.most // SEGMENTS + 1)))
        assert error.value.exit_code == 1
        assert str(error.value) == (
            f"group fp32_d6_adagrad has {most + file.most // SEGMENTS + 1} cold rows of 80 bytes, but store.disk "
            f"leaves it {128 * BLOCK_BYTES} bytes, which hold {most} of them; raise store.disk or store.memory"
        )
        owner.read_all()
        owner.drop(keys_of(range(0, most, 2)))
        owner.write(keys_of(range(most, most * 5 // 4)))
        owner.read_all()


def test_live_rows_fit_up_to_the_last_one_promised_wherever_garbage_lies(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    random, most = np.random.default_rng(1), room(file)
    with closing(file):
        owner.write(keys_of(range(most)))
        for _ in range(20):
            dropped = random.permutation(most)[: most // 8]
            owner.drop(keys_of(dropped))
            for part in np.array_split(dropped, 5):
                owner.write(keys_of(part))
        assert len(owner.rows) == most
        owner.read_all()


def test_a_segment_whose_rows_were_all_freed_is_used_again_without_moving_any(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    segment = file.most // SEGMENTS
    with closing(file):
        for _ in range(3 * SEGMENTS):
            owner.write(keys_of(range(segment)))
        assert file.used_bytes == 2 * 2 * BLOCK_BYTES
        assert (owner.num_moved, file.tidy()) == (0, False)
        owner.drop(keys_of(range(segment)))
        assert file.garbage_bytes == 0


def test_garbage_beyond_half_is_collected_in_small_pieces_and_no_more(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path, segment_pages=300)  # two pieces to a segment
    segment = file.most // SEGMENTS
    with closing(file):
        owner.write(keys_of(range(4 * segment)))
        owner.drop(keys_of(row for row in range(2 * segment) if row % 10 < 7))
        assert (file.tidy(), file.garbage_bytes // 80) == (False, 2 * segment * 7 // 10)
        owner.drop(keys_of(row for row in range(2 * segment, 4 * segment) if row % 10 < 4))
        before = 0
        while file.tidy():
            assert 0 < file.bytes_read - before <= 2**20
            before = file.bytes_read
        assert file.garbage_bytes // 80 <= len(owner.rows)
        assert owner.num_moved == 3 * segment // 10
        owner.read_all()


def test_a_full_segment_is_not_moved_for_the_garbage_of_the_one_that_is_being_filled(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    segment = file.most // SEGMENTS
    with closing(file):
        owner.write(keys_of(range(2 * segment - 1)))
        owner.drop(keys_of(range(segment - 1, 2 * segment - 1)))
        assert (file.garbage_bytes // 80, file.tidy()) == (segment, False)


def test_a_segment_that_was_used_again_while_it_was_tidied_is_tidied_from_its_begin(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path, segment_pages=300)  # two pieces to a segment
    segment = file.most // SEGMENTS
    with closing(file):
        owner.write(keys_of(range(4 * segment)))
        owner.drop(keys_of(row for row in range(4 * segment) if row % 3))
        assert file.tidy()  # the first piece of the first segment
        owner.drop(keys_of(range(segment)))
        owner.write(keys_of(range(10 * segment, 12 * segment)))
        assert {owner.rows[int(key)][0] // segment for key in keys_of(range(10 * segment, 12 * segment))} >= {0}
        owner.drop(keys_of(row for row in range(10 * segment, 12 * segment) if row % 3))
        while file.tidy():
            pass
        assert not file._segments.try_again()  # no segment has rows although all of its pieces were tidied
        owner.read_all()


@pytest.fixture
def another() -> Iterator[ThreadPoolExecutor]:
    """Another thread of the store above."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_row_that_is_written_or_dropped_while_it_is_moved_keeps_its_newest_bytes(
    tmp_path: Path, another: ThreadPoolExecutor
) -> None:
    file, owner = open_small(tmp_path)
    num_rows, dropped = room(file) * 3 // 4, set[int]()

    def settle_late(moved: Moved) -> None:
        another.submit(owner.write, moved.keys[::3]).result()
        another.submit(owner.drop, moved.keys[1::3]).result()
        dropped.update(moved.keys[1::3].tolist())
        owner.settle(moved)

    with closing(file):
        owner.write(keys_of(range(num_rows)))
        owner.drop(keys_of(row for row in range(num_rows) if row % 4))
        file.attach(owner.places_of, settle_late)
        while file.tidy():
            pass
        assert dropped
        assert not dropped & owner.rows.keys()
        owner.read_all()
        assert file._segments.num_live == len(owner.rows)


def test_a_row_is_not_settled_at_an_old_place_where_it_was_written_again(
    tmp_path: Path, another: ThreadPoolExecutor
) -> None:
    """Before the rows of the first page are settled, they are written three times. Their segment is empty after the
    first time; the third time begins a segment, and would put each row where it was before it was moved."""
    file, owner = open_small(tmp_path, segment_pages=3)
    page = page_layout(80).num_rows
    first = keys_of(range(page))

    def settle_late(moved: Moved) -> None:
        assert (moved.keys.tolist(), moved.old.tolist()) == (first.tolist(), list(range(page)))
        for _ in range(3):
            another.submit(owner.write, moved.keys).result()
        owner.settle(moved)

    with closing(file):
        owner.write(keys_of(range(18 * page)))
        owner.drop(keys_of(row for row in range(18 * page) if row // page % 3))
        file.attach(owner.places_of, settle_late)
        assert file.tidy()
        owner.read(first)


# holds


def test_a_freed_place_stays_readable_within_a_hold_and_is_used_again_after_it(
    tmp_path: Path, another: ThreadPoolExecutor
) -> None:
    file, owner = open_small(tmp_path)
    segment = file.most // SEGMENTS
    mine = keys_of(range(segment))
    with closing(file):
        places = owner.write(mine)
        expected, out = np.empty((2, segment, 80), np.uint8)
        file.read(mine, places, expected)
        with file.hold():
            owner.drop(mine)
            for start in range(segment, segment * (SEGMENTS - 3), segment):
                another.submit(owner.write, keys_of(range(start, start + segment))).result()
            file.read(mine, places, out)
            assert out.tobytes() == expected.tobytes()
        assert owner.write(mine).tolist() == places.tolist()


def test_a_place_is_not_used_again_before_every_hold_entered_before_is_left(tmp_path: Path) -> None:
    file, owner = open_small(tmp_path)
    segment = file.most // SEGMENTS
    some = [keys_of(range(start, start + segment)) for start in range(0, 4 * segment, segment)]
    with closing(file):
        places = owner.write(some[0])
        with file.hold():
            first = file.hold()
            first.__enter__()
            owner.drop(some[0])
        assert owner.write(some[1]).tolist() != places.tolist()
        later = file.hold()
        later.__enter__()
        assert owner.write(some[2]).tolist() != places.tolist()
        first.__exit__(None, None, None)
        assert owner.write(some[3]).tolist() == places.tolist()
        later.__exit__(None, None, None)


def test_a_write_that_needs_a_held_segment_waits_until_the_hold_is_left(
    tmp_path: Path, another: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, owner = open_small(tmp_path)
    most, waiting = room(file), threading.Event()
    wait_for_holds = file._wait_for_holds

    def wait_and_tell() -> bool:
        waiting.set()
        return wait_for_holds()

    monkeypatch.setattr(file, "_wait_for_holds", wait_and_tell)
    with closing(file):
        owner.write(keys_of(range(most)))
        with file.hold():
            owner.drop(keys_of(range(most)))
            written = another.submit(owner.write, keys_of(range(most // 2)))
            assert waiting.wait(60)
            assert not written.done()
        written.result(60)
        owner.read_all()


@pytest.mark.parametrize("freed", [True, False], ids=["frees them", "takes their places"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["in all segments", "in one segment"])
def test_a_write_waits_until_another_thread_frees_rows_or_takes_the_places_it_was_given(
    tmp_path: Path, another: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, freed: bool, everywhere: bool
) -> None:
    file, owner = open_small(tmp_path)
    most, segment, waiting = room(file), file.most // SEGMENTS, threading.Event()
    wait_for_owner = file._wait_for_owner

    def wait_and_tell() -> bool:
        waiting.set()
        return wait_for_owner()

    monkeypatch.setattr(file, "_wait_for_owner", wait_and_tell)
    with closing(file):
        owner.write(keys_of(range(most)))
        own = range(most) if everywhere else range(5 * segment, 6 * segment)
        owner.drop(keys_of(own[::2]))
        late = {key: owner.rows.pop(key) for key in keys_of(own[1 :: 4 if everywhere else 2]).tolist()}
        num_rows = most // 4 if everywhere else segment * 3 // 2
        written = another.submit(owner.write, keys_of(range(most, most + num_rows)))
        assert waiting.wait(60)
        if freed:
            file.free(np.array(list(late)), np.array([place for place, _ in late.values()], np.uint32))
        else:
            owner.rows.update(late)
        written.result(60)
        owner.read_all()


# opening


def test_too_little_disk_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        SegmentFile.open(group_of(80), tmp_path, SEGMENTS * BLOCK_BYTES - 1)
    assert str(error.value) == (
        "store.disk gives 262143 bytes to group fp32_d6_adagrad, whose rows of 80 bytes need at least 262144; "
        "raise store.disk"
    )
    SegmentFile.open(group_of(80), tmp_path, SEGMENTS * BLOCK_BYTES).close()


def test_places_stay_below_the_most_that_the_store_has_numbers_for(tmp_path: Path) -> None:
    most = 40 * 2 * page_layout(80).num_rows + 5
    file, owner = open_small(tmp_path, most=most)
    with closing(file):
        assert file.most == most - 5
        owner.write(keys_of(range(38 * 2 * page_layout(80).num_rows)))
        assert max(place for place, _ in owner.rows.values()) < most
        with pytest.raises(RowcastError, match=r"raise store\.disk"):
            owner.write(keys_of(range(10**6, 10**6 + 5000)))
