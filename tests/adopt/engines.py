"""Prefetchers of adopted scripts, forked from a process with everything imported, and what their scripts leave."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.process import Child
from rowcast.trainer.adopt import adopt
from tests.support.starter import Starter


class Engines:
    """What adopted scripts of a test have started."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.children: list[Child] = []

    def start(self, name: str, module: str, arguments: Sequence[str], log: Path) -> Child:
        process: Any = self._starter.launch(["-m", module, *arguments], log.with_suffix(".out"), log, dict(os.environ))
        self.children.append(Child(name, process, log))
        return self.children[-1]

    def remains(self) -> list[str]:
        pids = [str(child.process.pid) for child in self.children]
        shared = [path.name for path in Path("/dev/shm").glob("rowcast-*") if {*path.name.split("-")} & {*pids}]
        return [f"process {child.process.pid}" for child in self.children if child.code is None] + shared


def drop() -> None:
    """The process is gone, with its tables."""
    left = adopt._doors.pop()
    left.reading.close()
    left.engine.close()


def manifests(run: Path) -> list[Manifest]:
    """Newest first."""
    checkpoints = Checkpoints(run, Disk())
    return [checkpoints.load(name) for name in checkpoints.candidates()]
