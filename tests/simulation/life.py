"""One life of a run: incarnation after incarnation, each with something that goes wrong, until one reaches the end.

              +---------------------------- the same processes again, or new ones ----------------------------+
              v                                                                                               |
    newest checkpoint -> restore -> both sides advance -> end: bits equal the plain loop's                    |
                                          |                                                                   |
                                          +-> killed, refused, stuck, disk failed: rightly so? -> clear up ---+

What happens around the stages is what `prefetcher.service`, `prefetcher.incarnation` and `trainer.service` do, in their order; the rest
is what a person does who sees a process end: start both again. Raises LifeFailed.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog.testing

from prefetcher.tables import Tables
from protocol.errors import RemoteProtocolError, RowcastError
from protocol.manifest import Manifest
from protocol.process import tell_peer
from protocol.tables import group_specs
from tests.driver import InProcessRun, Past, Settings, table_state
from tests.simulation.both import NOTICED_WITHIN, Both, Failed, Happened, Side, Stuck
from tests.simulation.faults import Event, Faults, draw_faults
from tests.simulation.link import Arrival, faulty_pair
from tests.simulation.promises import LifeFailed, check_run, check_state
from tests.simulation.scenario import Scenario, draw_scenario, reference
from tests.simulation.storage import Storage

Say = Callable[[str], None]
FIRST_INCARNATION = 100
MAX_SETTLING = 100_000  # advances of the writer
ROT_SHARE = 0.08  # of the deaths of a prefetcher
OTHER_SIDE: dict[Side, Side] = {"prefetcher": "trainer", "trainer": "prefetcher"}
GONE: dict[Event, tuple[Side, ...]] = {
    "kill trainer": ("trainer",),
    "kill prefetcher": ("prefetcher",),
    "kill both": ("prefetcher", "trainer"),
    "power loss": ("prefetcher", "trainer"),
    "link cut": (),
}


class PrefetcherDied(Exception):
    """It was killed, or a disk error ended it, while it cleared up."""


class Life:
    def __init__(self, seed: int, folder: Path, say: Say) -> None:
        self.chance = random.Random(seed)
        self.scenario: Scenario = draw_scenario(self.chance)
        self.say = say
        self.table_dir = folder / "tables"
        self.storage = Storage(folder / "run", say)
        self.job = self.scenario.job
        self.groups = group_specs(self.job)
        self.reference = reference(self.scenario.work)
        self.faults_left = self.scenario.num_faults
        self.incarnation = FIRST_INCARNATION
        self.tables: Tables | None = None  # of a prefetcher that lives
        self.newest: Manifest | None = None  # known to a prefetcher that lives
        self.ended = False
        self.happened: Counter[str] = Counter()
        self.earlier: tuple[list[Arrival], list[Arrival]] = ([], [])

    def live(self) -> None:
        self.say(str(self.scenario))
        while not self.ended:
            self._live_once()

    def _live_once(self) -> None:
        self.incarnation += 1
        faults = Faults()
        if self.faults_left:
            self.faults_left -= 1
            faults = draw_faults(self.chance)
        both = self._begin(faults)
        try:
            both.run_to_end()
        except Happened as happened:
            self._gone(both, happened.event, faults)
        except Failed as failed:
            self._failed(both, failed, faults)
        except Stuck:
            self._stuck(both, faults)
        else:
            self._in_order(both)
        self._count(both, faults)
        self.earlier = (both.links["prefetcher"].arrived, both.links["trainer"].arrived)

    def _count(self, both: Both, faults: Faults) -> None:
        """What has happened of what was planned."""
        self.happened["incarnation"] += 1
        if faults.happening is not None and faults.happening.at <= both.number:
            self.happened.update([faults.happening.event, "event"])
        for link, fault in zip(both.links.values(), faults.frames, strict=True):
            if fault is not None and len(link.arrived) > fault.at:
                self.happened.update([fault.kind, "frame"])
        self.happened["disk"] += self.storage.disk.failed is not None

    # beginning

    def _begin(self, faults: Faults) -> Both:
        self.storage.disk.plan(faults.disk)
        if self.tables is None:
            self.newest = self.storage.find_newest()
            self.tables = self._new_tables()
        self.tables.restore(self.newest)
        self.say(f"incarnation {self.incarnation} from step {0 if self.newest is None else self.newest.position.step}; planned: {faults}")
        links = faulty_pair(faults.frames, self.earlier, self.say)
        scenario = self.scenario
        settings = Settings(
            slots=scenario.slots,
            ring_bytes=scenario.ring_bytes,
            seed=self.chance.randrange(2**32),
            late_store=scenario.late_store,
            seeded_streams=scenario.seeded_streams,
            incarnation=self.incarnation,
            mirrored=scenario.mirrored,
            links=lambda: links,
        )
        past = Past(checkpoints=self.storage.checkpoints, newest=self.newest, stores=self.tables.stores)
        run = InProcessRun(self.job, self.reference.batches, settings, past)
        return Both(run, links, self.chance, faults.happening)

    def _new_tables(self) -> Tables:
        """Only this job names the scratch folder: what a seed does must not depend on where it runs."""
        path = str(self.table_dir) if self.scenario.store == "mapped" else None
        job = msgspec.structs.replace(self.job, store=msgspec.structs.replace(self.job.store, kind=self.scenario.store, path=path))
        return Tables(job, self.groups, self.storage.checkpoints, self.incarnation)

    # ends

    def _gone(self, both: Both, event: Event, faults: Faults) -> None:
        gone = GONE[event]
        self.say(f"{event} at advance {both.number}")
        if len(gone) == 2:
            self._prefetcher_dies(both)
            if event == "power loss":
                self.storage.disk.lose_power(self.chance)
            return
        if "prefetcher" in gone:
            self._linger(both, "trainer")
            self._prefetcher_dies(both)
            return
        try:
            if event == "kill trainer":
                self._linger(both, "prefetcher")
        except Failed as failed:
            self._check(both, failed)
            self._settle_and_end(both, faults)
            return
        if both.run.prefetcher.finished:
            self._in_order(both)
        else:
            self._peer_lost(both, faults)

    def _linger(self, both: Both, side: Side) -> None:
        """A process goes on until it notices that its peer is gone."""
        with suppress(Stuck):
            both.advance_alone(side, self.chance.randrange(NOTICED_WITHIN))

    def _failed(self, both: Both, failed: Failed, faults: Faults) -> None:
        """One side has raised: it tells the other, and both end."""
        self.say(f"at advance {both.number} {failed}")
        self._check(both, failed)
        tell_peer(both.conversations[failed.side], failed.error)
        other = OTHER_SIDE[failed.side]
        try:
            both.advance_alone(other, 20 * NOTICED_WITHIN)
        except Stuck:
            self.say(f"the {other} did not hear of it, and loses its peer")
        except Failed as heard:
            self.say(str(heard))
            if str(heard.error) != str(failed.error) or type(heard.error) is not RowcastError:
                self._check(both, heard)
        self._settle_and_end(both, faults)

    def _check(self, both: Both, failed: Failed) -> None:
        """Raises where nothing that was planned allows this error."""
        error = failed.error
        refused = type(error) is RemoteProtocolError and both.links[failed.side].must_refuse
        disk_failed = failed.side == "prefetcher" and self.storage.failed_with(error)
        if not refused and not disk_failed:
            raise LifeFailed(f"nothing that happened allows this: {failed}") from error

    def _stuck(self, both: Both, faults: Faults) -> None:
        """Both wait for a frame that never comes, until `transport.stall_timeout`."""
        if not any(link.lost_a_frame or link.is_cut for link in both.links.values()):
            run = both.run
            raise LifeFailed(
                f"stuck at advance {both.number}: the prefetcher waits for {run.prefetcher.waiting_for}, "
                f"the trainer for {run.trainer.loop.waiting_for}"
            )
        self.happened["stuck"] += 1
        self.say(f"both wait, at advance {both.number}")
        self._peer_lost(both, faults)

    def _peer_lost(self, both: Both, faults: Faults) -> None:
        try:
            self.newest = self._settle(both, faults.settle_limit)
        except PrefetcherDied:
            self._prefetcher_dies(both)
            return
        self.storage.is_durable(both.writer.newest)
        if not self.scenario.peers_wait:
            self._prefetcher_dies(both)

    def _settle_and_end(self, both: Both, faults: Faults) -> None:
        with suppress(PrefetcherDied):
            self._settle(both, faults.settle_limit)
        self._prefetcher_dies(both)

    def _settle(self, both: Both, limit: int | None) -> Manifest | None:
        """A checkpoint that was handed over whole becomes durable; another is given up."""
        both.writer.abandon()
        for number in range(MAX_SETTLING):
            if not both.writer.busy:
                return both.writer.newest
            if limit is not None and number >= limit:
                self.say(f"the prefetcher is killed after {number} advances of the writer")
                raise PrefetcherDied
            try:
                both.writer.advance()
            except RowcastError as error:
                self.say(f"while a checkpoint was completed: {error}")
                if not self.storage.failed_with(error):
                    raise LifeFailed(f"nothing that happened allows this: {error}") from error
                raise PrefetcherDied from None
        raise LifeFailed(f"the writer is busy after {MAX_SETTLING} advances")

    def _prefetcher_dies(self, both: Both) -> None:
        """Its memory is gone. A mapped table file stays, and says that it was not closed."""
        assert self.tables is not None
        self.storage.is_durable(both.writer.newest)
        self.tables.close()
        self.tables = self.newest = None
        if self.chance.random() < ROT_SHARE:
            self.happened["rot"] += self.storage.rot(self.chance)

    # the end of a run

    def _in_order(self, both: Both) -> None:
        run, tables = both.run, self.tables
        assert tables is not None
        self._check_nothing_unnoticed(both)
        run.prefetcher.planner.check_integrity()
        finished = run.prefetcher.fetcher.finished
        self.say(f"{'finished' if finished else 'stopped in order'} at advance {both.number}")
        self.newest = both.writer.newest
        if finished:
            check_run(run, self.reference)
        tables.close(at=self.newest)
        self.storage.is_durable(both.writer.newest)
        self.tables = None
        if finished:
            self._check_checkpoint()
            self.ended = True

    def _check_nothing_unnoticed(self, both: Both) -> None:
        for side, link in both.links.items():
            if link.must_refuse:
                raise LifeFailed(f"the {side} has accepted a broken frame")
        if self.storage.disk.failed is not None:
            raise LifeFailed(f"the disk failed at {self.storage.disk.failed}, and nobody has said so")

    def _check_checkpoint(self) -> None:
        """The last checkpoint on the disk holds the same rows, in a store that was opened anew."""
        newest = self.storage.find_newest()
        if newest is None or not newest.finished:
            raise LifeFailed(f"the run ended, but its newest checkpoint is {newest}")
        tables = self._new_tables()
        tables.restore(newest)
        for group, store in zip(self.groups, tables.stores, strict=True):
            check_state(table_state(group, store, self.job.job.seed), self.reference, "of the last checkpoint")
        tables.close()


def run_life(seed: int, say: Say = lambda text: None) -> Life:
    """Raises LifeFailed, which says how to see it again."""
    said: list[str] = []

    def keep(text: str) -> None:
        said.append(text)
        say(text)

    with tempfile.TemporaryDirectory() as folder, structlog.testing.capture_logs():
        try:
            life = Life(seed, Path(folder), keep)
            life.live()
        except Exception as error:
            history = "\n    ".join(said)
            raise LifeFailed(
                f"seed {seed}: {type(error).__name__}: {error}\n    {history}\nreplay: python -m tests.simulation.replay {seed}"
            ) from error
    return life


__all__ = ["Life", "LifeFailed", "run_life"]
