"""A lock that any number of threads hold to read, or one thread to change what they read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    def __init__(self) -> None:
        self._free = threading.Condition()
        self._num_reading, self._num_changing = 0, 0  # the latter with those that wait for the readers

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._num_changing)
            self._num_reading += 1
        try:
            yield
        finally:
            with self._free:
                self._num_reading -= 1
                self._free.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Readers that come later wait, so that a stream of them cannot keep this thread waiting."""
        with self._free:
            self._num_changing += 1
            try:
                self._free.wait_for(lambda: not self._num_reading)
                yield  # holds the condition, so that nobody else reads or changes
            finally:
                self._num_changing -= 1
                self._free.notify_all()
