"""How an incarnation ends for the prefetcher, whatever happened to it: was that right, and does it live on?

This does what `rowcast.prefetcher.run.attempt` and `rowcast.trainer.run.connection` do around their stages, in their
order.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from rowcast.protocol.peer_watch import tell_peer
from rowcast.runtime.errors import RemoteProtocolError, RowcastError, told
from tests.simulation.both import NOTICED_WITHIN, Both, Failed, Happened, Side, Stuck
from tests.simulation.promises import LifeFailed
from tests.simulation.server import SimulatedServer
from tests.simulation.storage import Storage

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
