"""A bell wakes the thread that waits on it and forgets no ring; a thread polls only while its stage needs that."""

import threading
from collections.abc import Callable

import pytest

from rowcast.runtime.stages import (
    IDLE_WAIT_S,
    MOST_POLL_S,
    POLL_S,
    Crew,
    Doorbell,
    Period,
    Stage,
    StageThread,
    only_bells,
)

LONG_S = 60.0  # longer than a test takes


class Bell(Doorbell):
    """Notes how long it was to be waited on, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts_s: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.timeouts_s.append(timeout_s)
        return super().wait(0)


def test_a_ring_before_the_wait_ends_it_at_once_and_only_once_and_not_if_it_was_hushed() -> None:
    bell = Doorbell()
    for _ in range(3):
        bell.ring()
    assert bell.wait(LONG_S)
    assert not bell.wait(0)
    bell.ring()
    assert bell.hush()
    assert not bell.hush()
    assert not bell.wait(0)
    bell.ring()
    assert bell.wait(LONG_S)


def test_many_threads_that_ring_at_once_wake_the_one_that_waits() -> None:
    bell, all_here = Doorbell(), threading.Barrier(4)

    def ring_often() -> None:
        all_here.wait()
        for _ in range(2000):
            bell.ring()

    threads = [threading.Thread(target=ring_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    all_here.wait()
    assert bell.wait(LONG_S)
    for thread in threads:
        thread.join()
    bell.hush()
    assert not bell.hush()


def timeouts_of(look_s: Callable[[], float]) -> set[float]:
    """The time-outs with which the thread of an idle stage waits."""
    bell, idled, errors = Bell(), threading.Event(), list[BaseException]()
    thread = StageThread("idle", lambda: False, bell, errors.append, lambda seconds: idled.set(), look_s=look_s)
    thread.start()
    assert idled.wait(LONG_S)
    thread.stop()
    assert errors == []
    return set(bell.timeouts_s)


def test_a_stage_that_waits_for_a_device_is_asked_again_soon() -> None:
    assert timeouts_of(only_bells) == {IDLE_WAIT_S}
    assert timeouts_of(look_s=lambda: POLL_S) == {POLL_S}


@pytest.mark.parametrize(
    ("step_s", "look_s"), [(0.0, POLL_S), (0.001, POLL_S), (0.008, 0.0008), (0.04, 0.004), (20.0, MOST_POLL_S)]
)
def test_a_look_comes_after_a_tenth_of_a_step_within_limits(step_s: float, look_s: float) -> None:
    period = Period()
    assert period.look_s == POLL_S
    for step in range(3):
        period.ended(100 + step * step_s)
    assert period.look_s == pytest.approx(look_s)


def test_only_the_threads_that_a_cause_names_are_woken() -> None:
    turns = {name: threading.Semaphore(0) for name in ("first", "second", "third")}

    def idle(name: str) -> Stage:
        def advance() -> bool:
            turns[name].release()
            return False

        return advance

    main = Doorbell()
    crew = Crew("trainer", main, owns_process=False)
    crew.start({name: idle(name) for name in turns}, {}, {"news": ("second", "absent"), int: ("main",)})
    try:
        for name in turns:
            assert turns[name].acquire(timeout=LONG_S)  # a thread begins with a look
        crew.wake_after(int)
        assert main.hush()
        crew.wake_after("news")
        crew.wake_after("nothing of interest")
        assert turns["second"].acquire(timeout=LONG_S)
        assert not main.hush()
        crew.wake("mail")  # has no thread yet: the main thread does its work
        assert main.hush()
    finally:
        crew.stop()
