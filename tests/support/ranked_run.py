"""Several pairs of prefetcher and trainer in one thread, which share every batch; the seed orders the turns of all."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.protocol.shards import Shards
from tests.support.collectives import Network
from tests.support.driver import QUIET_LIMIT, InProcessRun, Settings, Sharing, StuckError
from tests.support.full_capacity import bits


class RankedRun:
    """One whole run of `ranks` pairs."""

    def __init__(
        self, job: Job, batches: Sequence[ScheduledBatch], settings: Settings, *, ranks: int, parts: int
    ) -> None:
        """`settings` of every pair; each has a seed of its own that follows from the one given."""
        self.job = job
        self._chance = random.Random(settings.seed)
        self.network = Network(ranks, settings.seed)
        self.pairs = [
            InProcessRun(
                job,
                batches,
                replace(settings, seed=settings.seed * ranks + number),
                sharing=Sharing(rank=Rank(number=number, count=ranks, parts=parts), network=self.network),
            )
            for number in range(ranks)
        ]
        self._advances = [advance for pair in self.pairs for advance in pair.advances] + [self.network.advance]
        # some pairs are much slower than others, and so are some stages
        speeds = [self._chance.choice((0.1, 1.0)) for _ in self.pairs]
        weights = [
            speed * self._chance.choice((0.05, 0.3, 1.0))
            for pair, speed in zip(self.pairs, speeds, strict=True)
            for _ in pair.advances
        ]
        self._weights = list(itertools.accumulate([*weights, self._chance.choice((0.05, 0.3, 1.0)) * ranks]))
        self.most_apart = 0  # steps between the rank that has begun the most and the one that has begun the fewest

    def run(self) -> "RankedRun":
        self._advance_until_all("trainer")
        for pair in self.pairs:
            pair.trainer.say_bye()
        self._advance_until_all("prefetcher")
        for pair in self.pairs:
            pair.prefetcher.planner.check_integrity()
        return self

    def _advance_until_all(self, side: str) -> None:
        quiet, begun = 0, [-1]
        while quiet % 64 or not all(getattr(pair, side).finished for pair in self.pairs):
            if self._chance.choices(self._advances, cum_weights=self._weights)[0]():
                quiet = 0
                begun = [-1 if (step := pair.trainer.loop.step_begun) is None else step for pair in self.pairs]
                self.most_apart = max(self.most_apart, max(begun) - min(begun))
            else:
                quiet += 1
            if quiet > QUIET_LIMIT * len(self.pairs):
                waits = [(pair.prefetcher.waiting_for, pair.trainer.loop.waiting_for) for pair in self.pairs]
                raise StuckError(f"prefetchers and trainers wait for {waits}; steps begun {begun}")

    def assert_each_row_stays_with_its_owner(self) -> None:
        """No pair ever fetched a row of another one."""
        for number, pair in enumerate(self.pairs):
            for index, group in enumerate(pair.groups):
                shards = Shards(group.tables, len(self.pairs))
                for plan in pair.plans:
                    assert (shards.owners(plan.groups[index].fetch.keys) == number).all()

    def losses(self) -> list[np.float32]:
        """Asserts that all ranks have the same."""
        first = self.pairs[0].results
        for pair in self.pairs[1:]:
            assert pair.results.losses == first.losses, "ranks report other losses"
            assert pair.results.evaluations == first.evaluations, "ranks report other evaluations"
        return first.losses

    def state(self) -> dict[str, Tensor]:
        """Every row from its owner; of the dense weights, which all ranks have, the first rank's."""
        states = [pair.state() for pair in self.pairs]
        merged = dict(states[0])
        for name in self.pairs[0].runner.model.state_dict():
            for state in states[1:]:
                assert torch.equal(bits(state[name]), bits(merged[name])), f"ranks have other weights: {name}"
        for group in self.pairs[0].groups:
            shards = Shards(group.tables, len(self.pairs))
            for table in group.tables:
                keys = (np.arange(table.num_embeddings) & ROW_MASK) | (table.index << KEY_SHIFT)
                owners = torch.from_numpy(shards.owners(keys))
                names = [f"embedding_bags.{table.name}.weight"]
                names += [name for name in merged if name.startswith(f"optimizer.{table.name}.")]
                for name in names:
                    merged[name] = torch.stack([state[name] for state in states])[
                        owners.long(), torch.arange(len(keys))
                    ]
        return merged
