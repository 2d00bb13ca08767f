"""Small jobs under `--verify`, and rows of theirs to do harm to."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, group_specs
from rowcast.prefetcher.stores.store import Keys, RowStore
from rowcast.prefetcher.verify.checksum_loops import SAMPLE_RANGE, find_sampled
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import StepPlan
from rowcast.runtime.errors import DataError
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings, start_state

VARIANTS = (  # capacity, ring bytes: as in test_device_order
    ("one batch", 24 * 1024),
    ("two batches", 2**20),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    job: Job
    batches: list[ScheduledBatch]
    losses: list[float]
    end: dict[str, Tensor]
    recorded: dict[int, list[StepPlan]]

    def run(
        self,
        seed: int,
        share: float,
        harm: Callable[[RowStore], RowStore] | None = None,
        *,
        seeded_streams: bool = True,
        mirrored: bool = False,
    ) -> InProcessRun:
        capacity, ring_bytes = VARIANTS[seed % 2]
        settings = Settings(
            slots=slots_for(group_specs(self.job), self.batches, capacity),
            ring_bytes=ring_bytes,
            seed=seed,
            late_store=seed % 3 == 0,
        )
        settings = replace(settings, verify=share, harm=harm, seeded_streams=seeded_streams, mirrored=mirrored)
        return InProcessRun(self.job, self.batches, settings)

    def plans(self, variant: int) -> list[StepPlan]:
        """Those of every run of the variant, harmed or not."""
        if variant not in self.recorded:
            self.recorded[variant] = self.run(variant, 0.0).run().plans
        return self.recorded[variant]


@functools.cache
def work(optimizer: str, num_groups: int) -> Work:
    job = small_job(optimizer, "multi", depth=3, horizon=4)
    if num_groups == 1:
        job = msgspec.structs.replace(
            job, tables=[msgspec.structs.replace(table, embedding_dim=6) for table in job.tables]
        )
    assert len(group_specs(job)) == num_groups
    batches = small_batches(job, "multi", num_steps=10, eval_at=(3, 4, 8))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    return Work(job=job, batches=batches, losses=losses, end=end, recorded={})


@dataclass(frozen=True, kw_only=True)
class Target:
    """A sampled row of one plan's move."""

    group: int
    key: int
    slot: int
    place: int  # in the move
    step: int  # the plan's
    after: int | None  # its fill_after

    def name(self, job: Job) -> str:
        return f"row {self.key & ROW_MASK} of table {job.tables[self.key >> KEY_SHIFT].name}"


def sampled(keys: Keys, share: float) -> list[int]:
    places = np.empty(len(keys), np.int64)
    found: list[int] = places[: find_sampled(keys, round(share * SAMPLE_RANGE), places)].tolist()
    return found


def targets(plans: list[StepPlan], share: float, move: str) -> Iterator[Target]:
    """`move`: fetch, dirty or clean."""
    for plan in plans:
        for index, group in enumerate(plan.groups):
            keys = group.fetch_keys if move == "fetch" else group.evict_keys
            for place in sampled(keys, share):
                if move == "fetch" or (place < group.num_dirty) == (move == "dirty"):
                    key, slot = int(keys[place]), int(group.fetch_slots[place])
                    yield Target(group=index, key=key, slot=slot, place=place, step=plan.step, after=group.fill_after)


def fetched_again(plans: list[StepPlan], target: Target) -> int | None:
    """The first step after the target's that brings its row, if there is one."""
    return next(
        (p.step for p in plans if p.step > target.step and target.key in p.groups[target.group].fetch_keys), None
    )


def times_home_before(plans: list[StepPlan], target: Target) -> int:
    """How often the row came home before the target's step."""
    groups = [plan.groups[target.group] for plan in plans[: target.step]]
    return sum(target.key in group.evict_keys[: group.num_dirty] for group in groups)


def assert_noticed(run: InProcessRun, sentence: str) -> None:
    """The run ends with this sentence and exit code 4."""
    with pytest.raises(DataError) as caught:
        run.run()
    assert re.search(sentence, str(caught.value)), f"{caught.value} does not say {sentence!r}"
    assert caught.value.exit_code == 4
