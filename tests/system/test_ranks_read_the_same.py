"""Ranks whose prefetchers read different batches notice it before they train on one of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.errors import Mismatch
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import ListSource, Settings
from tests.support.ranked_run import RankedRun

NUM_STEPS, EVALUATIONS = 16, (6, 7, 15)
JOB = small_job("adagrad")
BATCHES = small_batches(JOB, "single", num_steps=NUM_STEPS - len(EVALUATIONS), eval_at=EVALUATIONS)
Change = Callable[[Batch], Batch]


def other_ids(batch: Batch) -> Batch:
    ids = batch.ids.copy()
    ids[0] = (ids[0] + 1) % 400
    return replace(batch, ids=ids)


CHANGES: dict[str, Change] = {
    "ids": other_ids,
    "dense features": lambda batch: replace(batch, dense=batch.dense + np.float32(1)),
    "labels": lambda batch: replace(batch, labels=1 - batch.labels),
}


def two_ranks(others: list[ScheduledBatch]) -> RankedRun:
    """Rank 1 reads `others`."""
    settings = Settings(slots=slots_for(group_specs(JOB), [*BATCHES, *others], "one batch"))
    run = RankedRun(JOB, BATCHES, settings, ranks=2, parts=2)
    run.pairs[1].prefetcher.planning._source._source = ListSource(others)
    return run


@pytest.mark.parametrize("step", [3, 6, 7, 8, 15])
@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_differs_is_never_trained(change: str, step: int) -> None:
    others = [*BATCHES[:step], replace(BATCHES[step], batch=CHANGES[change](BATCHES[step].batch)), *BATCHES[step + 1 :]]
    run = two_ranks(others)
    with pytest.raises(Mismatch, match="rank 1 reads other batches than rank 0"):
        run.run()
    for pair in run.pairs:  # noticed with the step before
        assert len(pair.results.losses) <= sum(batch.kind == "train" for batch in BATCHES[:step])
        assert pair.prefetcher.fetcher.done_through in (None, *range(step))


def test_a_rank_whose_data_ends_early_is_noticed() -> None:
    run = two_ranks(BATCHES[:9])
    with pytest.raises(Mismatch, match="rank 1 reads other batches than rank 0"):
        run.run()


def test_batches_in_another_order_are_noticed() -> None:
    swapped = [replace(BATCHES[4], batch=BATCHES[3].batch), replace(BATCHES[3], batch=BATCHES[4].batch)]
    others = [*BATCHES[:3], swapped[1], swapped[0], *BATCHES[5:]]
    with pytest.raises(Mismatch, match="rank 1 reads other batches"):
        two_ranks(others).run()
