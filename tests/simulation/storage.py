"""The run directory over a whole life, and its checkpoints' promise: whole, never older than one that was durable."""

import random
from collections.abc import Callable
from pathlib import Path

from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError, RowcastError
from tests.checkpoints.fake_run import damages
from tests.simulation.disk import SimulatedDisk
from tests.simulation.scenario import LifeFailed

DISK_SENTENCE = "the checkpoint could not be written"


class Storage:
    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        run_dir.mkdir()
        self.disk = SimulatedDisk(run_dir)
        self.checkpoints = Checkpoints(run_dir, self.disk)  # the living prefetcher's
        self._run_dir = run_dir
        self._say = say
        self._durable_step = 0  # the newest checkpoint's that was known to be whole
        self._rotten = False  # a file was damaged where it lay
        self._fresh = False  # a run has begun that takes the earlier one's place with its first checkpoint

    def is_durable(self, newest: Manifest | None) -> None:
        """No crash may lose this checkpoint from now on."""
        if self._fresh and newest is not None:
            self._fresh, self._durable_step = False, 0
        self._durable_step = max(self._durable_step, step_of(newest))

    def failed_with(self, error: Exception) -> bool:
        """Whether this is how a prefetcher must end at what the disk did."""
        return type(error) is RowcastError and self.disk.failed is not None and DISK_SENTENCE in str(error)

    def find_newest(self) -> Manifest | None:
        """As a prefetcher does that begins; where no checkpoint is whole, a person then says --fresh."""
        self.checkpoints = Checkpoints(self._run_dir, self.disk)
        carry_out(self.checkpoints.settle())
        try:
            with damages() as damaged:
                newest = self.checkpoints.newest_valid()
        except DataError as error:
            if not self._rotten:
                raise LifeFailed(f"no checkpoint is whole, but none was damaged: {error}") from error
            self._say("no checkpoint is whole")
            self.begin_fresh()
            return None
        if damaged and not self._rotten:
            raise LifeFailed(f"a crash left a damaged checkpoint: {damaged}")
        if step_of(newest) < self._durable_step and not (self._fresh and newest is not None):
            raise LifeFailed(
                f"the newest checkpoint is that of step {step_of(newest)}, but that of {self._durable_step} was durable"
            )
        self._fresh, self._durable_step = False, step_of(newest)
        return newest

    def begin_fresh(self) -> None:
        """As `--fresh` does: what was durable stays so until the new run has a checkpoint."""
        self._say("a fresh run begins")
        carry_out(self.checkpoints.begin_fresh())
        self._fresh = True

    def rot(self, chance: random.Random) -> bool:
        """Flips a bit of a file, once in a life: the newest checkpoint without that file is the one to go on from."""
        self.checkpoints = Checkpoints(self._run_dir, Disk())
        carry_out(self.checkpoints.settle())
        files = sorted(path for path in self._run_dir.rglob("*") if path.is_file() and path.stat().st_size)
        if self._rotten or not files:
            return False
        path = chance.choice(files)
        names = [name for name in self.checkpoints.candidates() if not self._names(name, path)]
        self._durable_step = self.checkpoints.load(names[0]).position.step if names else 0
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        self.disk.assume_durable()
        self._rotten = True
        self._say(f"a bit of {path.relative_to(self._run_dir)} flips; whole: {names}")
        found = self.find_newest()
        if [found.name] != names[:1] if found is not None else names:
            raise LifeFailed(f"{found and found.name} is taken for the newest whole checkpoint, not {names[:1]}")
        return True

    def _names(self, checkpoint: str, path: Path) -> bool:
        """Whether the file is part of a checkpoint."""
        own = {f"{checkpoint}/manifest.json", *(file.file for file in self.checkpoints.load(checkpoint).files)}
        return str(path.relative_to(self.checkpoints.root)) in own


def step_of(manifest: Manifest | None) -> int:
    return 0 if manifest is None else manifest.position.step
