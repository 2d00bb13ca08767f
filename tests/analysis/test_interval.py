"""Confidence intervals of shares hold as often as they promise, however alike the samples of a batch are."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from rowcast.analysis.profile.hot_rows import EstimatedShare, clustered_share, student_t, unseen_share, wilson

Doubles = npt.NDArray[np.float64]
BATCH = 64
EPOCH = 640  # batches of which some are judged


def counts(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [
        (0.95, 1, 12.70620),
        (0.99, 1, 63.65674),
        (0.95, 10, 2.228139),
        (0.99, 31, 2.744042),
        (0.999, 30, 3.645959),
        (0.5, 5, 0.726687),
        (0.99, 10**6, 2.575834),
    ],
)
def test_students_t_is_that_of_the_tables(confidence: float, freedom: int, expected: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(expected, rel=2e-5)


def test_wilsons_interval_is_the_textbooks() -> None:
    share = wilson(0.1, 100, 1.959964)
    assert (share.low, share.high) == pytest.approx((0.05523, 0.17437), abs=1e-5)


def test_independent_samples_give_about_the_interval_of_as_many_samples() -> None:
    hits = np.random.default_rng(1).binomial(1000, 0.3, 100)
    found = clustered_share(hits, np.full(100, 1000), 0.95)
    assert found is not None
    plain = wilson(found.estimate, 100_000, student_t(0.95, 99))
    assert found.high - found.low == pytest.approx(plain.high - plain.low, rel=0.25)
    assert found.high - found.low >= plain.high - plain.low


def test_batches_of_one_kind_give_the_interval_of_as_many_batches() -> None:
    found = clustered_share(counts(*[1000] * 30, *[0] * 70), np.full(100, 1000), 0.95)
    plain = wilson(0.3, 99, student_t(0.95, 99))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=1e-6)


@pytest.mark.parametrize("size", [0, 64])
def test_agreement_of_all_samples_counts_batches_and_not_samples(size: int) -> None:
    found = clustered_share(np.full(32, size), np.full(32, 64), 0.99)
    assert found == wilson(size / 64, 32, student_t(0.99, 31))


def test_nothing_counted_gives_no_share() -> None:
    assert clustered_share(counts(0, 0), counts(0, 0), 0.99) is None


def test_equal_batches_never_claim_more_than_their_samples() -> None:
    found = clustered_share(np.full(10, 3), np.full(10, 10), 0.99)
    assert found == wilson(0.3, 100, student_t(0.99, 9))


def independent(random: np.random.Generator) -> Doubles:
    return np.full(EPOCH, 0.3)


def alike_within_a_batch(random: np.random.Generator) -> Doubles:
    return random.beta(0.7, 1.3, EPOCH)


def drifting(random: np.random.Generator) -> Doubles:
    """Rising over the epoch, with an outlier every tenth batch."""
    return np.where(np.arange(EPOCH) % 10 == 0, 0.1, np.linspace(0.5, 0.95, EPOCH))


def nearly_all(random: np.random.Generator) -> Doubles:
    return random.beta(90, 1, EPOCH)


POPULATIONS: list[Callable[[np.random.Generator], Doubles]] = [independent, alike_within_a_batch, drifting, nearly_all]


@pytest.mark.parametrize("confidence", [0.9, 0.99])
@pytest.mark.parametrize("num_judged", [8, 32])
@pytest.mark.parametrize("population", POPULATIONS)
def test_the_interval_holds_the_epochs_share_as_often_as_it_says(
    population: Callable[[np.random.Generator], Doubles], num_judged: int, confidence: float
) -> None:
    """Over 2,000 drawings of batches, one in each stratum, as `sample_windows` draws them."""
    random = np.random.default_rng(5)
    hits = random.binomial(BATCH, population(random))
    truth = hits.sum() / (BATCH * EPOCH)
    stratum = EPOCH // num_judged
    held = 0
    for _ in range(2000):
        chosen = np.arange(num_judged) * stratum + random.integers(0, stratum, num_judged)
        found = clustered_share(hits[chosen], np.full(num_judged, BATCH), confidence)
        assert isinstance(found, EstimatedShare)
        held += found.low <= truth <= found.high
    assert held / 2000 >= confidence - 3 * (confidence * (1 - confidence) / 2000) ** 0.5


def test_batches_rarer_than_the_unseen_share_are_missed_more_often_than_admitted() -> None:
    """The limit of the method, by counting: batches drawn that miss a kind that makes up just the unseen share."""
    share = unseen_share(32, 0.99)
    assert share == pytest.approx(0.134, abs=0.001)
    missed = (np.random.default_rng(2).random((100_000, 32)) >= share).all(axis=1)
    assert missed.mean() == pytest.approx(0.01, abs=0.001)
