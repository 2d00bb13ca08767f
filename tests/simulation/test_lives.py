"""Whatever goes wrong, a run ends with the plain loop's bits, or stops with the fitting error and later goes on."""

import re
from collections import Counter

import pytest

from tests.simulation.faults import EVENTS
from tests.simulation.life import run_life
from tests.simulation.link import FRAME_FAULTS
from tests.simulation.server import SERVER_FAULTS
from tests.support.repeats import count

NUM_SEEDS = count(20, 1000)
SEEDS_A_TEST = 20
RARE_BELOW = 1000  # seeds, in which not every kind of fault must have happened


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Over all lives of this module."""
    return Counter()


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_every_life_ends_with_the_bits_of_the_plain_loop(first: int, happened: Counter[str]) -> None:
    for seed in range(first, min(first + SEEDS_A_TEST, NUM_SEEDS)):
        life = run_life(seed)
        assert life.ended
        happened += life.happened
        happened["life"] += 1


def test_the_lives_had_faults_of_every_kind(happened: Counter[str]) -> None:
    if happened["life"] < NUM_SEEDS:
        pytest.skip(f"only {happened['life']} of {NUM_SEEDS} lives ended before")
    assert happened["incarnation"] >= 2 * NUM_SEEDS, "most lives end without a restart"
    for kind, share in {"event": 4, "frame": 4, "disk": 8, "loaded": 4, "spilled": 4}.items():
        assert happened[kind] >= NUM_SEEDS / share, f"only {happened[kind]} faults of kind {kind} in {NUM_SEEDS} lives"
    if NUM_SEEDS >= RARE_BELOW:
        rare = (*EVENTS, *FRAME_FAULTS, *SERVER_FAULTS, "stuck", "rot", "fresh", "disk")
        assert not [kind for kind in rare if not happened[kind]], "a fault never happened"


def test_a_seed_replays_to_the_letter() -> None:
    """Even in another folder; a life whose second run differed could not be looked into."""
    for seed in (25, 28):  # the second one over a server
        first: list[str] = []
        again: list[str] = []
        run_life(seed, first.append)
        run_life(seed, again.append)
        assert [without_folder(text) for text in first] == [without_folder(text) for text in again]
        assert len(first) > 3


def without_folder(text: str) -> str:
    return re.sub(r"/\S*/run/", "", text)
