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
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import structlog.testing
import torch

from prefetcher.checkpoints.folder import Checkpoints
from prefetcher.tables import Tables
from protocol.errors import DataError, RemoteProtocolError, RowcastError
from protocol.manifest import Manifest
from protocol.process import tell_peer
from protocol.tables import group_specs
from tests.driver import InProcessRun, Past, Settings, table_state
from tests.simulation.both import NOTICED_WITHIN, Both, Failed, Happened, Side, Stuck
from tests.simulation.disk import SimulatedDisk
from tests.simulation.faults import Event, Faults, draw_faults
from tests.simulation.link import Arrival, FaultyLink, faulty_pair
from tests.simulation.scenario import Scenario, draw_scenario, reference

Say = Callable[[str], None]
FIRST_INCARNATION = 100
MAX_SETTLING = 100_000  # advances of the writer
DISK_SENTENCES = ("the checkpoint could not be written", "an old checkpoint could not be removed")
OTHER_SIDE: dict[Side, Side] = {"prefetcher": "trainer", "trainer": "prefetcher"}
GONE: dict[Event, tuple[Side, ...]] = {
    "kill trainer": ("trainer",),
    "kill prefetcher": ("prefetcher",),
    "kill both": ("prefetcher", "trainer"),
    "power loss": ("prefetcher", "trainer"),
    "link cut": (),
}


class LifeFailed(AssertionError):
    """What rowcast promises did not hold."""


class PrefetcherDied(Exception):
    """It was killed, or a disk error ended it, while it cleared up."""


class Damages:
    """A log that keeps what it is told of damaged checkpoints."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def warning(self, event: str, /, **fields: object) -> None:
        self.found.append(f"{event}: {fields}")


class Life:
    def __init__(self, seed: int, folder: Path, say: Say) -> None:
        self.chance = random.Random(seed)
        self.scenario: Scenario = draw_scenario(self.chance)
        self.say = say
        self.run_dir, self.table_dir = folder / "run", folder / "tables"
        self.run_dir.mkdir()
        self.disk = SimulatedDisk(self.run_dir)
        self.checkpoints = Checkpoints(self.run_dir, self.disk)
        self.job = self.scenario.job
        self.groups = group_specs(self.job)
        self.reference = reference(self.scenario.work)
        self.faults_left = self.scenario.num_faults
        self.incarnation = FIRST_INCARNATION
        self.tables: Tables | None = None  # of a prefetcher that lives
        self.newest: Manifest | None = None  # known to a prefetcher that lives
        self.durable_step = 0  # of the newest checkpoint that was known to be whole
        self.rotten = False  # a file was damaged where it lay
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
        self.happened["disk"] += self.disk.failed is not None

    # beginning

    def _begin(self, faults: Faults) -> Both:
        self.disk.plan(faults.disk)
        if self.tables is None:
            self.newest = self._find_newest()
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
        past = Past(checkpoints=self.checkpoints, newest=self.newest, stores=self.tables.stores)
        run = InProcessRun(self.job, self.reference.batches, settings, past)
        return Both(run, links, self.chance, faults.happening)

    def _new_tables(self) -> Tables:
        """Only this job names the scratch folder: what a seed does must not depend on where it runs."""
        path = str(self.table_dir) if self.scenario.store == "mapped" else None
        job = msgspec.structs.replace(self.job, store=msgspec.structs.replace(self.job.store, kind=self.scenario.store, path=path))
        return Tables(job, self.groups, self.checkpoints, self.incarnation)

    def _find_newest(self) -> Manifest | None:
        damages = Damages()
        try:
            newest = self.checkpoints.newest_valid(damages)
        except DataError as error:
            if not self.rotten:
                raise LifeFailed(f"no checkpoint is whole, but none was damaged: {error}") from error
            self.say("no checkpoint is whole: the run begins anew")
            shutil.rmtree(self.run_dir / "checkpoints")
            self.disk.assume_durable()
            self.durable_step = 0
            return None
        if damages.found and not self.rotten:
            raise LifeFailed(f"a crash left a damaged checkpoint: {damages.found}")
        step = 0 if newest is None else newest.position.step
        if step < self.durable_step:
            raise LifeFailed(f"the newest checkpoint is that of step {step}, but the one of step {self.durable_step} was durable")
        return newest

    # ends

    def _gone(self, both: Both, event: Event, faults: Faults) -> None:
        gone = GONE[event]
        self.say(f"{event} at advance {both.number}")
        if len(gone) == 2:
            self._prefetcher_dies(both)
            if event == "power loss":
                self.disk.lose_power(self.chance)
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
        disk_failed = failed.side == "prefetcher" and self._is_of_disk(error)
        if not refused and not disk_failed:
            raise LifeFailed(f"nothing that happened allows this: {failed}") from error

    def _is_of_disk(self, error: Exception) -> bool:
        return type(error) is RowcastError and self.disk.failed is not None and any(part in str(error) for part in DISK_SENTENCES)

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
        self.durable_step = self._durable(both)
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
                if not self._is_of_disk(error):
                    raise LifeFailed(f"nothing that happened allows this: {error}") from error
                raise PrefetcherDied from None
        raise LifeFailed(f"the writer is busy after {MAX_SETTLING} advances")

    def _prefetcher_dies(self, both: Both) -> None:
        """Its memory is gone. A mapped table file stays, and says that it was not closed."""
        assert self.tables is not None
        self.durable_step = self._durable(both)
        self.tables.close()
        self.tables = self.newest = None
        if self.chance.random() < 0.08 and not self.rotten:
            self._rot()

    def _durable(self, both: Both) -> int:
        newest = both.writer.newest
        return max(self.durable_step, 0 if newest is None else newest.position.step)

    def _rot(self) -> None:
        """A bit of some file flips where it lies; the newest checkpoint without that file is the one to go on from."""
        files = sorted(path for path in self.run_dir.rglob("*") if path.is_file())
        if not files:
            return
        path = self.chance.choice(files)
        names = [name for name in self.checkpoints.candidates() if not self._names(name, path)]
        content = bytearray(path.read_bytes())
        if not content:
            return
        content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(content)
        self.disk.assume_durable()
        self.rotten = True
        self.happened["rot"] += 1
        self.say(f"a bit of {path.relative_to(self.run_dir)} flips; whole: {names}")
        self.durable_step = self.checkpoints.load(names[0]).position.step if names else 0
        found = self._find_newest()
        if (found.name if found is not None else None) != (names[0] if names else None):
            raise LifeFailed(f"{found and found.name} is taken for the newest whole checkpoint, not {names[:1]}")

    def _names(self, checkpoint: str, path: Path) -> bool:
        manifest = self.checkpoints.load(checkpoint)
        own = {f"{checkpoint}/manifest.json", *(file.file for file in manifest.files)}
        return str(path.relative_to(self.checkpoints.root)) in own

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
            self._check_bits(run)
        tables.close(at=self.newest)
        self.durable_step = self._durable(both)
        self.tables = None
        if finished:
            self._check_checkpoint()
            self.ended = True

    def _check_nothing_unnoticed(self, both: Both) -> None:
        for side, link in both.links.items():
            if link.must_refuse:
                raise LifeFailed(f"the {side} has accepted a broken frame")
        if self.disk.failed is not None:
            raise LifeFailed(f"the disk failed at {self.disk.failed}, and nobody has said so")

    def _check_bits(self, run: InProcessRun) -> None:
        wanted = self.reference
        if np.array(run.results.losses, np.float32).tobytes() != wanted.losses:
            raise LifeFailed("losses differ from the plain loop's")
        if run.results.evaluations != wanted.evaluations:
            raise LifeFailed(f"evaluations {run.results.evaluations} differ from {wanted.evaluations}")
        self._check_state(run.state(), "after the run")

    def _check_checkpoint(self) -> None:
        """The last checkpoint on the disk holds the same rows, in a store that was opened anew."""
        newest = self._find_newest()
        if newest is None or not newest.finished:
            raise LifeFailed(f"the run ended, but its newest checkpoint is {newest}")
        tables = self._new_tables()
        tables.restore(newest)
        for group, store in zip(self.groups, tables.stores, strict=True):
            self._check_state(table_state(group, store, self.job.job.seed), "of the last checkpoint")
        tables.close()

    def _check_state(self, state: dict[str, torch.Tensor], where: str) -> None:
        for name, tensor in state.items():
            if not torch.equal(tensor.view(torch.int32), self.reference.state[name].contiguous().view(torch.int32)):
                raise LifeFailed(f"{name} {where} differs from the plain loop's")


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


__all__ = ["FaultyLink", "Life", "LifeFailed", "run_life"]
