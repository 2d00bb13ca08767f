"""Both processes of one incarnation, advanced by one thread in an order that a seed decides, until an event.

Then its end for the prefetcher, whatever happened: was that right, and does it live on? This does what
`rowcast.prefetcher.run.attempt` and `rowcast.trainer.run.connection` do around their stages, in their order.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from rowcast.protocol.conversation import Conversation, tell_peer
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.errors import RemoteProtocolError, RowcastError, told
from rowcast.runtime.stages import Stage
from tests.simulation.faults import Event, Happening
from tests.simulation.link import FaultyLink
from tests.simulation.scenario import LifeFailed
from tests.simulation.server import SimulatedServer
from tests.simulation.storage import Storage
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


Outcome = Literal["in order", "waits for a trainer", "dead", "dead without power"]
MAX_SETTLING = 100_000  # advances of the writer
OTHER_SIDE: dict[Side, Side] = {"prefetcher": "trainer", "trainer": "prefetcher"}


class Ending:
    def __init__(
        self,
        both: Both,
        storage: Storage,
        server: SimulatedServer,
        chance: random.Random,
        say: Callable[[str], None],
        settle_limit: int | None,
    ) -> None:
        """`settle_limit`: advances of the writer after which the prefetcher is killed as it completes a checkpoint."""
        self.happened: Counter[str] = Counter()
        self._both = both
        self._storage = storage
        self._server = server
        self._chance = chance
        self._say = say
        self._settle_limit = settle_limit

    def live_to_the_end(self) -> Outcome:
        """Raises LifeFailed where nothing that was planned allows what happens."""
        try:
            self._both.run_to_end()
        except Happened as happened:
            return self._gone(happened)
        except Failed as failed:
            return self._failed(failed)
        except Stuck:
            return self._stuck()
        return "in order"

    def _gone(self, happened: Happened) -> Outcome:
        self._say(f"{happened} at advance {self._both.number}")
        match happened.event:
            case "power loss":
                return "dead without power"
            case "kill both":
                return "dead"
            case "kill prefetcher":
                self._linger("trainer")
                return "dead"
            case "kill trainer":
                return self._trainer_gone()
            case _:
                return self._peer_lost()

    def _trainer_gone(self) -> Outcome:
        try:
            self._linger("prefetcher")
        except Failed as failed:
            self._check(failed)
            self._settle()
            return "dead"
        return "in order" if self._both.run.prefetcher.finished else self._peer_lost()

    def _linger(self, side: Side) -> None:
        """A process goes on until it notices that its peer is gone. Raises Failed."""
        with suppress(Stuck):
            self._both.advance_alone(side, self._chance.randrange(NOTICED_WITHIN))

    def _failed(self, failed: Failed) -> Outcome:
        """One side has raised: it tells the other, and both end."""
        self._say(f"at advance {self._both.number} {failed}")
        self._check(failed)
        tell_peer(self._both.conversations[failed.side], failed.error)
        other = OTHER_SIDE[failed.side]
        try:
            self._both.advance_alone(other, 20 * NOTICED_WITHIN)
        except Stuck:
            self._say(f"the {other} did not hear of it, and loses its peer")
        except Failed as heard:
            self._say(str(heard))
            if told(heard.error) != told(failed.error):
                self._check(heard)
        self._settle()
        return "dead"

    def _check(self, failed: Failed) -> None:
        refused = type(failed.error) is RemoteProtocolError and self._both.links[failed.side].must_refuse
        if not refused and not (failed.side == "prefetcher" and self._explained(failed.error)):
            raise LifeFailed(f"nothing that happened allows this: {failed}") from failed.error

    def _explained(self, error: Exception) -> bool:
        """By what a disk or a server did."""
        return self._storage.failed_with(error) or self._server.explains(error)

    def _stuck(self) -> Outcome:
        """Both wait for a frame that never comes, until `transport.stall_timeout`."""
        both = self._both
        if not any(link.lost_a_frame or link.is_cut for link in both.links.values()):
            raise LifeFailed(
                f"stuck at advance {both.number}: the prefetcher waits for {both.run.prefetcher.waiting_for}, "
                f"the trainer for {both.run.trainer.loop.waiting_for}"
            )
        self.happened["stuck"] += 1
        self._say(f"both wait, at advance {both.number}")
        return self._peer_lost()

    def _peer_lost(self) -> Outcome:
        return "waits for a trainer" if self._settle() else "dead"

    def _settle(self) -> bool:
        """Completes a checkpoint handed over whole, gives up any other. Whether the prefetcher survives that."""
        writer = self._both.writer
        writer.abandon()
        for number in range(MAX_SETTLING):
            if not writer.busy:
                return True
            if self._settle_limit is not None and number >= self._settle_limit:
                self._say(f"the prefetcher is killed after {number} advances of the writer")
                return False
            try:
                writer.advance()
            except RowcastError as error:
                self._say(f"while a checkpoint was completed: {error}")
                if not self._explained(error):
                    raise LifeFailed(f"nothing that happened allows this: {error}") from error
                return False
        raise LifeFailed(f"the writer is busy after {MAX_SETTLING} advances")
