"""Prefetchers of adopted scripts, forked from a process with everything imported."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowcast.runtime.children import Child
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
