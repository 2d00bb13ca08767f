"""Counts refused frames and callers, and logs them at a limited rate, so that no caller can flood the log."""

import time
from collections.abc import Callable

from rowcast.runtime.telemetry.logs import get_logger

LOG_EVERY_S = 5.0


class Refusals:
    """Used by the link's thread; any thread may read `count`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0  # frames of strangers, and refused callers
        self._clock = clock
        # sentence -> time of its last log line, and number of lines suppressed since
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, what: str, **context: object) -> None:
        self.count += 1
        self.say(what, **context)

    def say(self, what: str, **context: object) -> None:
        """Logs `what`, a fixed sentence, at most once in `LOG_EVERY_S`, with the number suppressed since."""
        last_s, num_suppressed = self._logged.get(what, (None, 0))
        now_s = self._clock()
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._logged[what] = (last_s, num_suppressed + 1)
            return
        self._logged[what] = (now_s, 0)
        get_logger().warning(what, **context, more=num_suppressed)
