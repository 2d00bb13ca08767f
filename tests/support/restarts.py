"""One run over several lives, each with its own number of ranks and placement of tables.

Pairs of prefetcher and trainer run in one thread, with their stores and checkpoint writers over one folder.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.section import decode
from rowcast.job.stores import Store
from rowcast.job.tables import group_specs, points_in
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.prefetcher.run.starting_point import Tables
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from tests.support.batches import NUM_DENSE, slots_for
from tests.support.comparisons import Plain, differing
from tests.support.driver import Past, Settings, start_state
from tests.support.ranked_run import RankedRun

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
            shards = [OwnShard(number=number, count=ranks, points=points_in(groups)) for number in range(ranks)]
            tables = [self._tables(shard) for shard in shards]
            pasts = []
            for own in tables:
                stack.callback(own.close)
                own.restore(newest)
                if tier_slots is not None:
                    own.begin(tuple(num_slots + RESERVE for num_slots in tier_slots))
                checkpoints = Checkpoints(self.run_dir, Disk())
                pasts.append(Past(checkpoints=checkpoints, newest=newest, stores=own.stores))
            for shard, past in zip(shards, pasts, strict=True):
                carry_out(past.checkpoints.withdraw(shard))
            settings = Settings(slots=slots, tier_slots=tier_slots, tier_reserve=RESERVE, seed=self.seed + self.lives)
            run = RankedRun(self.job, self.batches, settings, ranks=ranks, parts=self.parts, pasts=pasts)
            if num_steps is not None:
                for pair in run.pairs:
                    pair.prefetcher.planning.due.stop(StopRequest(reason="enough", after_step=num_steps - 1))
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


def assert_ends_as(run: RankedRun, expected: Plain, folder: Path) -> None:
    losses, end = expected
    assert np.array(run.losses(), np.float32).tobytes() == np.array(losses, np.float32).tobytes()
    exported = folder / "exported.safetensors"
    export_run(folder / "run", exported)
    state = load_file(exported)
    assert differing(state, end) == []


def plain(own: Restarts, parts: int) -> Plain:
    return run_plain_loop(own.job, start_state(own.job, NUM_DENSE), own.batches, parts)
