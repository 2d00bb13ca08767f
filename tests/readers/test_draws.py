"""Draws of ids: a function of their place, with the probabilities they say."""

from collections.abc import Callable

import numpy as np
import pytest

from rowcast.prefetcher.readers.draws import Drawn, Draws, draws
from tests.support import repeats

COUNTS = np.array([5, 0, 1, 100, 0, 37], np.int64)
WAYS: dict[str, Callable[[Draws, int], Drawn]] = {
    "below": lambda own, count: own.below(37, count),
    "log-uniform": lambda own, count: own.log_uniform(37, count),
    "log-uniform of a power of two": lambda own, count: own.log_uniform(64, count),
    "by": lambda own, count: own.by(COUNTS, count),
}
NUM_DRAWS = repeats.count(test=200_000, soak=10**7)


def test_the_ids_are_known() -> None:
    """Fails if ids change: a run that continues would train on other negatives."""
    own = draws(7, "train", 2, 5)
    assert own.below(1000, 4).ids.tolist() == KNOWN["below"]
    assert own.log_uniform(1000, 6).ids.tolist() == KNOWN["log_uniform"]
    assert own.by(COUNTS, 12).ids.tolist() == KNOWN["by"]


KNOWN = {
    "below": [529, 847, 744, 173],
    "log_uniform": [510, 2, 239, 2, 280, 220],
    "by": [3, 3, 3, 3, 3, 3, 5, 3, 5, 3, 0, 3],
}


@pytest.mark.parametrize("other", [(8, "train", 2, 5), (7, "eval", 2, 5), (7, "train", 3, 5), (7, "train", 2, 6)])
def test_every_place_has_its_own_ids(other: tuple[int, str, int, int]) -> None:
    here = draws(7, "train", 2, 5).below(2**40, 8).ids
    there = draws(*other).below(2**40, 8).ids  # type: ignore[arg-type]
    assert not set(here.tolist()) & set(there.tolist())


def test_all_evaluations_draw_the_same() -> None:
    first, second = (draws(7, "eval", epoch, 3).below(2**40, 8).ids for epoch in (0, 5))
    np.testing.assert_array_equal(first, second)


@pytest.mark.timeout(repeats.count(300, 1800))
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_drawn_as_log_q_says(way: str) -> None:
    """Pearson's test, at one in a thousand: a wrong probability fails every seed."""
    for seed in range(repeats.count(test=2, soak=20)):
        drawn = WAYS[way](draws(seed, "train", 0, 0), NUM_DRAWS)
        ids, places, counts = np.unique(drawn.ids, return_index=True, return_counts=True)
        q = np.exp(drawn.log_q[places].astype(np.float64))
        assert q.sum() == pytest.approx(1, abs=1e-5), f"every id is drawn: {ids}"
        chi_squared = ((counts - NUM_DRAWS * q) ** 2 / (NUM_DRAWS * q)).sum()
        freedom = len(ids) - 1
        assert chi_squared < freedom + 3.2905 * np.sqrt(2 * freedom) + 2 * 3.0902**2 / 3, f"seed {seed}"


@pytest.mark.parametrize("n", [1, 2, 3, 2**31 - 1])
def test_log_uniform_takes_any_number_of_ids(n: int) -> None:
    ids = draws(1, "train", 0, 0).log_uniform(n, 1000).ids
    assert len(ids) == 1000
    assert 0 <= ids.min() <= ids.max() < n
    assert n < 2**31 - 1 or ids.max() > 2**28


@pytest.mark.parametrize(
    "draw",
    [
        lambda own: own.below(0, 1),
        lambda own: own.log_uniform(0, 1),
        lambda own: own.log_uniform(2**31, 1),
        lambda own: own.by(np.zeros(3, np.int64), 1),
        lambda own: own.by(np.array([3, -1], np.int64), 1),
        lambda own: own.by(np.zeros(0, np.int64), 1),
    ],
)
def test_impossible_draws_are_refused(draw: Callable[[Draws], Drawn]) -> None:
    with pytest.raises(ValueError, match="give"):
        draw(draws(1, "train", 0, 0))
