"""The directory's hash and the horizon's ring, against a dict and a list."""

import numpy as np
import pytest

from prefetcher.planner.directory import NONE, NUM_TRACKED, Directory, check_directory, find, forget, new_directory, track, with_room
from prefetcher.planner.horizon import new_occurrences, with_places
from tests.planner.traces import i32


def keys_in_one_cluster(num_cells: int, count: int) -> list[int]:
    """Keys of several tables; small directories put many of them side by side."""
    return [(i % 5) << 48 | (i * num_cells) for i in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_tracking_and_forgetting_in_any_order_finds_exactly_what_is_tracked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory = new_directory(32)
    keys = keys_in_one_cluster(64, 60)
    known: dict[int, int] = {}
    for _ in range(2000):
        key = keys[rng.integers(len(keys))]
        if key in known and rng.random() < 0.5:
            forget(directory, known.pop(key))
        elif key in known or len(known) < 32:
            known.setdefault(key, track(directory, key))
            assert track(directory, key) == known[key]
        assert [find(directory, other) for other in keys] == [known.get(other, NONE) for other in keys]
    check_directory(directory, num_slots=0, num_used=0)


def test_a_grown_directory_keeps_every_entry_at_its_number() -> None:
    directory = new_directory(8)
    entries = {key: track(directory, key) for key in range(0, 80, 10)}
    forget(directory, entries.pop(30))
    assert with_room(directory, 1) is directory
    grown = with_room(directory, 20)
    assert (len(grown.entries), grown.state[NUM_TRACKED]) == (32, 7)
    assert {key: find(grown, key) for key in entries} == entries
    added = {key: track(grown, key) for key in range(1000, 1025)}
    assert len({*entries.values(), *added.values()}) == 32
    check_directory(grown, num_slots=0, num_used=0)


def tracked_pair() -> Directory:
    directory = new_directory(8)
    for slot, key in enumerate((5, 6)):
        directory.entries["slot"][track(directory, key)] = slot
    check_directory(directory, num_slots=2, num_used=2)
    return directory


def test_the_check_finds_two_rows_in_one_slot_and_a_slot_beyond_the_last() -> None:
    directory = tracked_pair()
    directory.entries["slot"][find(directory, 6)] = 0
    with pytest.raises(AssertionError, match="2 resident rows do not fill slots 0 to 1"):
        check_directory(directory, num_slots=2, num_used=2)
    with pytest.raises(AssertionError, match="2 slots in use of 1"):
        check_directory(tracked_pair(), num_slots=1, num_used=2)


def test_the_check_finds_a_row_that_its_key_does_not_lead_to() -> None:
    directory = tracked_pair()
    directory.cells["key"][directory.cells["entry"] == find(directory, 5)] = 77
    with pytest.raises(AssertionError, match="the key of entry 0 leads to entry -1"):
        check_directory(directory, num_slots=2, num_used=2)


def test_a_grown_ring_keeps_every_place() -> None:
    ring = new_occurrences(8)
    places = np.arange(5, 12)
    ring.entries[places % 8] = i32(list(range(100, 107)))
    ring.queues[places % 8] = places * 10
    assert with_places(ring, 5, 12, 1) is ring
    grown = with_places(ring, 5, 12, 2)
    assert len(grown.entries) == 16
    assert grown.entries[places % 16].tolist() == list(range(100, 107))
    assert grown.queues[places % 16].tolist() == (places * 10).tolist()
