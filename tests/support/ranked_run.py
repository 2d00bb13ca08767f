"""Several pairs of prefetcher and trainer in one thread, which share every batch; the seed orders the turns of all."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, make_keys
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank, Shards
from rowcast.trainer.models.exchanges import LocalCollectives
from tests.support.collectives import InProcessCollectives, Network
from tests.support.driver import QUIET_LIMIT, InProcessRun, Past, Settings, Sharing, StuckError, columns_of
from tests.support.full_capacity import bits
from tests.support.key_network import KeyNetwork
from tests.support.planner_integrity import check_planner


class RankedRun:
    """One whole run of `ranks` pairs."""

    def __init__(
        self,
        job: Job,
        batches: Sequence[ScheduledBatch],
        settings: Settings,
        *,
        ranks: int,
        parts: int,
        pasts: Sequence[Past] | None = None,
    ) -> None:
        """`settings` of every pair; each has a seed of its own that follows from the one given. `pasts`: of each rank,
        which continue a run of any number of ranks; all have one folder."""
        self.job = job
        self._chance = random.Random(settings.seed)
        self.network = Network(ranks, settings.seed)
        self.keys = KeyNetwork(ranks, settings.seed)
        self.pairs = [
            self.make_pair(
                number,
                batches,
                replace(settings, seed=settings.seed * ranks + number),
                None if pasts is None else pasts[number],
                Sharing(
                    rank=Rank(number=number, count=ranks, parts=parts),
                    collectives=LocalCollectives() if ranks == 1 else InProcessCollectives(self.network, number),
                    links=self.keys.links[number],
                ),
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
        self._happenings: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self.most_apart = 0  # steps between the rank that has begun the most and the one that has begun the fewest

    def make_pair(
        self, number: int, batches: Sequence[ScheduledBatch], settings: Settings, past: Past | None, sharing: Sharing
    ) -> InProcessRun:
        return InProcessRun(self.job, batches, settings, past, sharing)

    def when(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        """Does `action` once, between two turns, if the condition is ever true while trainers run."""
        self._happenings.append((condition, action))

    def _let_happen(self) -> None:
        for happening in [own for own in self._happenings if own[0]()]:
            self._happenings.remove(happening)
            happening[1]()

    def run(self) -> "RankedRun":
        self._advance_until_all("trainer.loop")
        for pair in self.pairs:
            pair.trainer.say_bye()
        self._advance_until_all("prefetcher")
        for pair in self.pairs:
            check_planner(pair.prefetcher.planner)
        return self

    def advance(self, times: int) -> None:
        """Lets that many stages work; ends early if the run has ended."""
        for _ in range(times):
            if all(pair.trainer.loop.finished for pair in self.pairs):
                break
            self._chance.choices(self._advances, cum_weights=self._weights)[0]()

    def _advance_until_all(self, side: str) -> None:
        quiet, begun = 0, [-1]
        while quiet % 64 or not all(attrgetter(f"{side}.finished")(pair) for pair in self.pairs):
            if side == "trainer.loop":
                self._let_happen()
            if self._chance.choices(self._advances, cum_weights=self._weights)[0]():
                quiet = 0
                begun = [-1 if (step := pair.trainer.loop.step_begun) is None else step for pair in self.pairs]
                self.most_apart = max(self.most_apart, max(begun) - min(begun))
            else:
                quiet += 1
            if quiet > QUIET_LIMIT * len(self.pairs) ** 2:
                waits = [(pair.prefetcher.waiting_for, pair.trainer.loop.waiting_for) for pair in self.pairs]
                raise StuckError(f"prefetchers and trainers wait for {waits}; steps begun {begun}")

    def assert_each_row_stays_with_its_owner(self) -> None:
        """No pair ever fetched a row of another one."""
        for number, pair in enumerate(self.pairs):
            for index, group in enumerate(pair.groups):
                shards = Shards(group.tables, len(self.pairs))
                for plan in pair.plans:
                    assert (shards.owners(plan.groups[index].fetch_keys) == number).all()

    def losses(self) -> list[np.float32]:
        """Asserts that all ranks have the same."""
        first = self.pairs[0].results
        for pair in self.pairs[1:]:
            assert pair.results.losses == first.losses, "ranks report other losses"
            assert pair.results.evaluations == first.evaluations, "ranks report other evaluations"
        return first.losses

    def state(self) -> dict[str, Tensor]:
        """Every row from its owner, and the dense weights. Asserts that all ranks have the same."""
        return merged(self.pairs[0].groups, [pair.state() for pair in self.pairs])


def merged(groups: Sequence[GroupSpec], states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of a run from those of its ranks. Asserts that what is not of a table is the same on every rank."""
    state = {}
    for group in groups:
        shards = Shards(group.tables, len(states))
        for table in group.tables:
            keys = make_keys(table.index, np.arange(table.num_embeddings))
            owners = torch.from_numpy(shards.owners(keys)).long()
            names = [f"embedding_bags.{table.name}.weight", *(f"optimizer.{table.name}.{p.name}" for p in group.parts)]
            for name in (name + columns_of(table) for name in names):
                if name in states[0]:
                    state[name] = torch.stack([own[name] for own in states])[owners, torch.arange(len(keys))]
    for name in states[0].keys() - state.keys():
        for own in states:
            assert torch.equal(bits(own[name]), bits(states[0][name])), f"ranks have other values: {name}"
        state[name] = states[0][name]
    for name in sorted(name for name in state if "@" in name):
        whole = name.partition("@")[0]
        state[whole] = torch.cat([state[whole], state.pop(name)], dim=1)
    return state
