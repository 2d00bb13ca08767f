"""What one part of the check has found so far, in a file that is rewritten after each item.

    {"items": {name: {"passed": ..., "took_s": ..., ...}}, "left_out": {name: reason}, "not_here": {name: reason},
     "running": [names], "ended": ...}

An item without "passed" is a measurement. An item is left out for lack of time; it is not here if the machine lacks
what it needs. An error of an item fails that item alone. If the device refuses all work afterwards, as after an illegal
address, the part ends.
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_DEVICE = "needs a CUDA device"
LAST_LINES = 12  # of a traceback


class NotHere(Exception):
    """Raised by an item that is not possible on this machine; its text is the reason."""


class Findings:
    """Items may run in several threads."""

    def __init__(self, file: Path, ends_s: float, is_device_alive: Callable[[], bool] = lambda: True) -> None:
        """`ends_s`: by time.monotonic(), which all processes share. An item that would end later is left out."""
        self._file, self._is_device_alive = file, is_device_alive
        self._ends_s = ends_s
        self._longest_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._content: dict[str, Any] = nothing()
        self._write()

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    @property
    def items(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._content["items"]
        return found

    def item(self, name: str, work: Callable[[], dict[str, Any]], kind: str = "", guess_s: float = 1.0) -> None:
        """Runs `work` if there is time for the longest item of its kind so far; for the first, if there are `guess_s`.

        Raises its error if the device is gone with it.
        """
        if self.left_s < self._longest_s.get(kind, guess_s):
            self._note("left_out", name, "no time was left")
            return
        with self._lock:
            self._content["running"].append(name)
            self._write()
        began_s = time.monotonic()
        try:
            found = work()
        except NotHere as reason:
            self.not_here(name, str(reason))
            return
        except Exception as error:
            found = {"passed": False, "error": f"{type(error).__name__}: {error}", "traceback": last_lines(error)}
            if not self._is_device_alive():
                self._add(name, found, began_s, kind)
                raise
        self._add(name, found, began_s, kind)

    def not_here(self, name: str, reason: str) -> None:
        self._note("not_here", name, reason)

    def _note(self, what: str, name: str, reason: str) -> None:
        with self._lock:
            self._content[what][name] = reason
            self._content["running"] = [other for other in self._content["running"] if other != name]
            self._write()

    def end(self) -> None:
        with self._lock:
            self._content["ended"] = True
            self._write()

    def _add(self, name: str, found: dict[str, Any], began_s: float, kind: str) -> None:
        took_s = time.monotonic() - began_s
        with self._lock:
            self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), took_s)
            self._content["items"][name] = {**found, "took_s": round(took_s, 2)}
            self._content["running"].remove(name)
            self._write()

    def _write(self) -> None:
        write_json(self._file, self._content)


def nothing() -> dict[str, Any]:
    """What a part has found that has just begun."""
    return {"items": {}, "left_out": {}, "not_here": {}, "running": [], "ended": False}


def last_lines(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()[-LAST_LINES:]


def write_json(file: Path, content: Any) -> None:
    """Replaces the file at once: a reader never sees half of it."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, file)
