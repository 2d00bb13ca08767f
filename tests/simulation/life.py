"""One life of a run: incarnation after incarnation, each with something that goes wrong, until one reaches the end.

              +---------------------------- the same processes again, or new ones ----------------------------+
              v                                                                                               |
    newest checkpoint -> restore -> both sides advance -> end: bits equal the plain loop's                    |
                                          |                                                                   |
                                          +-> killed, refused, stuck, disk failed: rightly so? -> clear up ---+

Where a process has ended, a person starts it again.
"""

import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from unittest.mock import patch

import msgspec
import redis
import structlog.testing
from structlog.typing import EventDict

from rowcast.job.section import decode
from rowcast.job.stores import Store
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.checkpoints import writer
from rowcast.prefetcher.run.starting_point import Tables
from rowcast.prefetcher.stores import memory_store, tiered_store, touched_rows
from rowcast.prefetcher.stores.cold import redis_rows
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.errors import RowcastError, StoreLost
from tests.simulation.both import Both, Ending, Outcome
from tests.simulation.faults import Faults, draw_faults
from tests.simulation.link import Arrival, faulty_pair
from tests.simulation.scenario import LifeFailed, Scenario, check_run, check_state, draw_scenario, reference
from tests.simulation.server import SimulatedServer
from tests.simulation.storage import Storage
from tests.support.cold_dict import ColdDict
from tests.support.driver import InProcessRun, Past, Settings, plain_store, table_state
from tests.support.planner_integrity import check_planner
from tests.support.tiers import check_tier, tiered

Say = Callable[[str], None]
FIRST_INCARNATION = 100
ROT_SHARE = 0.08  # share of a prefetcher's deaths after which a file has rotted
FRESH_SHARE = 0.3  # share of the starts with --fresh, where it could go on


class Life:
    def __init__(self, seed: int, folder: Path, say: Say, logs: list[EventDict]) -> None:
        self.chance = random.Random(seed)
        self.scenario: Scenario = draw_scenario(self.chance)
        self.say, self.logs = say, logs  # `logs`: warnings and more of this incarnation
        self.table_dir = folder / "tables"
        self.storage = Storage(folder / "run", say)
        self.server = SimulatedServer(random.Random(seed))
        self.job = self.scenario.job
        self.groups = group_specs(self.job)
        self.reference = reference(self.scenario.work)
        self.faults_left = self.scenario.num_faults
        self.incarnation = FIRST_INCARNATION
        self.tables: Tables | None = None  # the living prefetcher's
        self.newest: Manifest | None = None  # known to a prefetcher that lives
        self.ended = False
        self.happened: Counter[str] = Counter()
        self.earlier: tuple[list[Arrival], list[Arrival]] = ([], [])

    def live(self) -> None:
        self.say(str(self.scenario))
        try:
            while not self.ended:
                self._live_once()
        finally:
            if self.tables is not None:
                self.tables.close()

    def _live_once(self) -> None:
        self.incarnation += 1
        faults = Faults()
        if self.faults_left:
            self.faults_left -= 1
            faults = draw_faults(self.chance, has_server=self.scenario.store == "redis")
        both = self._begin(faults)
        if both is None:
            return
        ending = Ending(both, self.storage, self.server, self.chance, self.say, faults.settle_limit)
        self._follow(ending.live_to_the_end(), both)
        self.happened += ending.happened
        self._count(both, faults)
        self.earlier = (both.links["prefetcher"].arrived, both.links["trainer"].arrived)

    def _follow(self, outcome: Outcome, both: Both) -> None:
        # one that was found may have been renamed and not synced when its writer was killed
        if both.writer.newest is not self.newest:
            self.storage.is_durable(both.writer.newest)
        if outcome == "in order":
            self._in_order(both)
        elif outcome == "waits for a trainer" and self.scenario.peers_wait:
            self.newest = both.writer.newest
            assert self.tables is not None, "a prefetcher that lives on has tables"
            self.tables.attempt_ended(self.newest, gave_up=both.writer.gave_up)
        else:
            if outcome == "dead without power":
                self.storage.disk.lose_power(self.chance)
            self._prefetcher_dies()

    def _count(self, both: Both, faults: Faults) -> None:
        """What has happened of what was planned."""
        self.happened["incarnation"] += 1
        if faults.happening is not None and faults.happening.at <= both.number:
            self.happened.update([faults.happening.event, "event"])
        for link, fault in zip(both.links.values(), faults.frames, strict=True):
            if fault is not None and len(link.arrived) > fault.at:
                self.happened.update([fault.kind, "frame"])
        for store in both.run.plain_stores:
            counts = store.counts()
            self.happened["loaded"] += counts is not None and counts.loaded > 0
            self.happened["spilled"] += counts is not None and counts.spilled > 0
        self.happened["disk"] += self.storage.disk.failed is not None
        self._count_server()

    def _count_server(self) -> None:
        if self.server.failed is not None:
            self.happened.update([self.server.failed, "server"])

    # beginning

    def _begin(self, faults: Faults) -> Both | None:
        """None if the server has failed while rows were restored."""
        if self.tables is None:
            self.storage.disk.plan(None)
            self.newest = self.storage.find_newest()
            if self.newest is not None and self.faults_left and self.chance.random() < FRESH_SHARE:
                self.happened["fresh"] += 1
                self.storage.begin_fresh()
                self.newest = None
            self.tables = self._new_tables()
        self.storage.disk.plan(faults.disk)
        self.logs.clear()
        self.server.plan(faults.server)
        start = 0 if self.newest is None else self.newest.position.step
        self.say(f"incarnation {self.incarnation} from step {start}; planned: {faults}")
        try:
            self._restore(self.tables, self.newest)
        except RowcastError as error:
            if not self.server.explains(error):
                raise
            self.say(f"while rows were restored: {error}")
            self._count_server()
            self._prefetcher_dies()
            return None
        links = faulty_pair(faults.frames, self.earlier, self.say)
        scenario = self.scenario
        settings = Settings(
            slots=scenario.slots,
            tier_slots=scenario.tier_slots,
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
        kind = self.scenario.store
        sections: dict[str, dict[str, str | None]] = {
            "segments": {"kind": "tiered", "path": str(self.table_dir), "memory": "1GiB"},
            "redis": {"kind": "redis", "memory": "1GiB", "url": "redis://server"},
        }
        self.server.repair()
        store = decode(Store, sections.get(kind, {}))
        own = msgspec.structs.replace(self.job.job, run_dir=str(self.table_dir))
        job = msgspec.structs.replace(self.job, store=store, job=own)
        return Tables(job, self.groups, self.storage.checkpoints)

    def _restore(self, tables: Tables, newest: Manifest | None) -> None:
        """Opens the stores if they are not open."""
        kind, at_once = self.scenario.store, self.scenario.tier_at_once
        with ExitStack() as stack:
            stack.enter_context(patch.object(touched_rows, "MOST_INDEXED", 0 if kind == "touched" else 2**24))
            stack.enter_context(patch.object(tiered_store, "AT_ONCE_BYTES", at_once))
            if kind == "tiered":
                stack.enter_context(patch.object(memory_store, "MemoryStore", self._new_tiered))
            stack.enter_context(patch.object(redis, "Redis", lambda **settings: self.server))
            tables.restore(newest)
        tier_slots = self.scenario.tier_slots
        if tier_slots is not None:
            for store in tables.stores:
                store.store = plain_store(store)  # without the delays of an earlier attempt
            tables.begin(tuple(n + self.scenario.tier_reserve for n in tier_slots))

    def _new_tiered(self, group: GroupSpec) -> TieredStore:
        return tiered(group, 0, ColdDict(seed=self.incarnation))

    # ending

    def _prefetcher_dies(self) -> None:
        """Its memory is gone."""
        assert self.tables is not None, "a prefetcher that dies has lived"
        with self.server.cut_off() if self.chance.random() < 0.5 else nullcontext():
            self.tables.close()
        self.tables = self.newest = None
        if self.chance.random() < ROT_SHARE:
            self.happened["rot"] += self.storage.rot(self.chance)

    def _in_order(self, both: Both) -> None:
        run, tables = both.run, self.tables
        assert tables is not None, "a prefetcher that ends has lived"
        self._check_nothing_unnoticed(both)
        check_planner(run.prefetcher.planner)
        for store in run.plain_stores:
            if isinstance(store, TieredStore):
                check_tier(store)
        finished = run.prefetcher.barrier.finished
        self.say(f"{'finished' if finished else 'stopped in order'} at advance {both.number}")
        self.newest = both.writer.newest
        if finished:
            self._check_run(run)
        tables.close()
        self.tables = None
        if finished:
            self._check_checkpoint()
            self.ended = True

    def _check_run(self, run: InProcessRun) -> None:
        try:
            check_run(run, self.reference)
        except StoreLost as error:  # by a row that the run did not need any more
            if not self.server.explains(error):
                raise
            self.say(f"after the run: {error}")

    def _check_nothing_unnoticed(self, both: Both) -> None:
        for side, link in both.links.items():
            if link.must_refuse:
                raise LifeFailed(f"the {side} has accepted a broken frame")
        has_said_so = any("could not be removed" in entry["event"] for entry in self.logs)
        if self.storage.disk.failed is not None and not has_said_so:
            raise LifeFailed(f"the disk failed at {self.storage.disk.failed}, and nobody has said so")

    def _check_checkpoint(self) -> None:
        """The last checkpoint on the disk holds the same rows, in a store that was opened anew."""
        newest = self.storage.find_newest()
        if newest is None or not newest.finished:
            raise LifeFailed(f"the run ended, but its newest checkpoint is {newest}")
        with closing(self._new_tables()) as tables:
            self._restore(tables, newest)
            for group, store in zip(self.groups, tables.stores, strict=True):
                check_state(table_state(group, store, self.job.job.seed), self.reference, "of the last checkpoint")
        self.server.check_keys()


def run_life(seed: int, say: Say = lambda text: None) -> Life:
    """Raises LifeFailed, which says how to see it again."""
    said: list[str] = []

    def keep(text: str) -> None:
        said.append(text)
        say(text)

    with tempfile.TemporaryDirectory() as folder, structlog.testing.capture_logs() as logs:
        try:
            life = Life(seed, Path(folder), keep, logs)
            with ExitStack() as stack:
                own = life.scenario
                stack.enter_context(patch.object(writer, "BLOCK_BYTES", own.block_bytes))
                stack.enter_context(patch.object(redis_rows, "ROWS_AT_ONCE", own.rows_a_call))
                stack.enter_context(patch.object(redis_rows, "CHECK_S", 0.0 if own.asks_often else math.inf))
                life.live()
        except Exception as error:
            history = "\n    ".join(said)
            raise LifeFailed(
                f"seed {seed}: {type(error).__name__}: {error}\n    {history}\n"
                f"replay: python -m tests.simulation.replay {seed}"
            ) from error
    return life


__all__ = ["Life", "LifeFailed", "run_life"]
