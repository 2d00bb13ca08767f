"""A run goes on with another number of ranks, from checkpoints that other ranks wrote, to the bits of the plain loop.

Pairs of prefetcher and trainer run in one thread, with their stores and checkpoint writers over one folder.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.section import decode
from rowcast.job.stores import Store
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.prefetcher.run.tables import Tables
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from tests.support.batches import NUM_DENSE, SEVERAL_LABELS, slots_for, small_batches, small_job
from tests.support.comparisons import differing
from tests.support.driver import Past, Settings, start_state
from tests.support.facts import facts
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_STEPS = 12
RESERVE = 2000  # rows that may wait to leave a memory tier
STORES: dict[str, dict[str, Any]] = {
    "memory": {},
    "tiered": {"kind": "tiered", "memory": "1GiB"},
}


@dataclass
class Restarts:
    """One run over several lives, each with its own number of ranks."""

    folder: Path
    job: Job
    batches: list[ScheduledBatch]
    parts: int
    store: str = "memory"
    seed: int = 0

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"
        self.run_dir.mkdir()
        self.lives = 0

    def newest(self) -> Manifest | None:
        return Checkpoints(self.run_dir, Disk()).newest_for_ranks(None)

    def live(self, ranks: int, num_steps: int | None = None, *, advances: int | None = None) -> RankedRun:
        """Ends in order after `num_steps` or all, with a checkpoint; or, as if killed, after `advances`."""
        self.lives += 1
        groups, newest = group_specs(self.job), self.newest()
        slots = slots_for(groups, self.batches, "one batch")
        tier_slots = tuple(2 * own for own in slots) if self.store == "tiered" else None
        with ExitStack() as stack:
            tables = [self._tables(OwnShard(number=number, count=ranks)) for number in range(ranks)]
            pasts = []
            for own in tables:
                stack.callback(own.close)
                own.restore(newest)
                if tier_slots is not None:
                    own.begin(tuple(num_slots + RESERVE for num_slots in tier_slots))
                checkpoints = Checkpoints(self.run_dir, Disk())
                pasts.append(Past(checkpoints=checkpoints, newest=newest, stores=own.stores))
            for number, past in enumerate(pasts):
                carry_out(past.checkpoints.withdraw(OwnShard(number=number, count=ranks)))
            settings = Settings(slots=slots, tier_slots=tier_slots, tier_reserve=RESERVE, seed=self.seed + self.lives)
            run = RankedRun(self.job, self.batches, settings, ranks=ranks, parts=self.parts, pasts=pasts)
            if num_steps is not None:
                for pair in run.pairs:
                    pair.prefetcher.planning.stop(StopRequest(reason="enough", after_step=num_steps - 1))
            if advances is not None:
                run.advance(advances)
                return run
            run.run()
            for own in tables:
                own.close()
            return run

    def _tables(self, shard: OwnShard) -> Tables:
        content = STORES[self.store]
        if content:
            content = {**content, "path": str(self.folder / f"tables-{shard.number}")}
        job = msgspec.structs.replace(self.job, store=decode(Store, content))
        return Tables(job, group_specs(job), Checkpoints(self.run_dir, Disk()), shard)


def assert_ends_as(run: RankedRun, expected: tuple[list[float], dict[str, Tensor]], folder: Path) -> None:
    losses, end = expected
    assert np.array(run.losses(), np.float32).tobytes() == np.array(losses, np.float32).tobytes()
    exported = folder / "exported.safetensors"
    export_run(folder / "run", exported)
    state = load_file(exported)
    assert differing(state, end) == []


def restarts(
    folder: Path, optimizer: str, parts: int, every: int | None = None, sections: Mapping[str, Any] = {}, **more: Any
) -> Restarts:
    checkpoint: dict[str, Any] = {} if every is None else {"checkpoint": {"every": every, "keep": 2}}
    job = small_job(optimizer, "multi", **checkpoint, **sections)
    return Restarts(folder, job, small_batches(job, "multi", num_steps=NUM_STEPS, eval_at=(3, 9)), parts, **more)


def plain(own: Restarts, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    return run_plain_loop(own.job, start_state(own.job, NUM_DENSE), own.batches, parts)


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
