"""The confidence interval of a share that was measured on some of many batches.

Samples within a batch are alike (an hour, a campaign, one customer's basket), so n samples of m batches say less than n
samples drawn one by one. The batches were drawn at random, so they are what is counted:

    share      p = hits / totals, summed over the m judged batches
    variance   m / (m - 1) * sum (hits_i - p * totals_i)^2 / totals^2, the linearized ratio estimator for m batches
               drawn at random
    effective  n = p (1 - p) / variance, samples drawn one by one that would vary as much; at most the actual number;
               m if p is 0 or 1, as if every batch had been of one kind
    interval   Wilson's for p and n, which never leaves [0, 1], with Student's t for m - 1 degrees of freedom in place
               of the normal's z

Batches spread evenly over the data vary less than batches drawn at random, and none is drawn twice; both make the
interval only safer. It knows nothing about kinds of batches that were not judged; `unseen_share` says how much of the
data they may be.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt, tan

import numpy as np

from rowcast.runtime.arrays import I64

METHOD = "Wilson's interval for the effective number of samples, batches as clusters, Student's t"


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedShare:
    estimate: float
    low: float
    high: float


def clustered_share(hits: I64, totals: I64, confidence: float) -> EstimatedShare | None:
    """The share of `hits` in `totals`, both [m], one per batch; None if nothing was counted."""
    assert len(hits) == len(totals) >= 2, f"{len(hits)} hits and {len(totals)} totals of at least 2 batches"
    total = float(totals.sum())
    if total == 0:
        return None
    share = float(hits.sum()) / total
    return wilson(share, effective_samples(share, hits, totals), student_t(confidence, len(totals) - 1))


def effective_samples(share: float, hits: I64, totals: I64) -> float:
    """Number of independent samples that would vary as much."""
    num_batches, total = len(totals), float(totals.sum())
    spread = share * (1 - share)
    if spread == 0:
        return min(num_batches, total)
    variance = num_batches / (num_batches - 1) * float(((hits - share * totals) ** 2).sum()) / total**2
    return min(spread / variance, total) if variance > 0 else total


def wilson(share: float, num_samples: float, deviations: float) -> EstimatedShare:
    """The shares from which `share` of `num_samples` samples is at most `deviations` standard deviations away."""
    weight = deviations**2 / num_samples
    centre = (share + weight / 2) / (1 + weight)
    half = deviations / (1 + weight) * sqrt(share * (1 - share) / num_samples + weight / (4 * num_samples))
    return EstimatedShare(
        estimate=share, low=max(0.0, min(share, centre - half)), high=min(1.0, max(share, centre + half))
    )


def unseen_share(num_batches: int, confidence: float) -> float:
    """The share above which a kind of batch is, with this confidence, among `num_batches` batches drawn at random."""
    return 1.0 - float((1 - confidence) ** (1 / num_batches))


@lru_cache(maxsize=16)
def student_t(confidence: float, freedom: int) -> float:
    """The t for which |T| < t has this probability.

    With T = sqrt(freedom) * tan(angle), the angle's density is cos(angle)^(freedom - 1), which is summed until the
    probability is reached. Steps are small near 0, where all of it is when there are many degrees of freedom."""
    angles = np.pi / 2 * np.linspace(0, 1, 20001) ** 2
    density = np.cos(angles) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])
    return sqrt(freedom) * tan(float(np.interp(confidence * cumulative[-1], cumulative, angles)))
