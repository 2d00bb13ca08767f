"""Handles Ctrl-C in a training script: the first stops the run in order, a later one raises KeyboardInterrupt."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rowcast.runtime.process import TOGETHER_S
from rowcast.runtime.telemetry.format_numbers import LOST

DEFAULTS: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
DEFAULTS[signal.SIGINT] = signal.default_int_handler
STOPPING = (
    "rowcast: {} came: the run stops after the current step, with a checkpoint; a second one ends the script at once\n"
)


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP if Python's default handlers are installed; a script's own handlers stay."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        """The handler calls `stop`, between any two instructions of the main thread."""
        self._stop = stop
        self._handled: list[signal.Signals] = []
        self._stopped_s: float | None = None

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, self._handle)
                self._handled.append(number)

    def close(self) -> None:
        """Restores the default handlers, once later signals no longer count as part of the first. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._handled and self._stopped_s is not None:
            time.sleep(max(0.0, self._stopped_s + TOGETHER_S - time.monotonic()))
        handled, self._handled = self._handled, []
        for number in handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, DEFAULTS[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped_s is not None:
            if time.monotonic() < self._stopped_s + TOGETHER_S:
                return
            self.close()
            raise KeyboardInterrupt
        self._stopped_s = time.monotonic()
        name = signal.Signals(number).name
        try:
            os.write(2, STOPPING.format(name).encode())  # sys.stderr may be in the middle of writing a line
        except OSError:
            LOST.lines += 1
        self._stop(name)
