"""The directory's hash and the occurrences, against dicts and lists."""

import numpy as np
import pytest

from rowcast.prefetcher.planner.directory import (
    EMPTY,
    LOW,
    Directory,
    exchange,
    forget,
    locate,
    new_directory,
    with_room,
)
from rowcast.prefetcher.planner.horizon import Occurrences, make_room, new_occurrences, with_steps
from tests.support.planner_integrity import check_directory


def keys_in_one_cluster(num_cells: int, count: int) -> list[int]:
    """Keys of several tables; small directories put many of them side by side."""
    return [(i % 5) << 48 | (i * num_cells) for i in range(count)]


def put(directory: Directory, occurrences: Occurrences, key: int, position: int) -> int | None:
    """The row's last occurrence is at `position` from now on; returns where it was before."""
    occurrences.rows["key"][position % len(occurrences.rows)] = key
    before = int(exchange(*directory, occurrences.rows, key, position))
    return None if before == EMPTY else before & int(LOW)


def position_of(directory: Directory, occurrences: Occurrences, key: int) -> int | None:
    cell = int(directory.cells[locate(directory.cells, occurrences.rows, key)])
    return None if cell == EMPTY else cell & int(LOW)


@pytest.mark.parametrize("seed", range(6))
def test_tracking_moving_and_forgetting_in_any_order_finds_exactly_what_is_tracked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory, occurrences = with_room(new_directory(16), 32), new_occurrences(4096)
    keys = keys_in_one_cluster(64, 60)
    known: dict[int, int] = {}
    for position in range(3000):
        key = keys[rng.integers(len(keys))]
        if key in known and rng.random() < 0.5:
            forget(*directory, key, known.pop(key))
        elif key in known or len(known) < 32:
            assert put(directory, occurrences, key, position) == known.get(key)
            known[key] = position
        assert [position_of(directory, occurrences, other) for other in keys] == [known.get(other) for other in keys]
    check_directory(directory, occurrences.rows)


def test_a_grown_directory_leads_to_the_same_places() -> None:
    directory, occurrences = with_room(new_directory(16), 12), new_occurrences(64)
    for position, key in enumerate(range(0, 80, 10)):
        put(directory, occurrences, key, position)
    assert with_room(directory, 4) is directory
    grown = with_room(directory, 20)
    assert (len(directory.cells), len(grown.cells), int(grown.num_tracked[0])) == (32, 128, 8)
    assert [position_of(grown, occurrences, key) for key in range(0, 80, 10)] == list(range(8))
    check_directory(grown, occurrences.rows)


def test_the_check_finds_a_row_that_its_key_does_not_lead_to() -> None:
    directory, occurrences = new_directory(16), new_occurrences(8)
    put(directory, occurrences, 5, 0)
    check_directory(directory, occurrences.rows)
    occurrences.rows["key"][0] = 77
    with pytest.raises(AssertionError, match="key 77 leads to cell"):
        check_directory(directory, occurrences.rows)


def test_places_beyond_32_bits_are_told_apart_within_the_ring() -> None:
    directory, occurrences = new_directory(16), new_occurrences(64)
    far = 5 * 2**32 + 17
    put(directory, occurrences, 3, far)
    assert put(directory, occurrences, 3, far + 9) == 17
    assert position_of(directory, occurrences, 3) == 26
    forget(*directory, 3, far + 9)
    assert position_of(directory, occurrences, 3) is None


@pytest.mark.parametrize("scored", [False, True])
def test_a_grown_ring_keeps_every_place_and_every_queue(scored: bool) -> None:
    occurrences = new_occurrences(8, 4, scored=scored)
    positions, known, steps = np.arange(5, 12), np.arange(8, 12), np.arange(6, 9)
    occurrences.rows["key"][positions % 8] = positions * 10
    occurrences.queued[known % 8], occurrences.next_in[known % 8] = known, known + 3
    occurrences.first[steps % 4], occurrences.tails[steps % 4] = steps * 100, steps
    if scored:
        occurrences.scores[positions % 8] = positions * 7
    make_room(occurrences, 5, 8, 12, 1)
    assert len(occurrences.rows) == 8
    assert with_steps(occurrences, 6, 9) is occurrences
    make_room(occurrences, 5, 8, 12, 2)
    assert (len(occurrences.rows), len(occurrences.queued), len(occurrences.next_in)) == (16, 8, 8)
    make_room(occurrences, 5, 8, 12, 20)
    assert (len(occurrences.rows), len(occurrences.queued), len(occurrences.next_in)) == (32, 32, 32)
    grown = with_steps(occurrences, 6, 10)
    assert len(grown.first) == 8
    assert grown.rows["key"][positions % 32].tolist() == (positions * 10).tolist()
    assert grown.queued[known % 32].tolist() == known.tolist()
    assert grown.next_in[known % 32].tolist() == (known + 3).tolist()
    scores = grown.scores[positions % 32].tolist() if scored else grown.scores.tolist()
    assert scores == ((positions * 7).tolist() if scored else [0])
    assert grown.first[steps % 8].tolist() == (steps * 100).tolist()
    assert grown.tails[steps % 8].tolist() == steps.tolist()
