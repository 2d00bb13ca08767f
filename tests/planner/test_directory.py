"""The directory's hash and the ring, against dicts and lists."""

import numpy as np
import pytest

from rowcast.prefetcher.planner.directory import (
    EMPTY,
    LOW,
    Directory,
    check_directory,
    exchange,
    forget,
    locate,
    new_directory,
    with_room,
)
from rowcast.prefetcher.planner.horizon import Occurrences, new_ring, with_places, with_steps


def keys_in_one_cluster(num_cells: int, count: int) -> list[int]:
    """Keys of several tables; small directories put many of them side by side."""
    return [(i % 5) << 48 | (i * num_cells) for i in range(count)]


def put(directory: Directory, ring: Occurrences, key: int, place: int) -> int | None:
    """The row's last occurrence is at `place` from now on; returns where it was before."""
    ring.rows["key"][place % len(ring.rows)] = key
    before = int(exchange(*directory, ring.rows, key, place))
    return None if before == EMPTY else before & int(LOW)


def place_of(directory: Directory, ring: Occurrences, key: int) -> int | None:
    cell = int(directory.cells[locate(directory.cells, ring.rows, key)])
    return None if cell == EMPTY else cell & int(LOW)


@pytest.mark.parametrize("seed", range(6))
def test_tracking_moving_and_forgetting_in_any_order_finds_exactly_what_is_tracked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory, ring = with_room(new_directory(16), 32), new_ring(4096)
    keys = keys_in_one_cluster(64, 60)
    known: dict[int, int] = {}
    for place in range(3000):
        key = keys[rng.integers(len(keys))]
        if key in known and rng.random() < 0.5:
            forget(*directory, key, known.pop(key))
        elif key in known or len(known) < 32:
            assert put(directory, ring, key, place) == known.get(key)
            known[key] = place
        assert [place_of(directory, ring, other) for other in keys] == [known.get(other) for other in keys]
    check_directory(directory, ring.rows)


def test_a_grown_directory_leads_to_the_same_places() -> None:
    directory, ring = with_room(new_directory(16), 8), new_ring(64)
    for place, key in enumerate(range(0, 80, 10)):
        put(directory, ring, key, place)
    assert with_room(directory, 2) is directory
    grown = with_room(directory, 20)
    assert (len(directory.cells), len(grown.cells), int(grown.num_tracked[0])) == (32, 128, 8)
    assert [place_of(grown, ring, key) for key in range(0, 80, 10)] == list(range(8))
    check_directory(grown, ring.rows)


def test_the_check_finds_a_row_that_its_key_does_not_lead_to() -> None:
    directory, ring = new_directory(16), new_ring(8)
    put(directory, ring, 5, 0)
    check_directory(directory, ring.rows)
    ring.rows["key"][0] = 77
    with pytest.raises(AssertionError, match="key 77 leads to cell"):
        check_directory(directory, ring.rows)


def test_places_beyond_32_bits_are_told_apart_within_the_ring() -> None:
    directory, ring = new_directory(16), new_ring(64)
    far = 5 * 2**32 + 17
    put(directory, ring, 3, far)
    assert put(directory, ring, 3, far + 9) == 17
    assert place_of(directory, ring, 3) == 26
    forget(*directory, 3, far + 9)
    assert place_of(directory, ring, 3) is None


def test_a_grown_ring_keeps_every_place_and_every_queue() -> None:
    ring = new_ring(8, 4)
    places, steps = np.arange(5, 12), np.arange(6, 9)
    ring.rows["key"][places % 8] = places * 10
    ring.queued[places % 8] = places
    ring.first[steps % 4], ring.tails[steps % 4] = steps * 100, steps
    assert with_places(ring, 5, 12, 1) is ring
    assert with_steps(ring, 6, 9) is ring
    grown = with_steps(with_places(ring, 5, 12, 2), 6, 10)
    assert (len(grown.rows), len(grown.first)) == (16, 8)
    assert grown.rows["key"][places % 16].tolist() == (places * 10).tolist()
    assert grown.queued[places % 16].tolist() == places.tolist()
    assert grown.first[steps % 8].tolist() == (steps * 100).tolist()
    assert grown.tails[steps % 8].tolist() == steps.tolist()
