"""What was turned away at the door: counted, all of it, and logged, but not as often as someone else pleases."""

import time
from collections.abc import Callable

from rowcast.runtime.telemetry.logs import get_logger

LOG_EVERY_S = 5.0


class Refusals:
    """Used by the link's thread; `count` may be read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0  # frames of strangers, and callers who never got in
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # what -> when it was logged last, and how many were not since

    def note(self, what: str, **context: object) -> None:
        self.count += 1
        self.say(what, **context)

    def say(self, what: str, **context: object) -> None:
        """`what` is one of a few sentences of ours. Logged once in `LOG_EVERY_S`, then with how many were not."""
        last_s, num_silent = self._logged.get(what, (None, 0))
        now_s = self._clock()
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._logged[what] = (last_s, num_silent + 1)
            return
        self._logged[what] = (now_s, 0)
        get_logger().warning(what, **context, more=num_silent)
