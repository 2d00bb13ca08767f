"""Ranks of positives: counted in integers, and the figures that follow from the counts."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.evaluate import (
    RANK_BINS,
    EvalMetrics,
    count_ranks,
    ranking_figures,
    ranks_among,
    require_integers,
)
from tests.support.facts import facts

CUTOFFS = (1, 10, 50, 1024)


def figures_of(ranks: Tensor) -> dict[str, float]:
    bins = torch.zeros(RANK_BINS, dtype=torch.int64)
    count_ranks(bins, ranks)
    return ranking_figures(bins.tolist(), CUTOFFS)


def test_figures_are_those_of_a_count_over_all_ranks() -> None:
    ranks = np.random.default_rng(3).geometric(0.01, 20_000) - 1
    figures = figures_of(torch.tensor(ranks))
    for k in CUTOFFS:
        hits = ranks < k
        assert figures[f"hr@{k}"] == pytest.approx(hits.mean(), abs=1e-12)
        assert figures[f"ndcg@{k}"] == pytest.approx((hits / np.log2(ranks + 2)).mean(), abs=1e-12)
        assert figures[f"mrr@{k}"] == pytest.approx((hits / (ranks + 1)).mean(), abs=1e-12)


def test_the_order_and_the_batches_of_ranks_change_no_bit() -> None:
    ranks = torch.randint(0, 3000, (999,), generator=torch.Generator().manual_seed(1))
    whole, parts = EvalMetrics(), EvalMetrics()
    whole.update_ranks(ranks)
    for part in torch.split(ranks.flip(0), 100):
        parts.update_ranks(part.view(-1, 1))
    continued = EvalMetrics()
    assert continued.restore(parts.state()), "an evaluation in progress"
    assert whole.counts.rank_bins.tolist() == parts.counts.rank_bins.tolist() == continued.counts.rank_bins.tolist()


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf])
def test_equal_scores_and_nan_count_against_the_model(score: float) -> None:
    positives, candidates = torch.full((5,), score), torch.full((5, 60), score)
    ranks = ranks_among(positives, candidates, torch.zeros(5, 60, dtype=torch.bool))
    assert ranks.tolist() == [60] * 5
    assert all(figures_of(ranks)[f"{name}@50"] == 0 for name in ("hr", "ndcg", "mrr"))


def test_a_candidate_that_is_the_positive_is_left_out() -> None:
    candidates = torch.tensor([[3.0, 1.0, 2.0]])
    same = torch.tensor([[True, False, False]])
    assert ranks_among(torch.tensor([2.5]), candidates, same).tolist() == [0]
    assert ranks_among(torch.tensor([2.0]), candidates, same).tolist() == [1], "a tie with another candidate"


def test_there_are_no_figures_without_positives() -> None:
    assert figures_of(torch.zeros(0, dtype=torch.int64)) == {}


def test_negative_ranks_are_refused_when_the_evaluation_ends() -> None:
    with pytest.raises(ConfigError, match=facts("2 ranks", "negative")):
        figures_of(torch.tensor([3, -1, -9]))


@pytest.mark.parametrize("ranks", [torch.zeros(3), torch.zeros(3, dtype=torch.int32), [1, 2]])
def test_ranks_that_are_no_integers_of_64_bits_are_refused(ranks: object) -> None:
    with pytest.raises(ConfigError, match=facts("MyModel.ranks", "torch.int64")):
        require_integers(ranks, "MyModel.ranks")
