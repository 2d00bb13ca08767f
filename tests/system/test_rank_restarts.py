"""A run goes on with another number of ranks, from checkpoints that other ranks wrote, to the bits of the plain loop.

Pairs of prefetcher and trainer run in one thread, with their stores and checkpoint writers over one folder.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from tests.support.batches import SEVERAL_LABELS, slots_for, small_batches, small_job
from tests.support.driver import Past, Settings
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count
from tests.support.restarts import STORES, Restarts, assert_ends_as, plain

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_STEPS = 12


def restarts(
    folder: Path, optimizer: str, parts: int, every: int | None = None, sections: Mapping[str, Any] = {}, **more: Any
) -> Restarts:
    checkpoint: dict[str, Any] = {} if every is None else {"checkpoint": {"every": every, "keep": 2}}
    job = small_job(optimizer, "multi", **checkpoint, **sections)
    return Restarts(folder, job, small_batches(job, "multi", num_steps=NUM_STEPS, eval_at=(3, 9)), parts, **more)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("counts", "parts"), [((1, 4, 2), 4), ((3, 1, 3), 3), ((2, 8, 1), 8)], ids=lambda value: str(value)
)
def test_another_number_of_ranks_at_each_restart_has_the_bits_of_the_plain_loop(
    tmp_path: Path, store: str, counts: Sequence[int], parts: int
) -> None:
    own = restarts(tmp_path, "adagrad" if parts == 4 else "adam", parts, store=store, seed=len(counts) + parts)
    for ranks, num_steps in zip(counts, (5, 8, None), strict=True):
        run = own.live(ranks, num_steps)
        newest = own.newest()
        assert newest is not None
        assert (newest.position.step, len(newest.shards)) == (num_steps or len(own.batches), ranks)
    assert_ends_as(run, plain(own, parts), tmp_path)


@pytest.mark.parametrize("seed", range(count(2, 100)))
def test_ranks_that_are_killed_at_any_moment_go_on_from_a_checkpoint_of_all(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    own = restarts(tmp_path, chance.choice(("sgd", "adagrad", "adam")), 4, every=2, seed=100 * seed)
    own.store = chance.choice(list(STORES))
    for _ in range(3):
        own.live(chance.choice((1, 2, 4)), advances=chance.randrange(500, 8_000))
    run = own.live(chance.choice((1, 2, 4)))
    assert_ends_as(run, plain(own, 4), tmp_path)


@pytest.mark.parametrize(
    ("counts", "sections"), [((1, 4, 2), {}), ((4, 2, 1), {}), ((1, 4, 2), SEVERAL_LABELS)], ids=str
)
def test_an_evaluation_goes_on_with_another_number_of_ranks(
    tmp_path: Path, counts: Sequence[int], sections: dict[str, Any]
) -> None:
    """To the same AUC, log loss and accuracy as one that one rank began and ended."""
    evaluations = []
    for name, lives in (("whole", [(1, None)]), ("interrupted", list(zip(counts, (5, 7, None), strict=True)))):
        (tmp_path / name).mkdir()
        own = restarts(tmp_path / name, "adagrad", 4, sections=sections)
        own.batches = small_batches(own.job, "multi", num_steps=6, eval_at=range(3, 9))
        for ranks, num_steps in lives:
            run = own.live(ranks, num_steps)
        run.losses()  # all ranks have the same results
        evaluations.append(run.pairs[0].results.evaluations)
    assert len(evaluations[0]) == 1
    assert evaluations[0] == evaluations[1]


def test_a_replica_that_drifts_is_named_at_the_next_checkpoint(tmp_path: Path) -> None:
    own = restarts(tmp_path, "adagrad", 4, every=3)
    pasts = [Past(checkpoints=Checkpoints(own.run_dir, Disk()), newest=None) for _ in range(4)]
    slots = slots_for(group_specs(own.job), own.batches, "one batch")
    run = RankedRun(own.job, own.batches, Settings(slots=slots), ranks=4, parts=4, pasts=pasts)
    with torch.no_grad():
        next(iter(run.pairs[2].runner.model.parameters())).view(-1)[0] += 1e-3
    with pytest.raises(DataError, match=facts("rank 2", "model state", "step 2")):
        run.run()
    assert own.newest() is None
