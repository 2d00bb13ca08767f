"""Counts ranks in integers. Hit rate, NDCG and reciprocal rank at k follow from the counts when an evaluation ends, so
kills, parts and ranks of a run change no bit of them.

The rank of a positive is the number of other candidates that do not score less: 0 is best. Ties and NaN count against
the model.

    bin    0          1 ... 1,024       1,025
    rank   negative   0 ... 1,023       1,024 and more
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.job.schema import MAX_RANK
from rowcast.runtime.errors import ConfigError

RANK_BINS = MAX_RANK + 2
Ranks = Callable[[Any], Tensor]  # a model's outputs -> ranks of its positives, i64 [P]


def ranks_among(positives: Tensor, candidates: Tensor, is_positive: Tensor) -> Tensor:
    """Returns the rank of each positive among its candidates, i64 [P].

    positives: scores, float [P]. candidates: scores, float [P, C]. is_positive: bool [P, C], or a shape that expands to
    it; True where a candidate is the positive itself, which is left out."""
    return (~(candidates < positives[:, None]) & ~is_positive).sum(-1)


def own_ranks(model: nn.Module) -> Ranks:
    """Returns the model's `ranks(outputs)`, checked at each call. A model without that method has no positives."""
    ranks = getattr(model, "ranks", None)
    if not callable(ranks):
        return lambda outputs: torch.zeros(0, dtype=torch.int64, device="cpu")
    return lambda outputs: require_integers(ranks(outputs), f"{type(model).__name__}.ranks")


def require_integers(ranks: Any, name: str) -> Tensor:
    """Raises ConfigError if these are not ranks."""
    if not isinstance(ranks, Tensor) or ranks.dtype != torch.int64:
        found = f"{ranks.dtype} of shape {list(ranks.shape)}" if isinstance(ranks, Tensor) else type(ranks).__name__
        raise ConfigError(f"{name} gave {found}; give the rank of each positive as torch.int64, counted from 0")
    return ranks


def count_ranks(bins: Tensor, ranks: Tensor) -> None:
    """Adds ranks, i64 of any shape, to `bins`, i64 [RANK_BINS] on the same device. Waits for nothing."""
    places = ranks.to(bins.device).flatten().clamp(-1, MAX_RANK) + 1
    bins.index_add_(0, places, torch.ones_like(places))


def ranking_figures(bins: Sequence[int], cutoffs: Sequence[int]) -> dict[str, float]:
    """Returns HR@k, NDCG@k and MRR@k for each k of `cutoffs`, means over all positives; empty without positives.

    Each positive is alone in its list, so its ideal DCG is 1. Raises ConfigError for negative ranks."""
    negative, *counts = bins
    if negative:
        raise ConfigError(
            f"{negative} ranks of an evaluation are negative; a rank is the number of candidates that do not score "
            "less than the positive, from 0"
        )
    total = sum(counts)
    if not total:
        return {}
    figures = {}
    for k in cutoffs:
        figures[f"hr@{k}"] = sum(counts[:k]) / total
        figures[f"ndcg@{k}"] = math.fsum(count / math.log2(rank + 2) for rank, count in enumerate(counts[:k])) / total
        figures[f"mrr@{k}"] = math.fsum(count / (rank + 1) for rank, count in enumerate(counts[:k])) / total
    return figures
