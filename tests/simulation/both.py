"""Both processes of one incarnation, advanced by one thread in an order that a seed decides, until an event."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.stages import Stage
from tests.simulation.faults import Event, Happening
from tests.simulation.link import FaultyLink
from tests.support.driver import InProcessRun

Side = Literal["prefetcher", "trainer"]
SIDES: tuple[Side, Side] = ("prefetcher", "trainer")
# advances without progress after which every stage has its turn: whoever starved is the only one who can go on
QUIET_LIMIT = 20
SWEEPS = 100  # of all stages: the late store's dice stay far below
NOTICED_WITHIN = 500  # advances from the loss of a peer until it is noticed
HEAD_START = 100
CHOICES_AT_ONCE = 64


class Happened(Exception):
    """A process or its peer is gone."""

    def __init__(self, event: Event) -> None:
        super().__init__(event)
        self.event = event


class Stuck(Exception):
    """No stage can advance."""


class Failed(Exception):
    """A stage has raised: in a process, the end of it."""

    def __init__(self, side: Side, error: Exception) -> None:
        super().__init__(f"the {side} failed: {type(error).__name__}: {error}")
        self.side, self.error = side, error


class Both:
    def __init__(
        self,
        run: InProcessRun,
        links: tuple[FaultyLink, FaultyLink],
        chance: random.Random,
        happening: Happening | None,
    ) -> None:
        self.number = 0  # of advances
        self.run = run
        self.links: dict[Side, FaultyLink] = {"prefetcher": links[0], "trainer": links[1]}
        self.conversations: dict[Side, Conversation] = {
            "prefetcher": run.prefetcher.conversation,
            "trainer": run.trainer.conversation,
        }
        assert run.writer is not None, "a simulated run writes checkpoints"
        self.writer = run.writer
        self._chance = chance
        self._happening = happening
        self._stages: dict[Side, list[Stage]] = {
            "prefetcher": [*run.prefetcher.stages.values(), run.writer.advance],
            "trainer": [*run.trainer.stages.values(), run.streams.advance],
        }
        self._weights = {
            side: [chance.choice((0.05, 0.3, 1.0)) for _ in stages] for side, stages in self._stages.items()
        }

    def run_to_end(self) -> None:
        """Raises Happened, Stuck or Failed."""
        if self._chance.random() < 0.5:
            with suppress(Stuck):
                self.advance_alone("prefetcher", HEAD_START)
        self._advance_until(lambda: self.run.trainer.loop.finished, SIDES)
        self.run.trainer.say_bye()
        self._advance_until(lambda: self.run.prefetcher.finished, SIDES)

    def advance_alone(self, side: Side, limit: int) -> None:
        """At most `limit` advances of one side's stages. Raises Failed, and Stuck where the side does nothing."""
        last = self.number + limit
        self._advance_until(lambda: self.number >= last, (side,))

    def _advance_until(self, condition: Callable[[], bool], sides: Sequence[Side]) -> None:
        stages = [(side, stage) for side in sides for stage in self._stages[side]]
        chosen = self._choices(stages, [weight for side in sides for weight in self._weights[side]])
        quiet = 0
        while not condition():
            self.number += 1
            if self._happening is not None and self.number >= self._happening.at and len(sides) == 2:
                self._happen(self._happening)
            quiet = 0 if self._advance(*next(chosen)) else quiet + 1
            if quiet > QUIET_LIMIT:
                if not self._sweep(stages, condition):
                    raise Stuck
                quiet = 0

    def _choices(self, stages: Sequence[tuple[Side, Stage]], weights: Sequence[float]) -> Iterator[tuple[Side, Stage]]:
        cumulative = list(itertools.accumulate(weights))
        while True:
            yield from self._chance.choices(stages, cum_weights=cumulative, k=CHOICES_AT_ONCE)

    def _advance(self, side: Side, stage: Stage) -> bool:
        try:
            return stage()
        except Exception as error:
            raise Failed(side, error) from error

    def _sweep(self, stages: Sequence[tuple[Side, Stage]], condition: Callable[[], bool]) -> bool:
        rounds = 0
        while rounds < SWEEPS:
            rounds = 0 if any(link.delays for link in self.links.values()) else rounds + 1
            in_turn = self._chance.sample(stages, len(stages))
            # all of them, also behind one that could
            progress = [self._advance(side, stage) for side, stage in in_turn]
            if any(progress) or condition():
                return True
        return False

    def _happen(self, happening: Happening) -> None:
        self._happening = None
        match happening.event:
            case "stop prefetcher":
                self.run.prefetcher.stop("SIGTERM to the prefetcher")
            case "stop trainer":
                if not self.run.trainer.loop.finished:
                    self.run.trainer.conversation.send(StopRequest(reason="SIGTERM to the trainer"))
            case "link cut" if not self.links["trainer"].is_cut:
                for link in self.links.values():
                    link.is_cut = True
                self._happening = Happening(event="link cut", at=self.number + self._chance.randrange(NOTICED_WITHIN))
            case _:
                raise Happened(happening.event)
