"""Ctrl-C in a training script: the first one stops the run in order, a second one is a KeyboardInterrupt."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
ASKED = (
    "rowcast: {} came: the run stops after the step in hand, with a checkpoint; a second one ends the script at once\n"
)


class StopSignals:
    """SIGINT and SIGTERM, where they arrive at Python's own handlers: a script's handlers stay as they are."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        """`stop` is called by the handler, between any two instructions of the main thread."""
        self._stop = stop
        self._taken: list[signal.Signals] = []
        self._asked = False

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # handlers are the main thread's
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, self._handle)
                self._taken.append(number)

    def close(self) -> None:
        """Gives the signals back. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        taken, self._taken = self._taken, []
        for number in taken:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, DEFAULTS[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self.close()
            raise KeyboardInterrupt
        self._asked = True
        name = signal.Signals(number).name
        os.write(2, ASKED.format(name).encode())  # sys.stderr may be in the middle of a line of its own
        self._stop(name)
