"""Arrays reach the parent where the child wrote them; segments are reused, and never while an array uses them."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.prefetcher.readers.shared_arrays import ArrayReceiver, ArraySender


class Ends:
    """Both ends in one process; the child's is a thread, which waits until its object is received."""

    def __init__(self) -> None:
        self.parents, self.childs = Pipe()
        self.sender, self.receiver = ArraySender(self.childs), ArrayReceiver(self.parents)

    def passed(self, content: object) -> Any:
        thread = threading.Thread(target=self.sender.send, args=(content,))
        thread.start()
        received = self.receiver.receive()
        thread.join()
        return received


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.parents.close()
    ends.childs.close()


def arrays(seed: int, size: int = 1000) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "step": seed,
        "ids": random.integers(0, 2**62, size),
        "dense": random.random((size, 3), np.float32),
        "odd": random.integers(0, 255, 7, np.uint8),
        "none": np.zeros(0, np.int64),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)


def test_objects_arrive_with_the_bits_that_were_sent(ends: Ends) -> None:
    for seed, size in enumerate([0, 1, 10, 100_000, 10]):
        assert_same(ends.passed(arrays(seed, size)), arrays(seed, size))
    assert ends.passed("no arrays") == "no arrays"


def test_arrays_may_be_written_and_begin_a_cache_line(ends: Ends) -> None:
    found = ends.passed(arrays(0))
    found["ids"] += 1
    assert np.array_equal(found["ids"], arrays(0)["ids"] + 1)
    assert found["dense"].ctypes.data % 64 == 0


def test_what_is_kept_is_never_overwritten(ends: Ends) -> None:
    kept = [ends.passed(arrays(seed)) for seed in range(20)]
    part = ends.passed(arrays(20))["ids"][500:510]
    for seed in range(30):
        ends.passed(arrays(100 + seed))
    for seed, found in enumerate(kept):
        assert_same(found, arrays(seed))
    assert np.array_equal(part, arrays(20)["ids"][500:510])


def test_memory_is_that_of_what_the_parent_keeps(ends: Ends) -> None:
    for seed in range(50):
        ends.passed(arrays(seed))
    assert len(ends.sender._segments) <= 2
    kept = [ends.passed(arrays(seed)) for seed in range(10)]
    assert 10 <= len(ends.sender._segments) <= 12
    del kept
    gc.collect()
    for seed in range(50):
        ends.passed(arrays(seed, 20_000))
    assert ends.sender._segments.keys() == ends.receiver._segments.keys()
    assert len(ends.sender._segments) <= 2


def test_the_child_waits_until_its_object_is_received(ends: Ends) -> None:
    sent = threading.Event()

    def send() -> None:
        ends.sender.send(arrays(0))
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not sent.wait(0.2)
    ends.receiver.receive()
    assert sent.wait(30)
    thread.join()


def test_a_sender_notices_that_the_other_end_is_closed(ends: Ends) -> None:
    ends.parents.close()
    with pytest.raises(BrokenPipeError):
        ends.sender.send(arrays(0))


def received_to_the_end(receiver: ArrayReceiver) -> None:
    while True:
        receiver.receive()


def test_what_was_received_outlives_a_killed_child_and_nothing_is_left() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    parents, childs = Pipe()
    child = os.fork()
    if child == 0:
        sender = ArraySender(childs)
        for seed in range(1000):
            sender.send(arrays(seed))
        os._exit(1)
    childs.close()
    receiver = ArrayReceiver(parents)
    kept = [receiver.receive() for _ in range(5)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises((EOFError, OSError)):
        received_to_the_end(receiver)
    for seed, found in enumerate(kept):
        assert_same(found, arrays(seed))
    assert {path.name for path in Path("/dev/shm").iterdir()} <= before
    parents.close()
