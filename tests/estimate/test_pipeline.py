"""The schedule of tasks against small cases by hand and a search over all moments; the pipeline's wiring, where made-up
durations give each bottleneck's pace and name.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rowcast.analysis.estimate.estimate import Walked, described, walk
from rowcast.analysis.estimate.pipeline import (
    BUSY,
    PlannedStep,
    Ring,
    Task,
    Thread,
    Wiring,
    critical_path,
    room,
    run,
    waits,
)
from rowcast.protocol.transport.ring import RingWriter, piece_bytes
from rowcast.trainer.device.streams import PlainStreams
from rowcast.trainer.step.memory import Staging, StagingSpan
from tests.support.made_up_pipeline import MIB, SECONDS, WIRING, plan
from tests.support.repeats import count
from tests.support.seeded_streams import SeededEvent

SEEDS = range(count(15, 60))


def test_a_task_waits_for_its_thread_and_for_the_tasks_before_it() -> None:
    planning, fetcher = Thread("planning"), Thread("fetcher")
    plans = [planning.add("plan", step, 2.0) for step in range(3)]
    fetches = [fetcher.add("fetch", step, 3.0, [(plans[step], "plans")]) for step in range(3)]
    assert run([planning, fetcher]) == 11.0
    assert [task.began_s for task in fetches] == [2.0, 5.0, 8.0]
    assert [task.cause for task in fetches] == [(plans[0], "plans"), (fetches[0], BUSY), (fetches[1], BUSY)]
    assert [task.name for task, _ in critical_path(fetches[-1])] == ["plan", "fetch", "fetch", "fetch"]


def test_of_several_lanes_the_first_that_may_go_on_does() -> None:
    main, other = Thread("main", lanes=2), Thread("other")
    arrived = [other.add("arrive", step, 1.0) for step in range(3)]
    moved = [main.add("move", step, 0.5, [(arrived[step], "rows")]) for step in range(3)]
    done = [main.add("step", step, 2.0, [(moved[step], "rows")], lane=1) for step in range(3)]
    run([main, other])
    assert [task.began_s for task in moved] == [1.0, 3.5, 4.0]  # both moves come before step 1
    assert [task.began_s for task in done] == [1.5, 4.5, 6.5]


def test_threads_share_cores_evenly() -> None:
    one, two = Thread("one"), Thread("two")
    first, second = one.add("a", 0, 2.0), two.add("b", 0, 1.0)
    assert run([one, two], cores=1) == 3.0
    assert (second.ended_s, first.ended_s) == (2.0, 3.0)


def test_tasks_that_wait_for_each_other_are_named() -> None:
    thread = Thread("planning", lanes=2)
    read = thread.add("read", 0, 1.0, [(Task("plan", 1, 1.0, thread), "ahead")])
    thread.add("plan", 1, 1.0, [(read, "batches")], lane=1)
    with pytest.raises(AssertionError, match="read 0, plan 1"):
        run([thread])


def test_a_task_waits_for_room_in_a_ring_and_names_what_made_it() -> None:
    fetcher, trainer, ring = Thread("fetcher"), Thread("trainer"), Ring(100)
    fetches = []
    for step in range(4):
        fetches.append(fetcher.add("fetch", step, 1.0, takes=(ring, 40)))
        copied = trainer.add("copy in", step, 5.0, [(fetches[-1], "rows")], gives=ring)
    run([fetcher, trainer])
    assert [task.began_s for task in fetches] == [0.0, 1.0, 6.0, 11.0]  # two pieces fit
    assert [task.cause[1] for task in fetches[1:] if task.cause] == [BUSY, "ring", "ring"]
    assert copied.ended_s == 21.0


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_has_room_when_the_real_one_has(seed: int) -> None:
    """Pieces leave at random times, so that the ring is empty now and then and starts over."""
    chance, capacity = random.Random(seed), 64 * 128
    writer, ring = RingWriter(np.zeros(capacity, np.uint8)), Ring(capacity)
    ends: deque[int] = deque()
    outcomes = set()
    for _ in range(400):
        while ends and chance.random() < 0.4:
            writer.release(ends.popleft())
            ring.give_back()
        nbytes = 64 * chance.randint(1, 50)
        piece = writer.try_allocate(nbytes)
        assert ring.take(piece_bytes(nbytes)) == (piece is not None)
        outcomes.add((piece is not None, bool(ends)))
        if piece is not None:
            writer.commit(piece, 0, checksum=False)
            ends.append(piece.end)
    assert outcomes == {(True, True), (True, False), (False, True)}


class Random:
    """A random pipeline: a few threads with lanes, and tasks that wait for earlier ones."""

    def __init__(self, seed: int, longer: tuple[int, float] | None = None, most_lanes: int = 3) -> None:
        """`longer`: the number of a task, and seconds that it takes more."""
        chance = random.Random(seed)
        self.threads = [Thread(f"thread {n}", chance.randint(1, most_lanes)) for n in range(chance.randint(1, 4))]
        lanes = [(thread, lane) for thread in self.threads for lane in range(len(thread.lanes))]
        self.tasks: list[Task] = []
        self.waits: list[list[Task]] = []
        self.lane_of: list[tuple[Thread, int]] = []
        for number in range(40):
            before = chance.sample(self.tasks, min(len(self.tasks), chance.randint(0, 3)))
            (thread, lane), seconds = chance.choice(lanes), chance.choice([0.0, 0.5, 1.0, 1.0, 2.5])
            seconds += longer[1] if longer is not None and longer[0] == number else 0.0
            after = [(task, "why") for task in before]
            self.tasks.append(thread.add("task", number, seconds, after, lane=lane))
            self.waits.append(before)
            self.lane_of.append((thread, lane))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_begins_too_early_and_nothing_without_a_cause(seed: int) -> None:
    made = Random(seed)
    last_s = run(made.threads)
    assert last_s == max(task.ended_s for task in made.tasks)
    for task, before, lane in zip(made.tasks, made.waits, made.lane_of, strict=True):
        same = [o for o, own in zip(made.tasks, made.lane_of, strict=True) if own == lane and o.step < task.step]  # type: ignore[operator]
        assert all(other.ended_s <= task.began_s for other in [*before, *same])
        assert task.ended_s == task.began_s + task.seconds
        if task.began_s > 0:
            assert task.cause is not None
            assert task.cause[0].ended_s == task.began_s
    for thread in made.threads:
        own = sorted(
            (task for task in made.tasks if task.thread is thread), key=lambda task: (task.began_s, task.ended_s)
        )
        assert all(a.ended_s <= b.began_s for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critical_path_has_no_gap_and_lasts_as_long_as_the_run(seed: int) -> None:
    made = Random(seed)
    total_s = run(made.threads)
    path = critical_path(max(made.tasks, key=lambda task: task.ended_s))
    assert math.isclose(sum(task.seconds for task, _ in path), total_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_works_or_waits_until_its_last_task_ends(seed: int) -> None:
    made = Random(seed)
    run(made.threads)
    for thread in made.threads:
        waited_s = sum(ended_s - began_s for _, began_s, ended_s in waits(thread))
        last_s = thread.done[-1].ended_s if thread.done else 0.0
        assert math.isclose(waited_s + sum(task.seconds for task in thread.done), last_s, abs_tol=1e-9)
        assert all(reason == "why" for reason, _, _ in waits(thread))


@pytest.mark.parametrize("seed", SEEDS)
def test_where_no_thread_has_a_choice_longer_work_never_ends_earlier(seed: int) -> None:
    made, chance = Random(seed, most_lanes=1), random.Random(seed)
    total_s = run(made.threads)
    longer = Random(seed, longer=(chance.randrange(40), 0.75), most_lanes=1)
    assert total_s <= run(longer.threads) <= total_s + 0.75


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_cores_make_no_work_and_lose_none(seed: int, cores: int) -> None:
    made = Random(seed)
    total_s = run(made.threads, cores)
    work_s = sum(task.seconds for task in made.tasks)
    assert total_s >= work_s / cores - 1e-9
    for task in made.tasks:
        assert task.ended_s - task.began_s >= task.seconds - 1e-9


MOVES = SECONDS["copy in"] + SECONDS["fill"]  # on the main thread, beside the step


def near(seconds: float, rel: float = 1e-6) -> Any:
    return pytest.approx(seconds, rel=rel)


def paced(plan: list[PlannedStep], durations: Mapping[str, float] = {}, wiring: Wiring = WIRING) -> tuple[float, str]:
    """Seconds a step, and the task that most of the critical path is of."""
    found = walked(plan, durations, wiring)
    return found.step_s, found.bound_by[0][0]


def walked(plan: list[PlannedStep], durations: Mapping[str, float] = {}, wiring: Wiring = WIRING) -> Walked:
    seconds = SECONDS | dict(durations)
    return walk(plan, wiring, lambda name, step: seconds[name], {"planning": 5.0, "main": 20.0})


def test_a_large_model_is_bound_by_its_steps() -> None:
    assert paced(plan()) == (near(3.0 + MOVES, rel=0.002), "step")


def test_a_slow_decoder_sets_the_pace_once_its_lead_is_used_up() -> None:
    step_s, bound_by = paced(plan(), {"decode": 6.0})
    assert (step_s, bound_by) == (near(6.0, rel=0.1), "decode")
    assert step_s < 6.0  # at the end of the data the whole horizon is planned at once


def test_two_decoders_are_twice_as_fast_as_one() -> None:
    step_s, bound_by = paced(plan(), {"decode": 12.0}, replace(WIRING, num_decoders=2))
    assert (step_s, bound_by) == (near(6.0, rel=0.15), "decode")


def test_a_slow_store_is_bound_by_fetching() -> None:
    assert paced(plan(), {"fetch": 5.0}) == (near(5.1), "fetch")  # the fetcher announces too


def test_a_slow_planner_is_bound_by_reading_and_planning() -> None:
    assert paced(plan(), {"plan": 5.0}) == (near(6.0, rel=0.05), "plan")


def test_a_narrow_link_is_bound_by_copies() -> None:
    assert paced(plan(), {"copy in": 7.0}) == (near(10.1, rel=0.01), "copy in")


def test_a_ring_for_one_piece_makes_fetching_wait_until_the_one_before_has_left() -> None:
    small = replace(WIRING, ring_bytes=int(1.5 * MIB))
    step_s, bound_by = paced(plan(), {"fetch": 5.0}, small)
    # fetched, announced, delivered, copied in, and the news of it delivered
    assert (step_s, bound_by) == (near(5.0 + 0.1 + 0.05 + 0.1 + 0.05, rel=0.002), "fetch")


def test_a_cache_of_one_batch_waits_for_every_victim_to_come_home() -> None:
    """Rows of step p are fetched once the victims of step p - 1 are home, and filled once step p - 1 is done."""
    tight = [
        replace(
            planned,
            after_step=planned.step - 1 if planned.step else None,
            fill_after=planned.step - 1 if planned.step else None,
        )
        for planned in plan()
    ]
    loose_s, _ = paced(plan(), {"write back": 2.5})
    step_s, _ = paced(tight, {"write back": 2.5})
    assert loose_s == near(3.0 + MOVES, rel=0.002)
    # fill, copy out, message, write back; fetch, send, message, copy in
    assert step_s == near(0.1 + 0.1 + 0.05 + 2.5 + 1.0 + 0.1 + 0.05 + 0.1, rel=0.002)


def test_a_depth_of_one_step_lets_rows_wait_for_the_step_before_the_last() -> None:
    """Rows of step p may be sent once step p - 2 is done, and be read once its victims are home."""
    shallow = replace(WIRING, depth=1)
    slow = {"fetch": 2.9, "write back": 2.9, "copy out": 2.9}
    deep_s, _ = paced(plan(fill_after=None), slow)
    step_s, _ = paced(plan(fill_after=None), slow, shallow)
    assert deep_s == near(3.0 + MOVES, rel=0.002)
    # two steps for: fill, copy out, message, write back, fetch, send, message, copy in
    assert step_s == near((0.1 + 2.9 + 0.05 + 2.9 + 2.9 + 0.1 + 0.05 + 0.1) / 2, rel=0.01)


def test_what_limits_the_pace_is_told_in_the_words_of_stalls() -> None:
    tight = [replace(planned, after_step=planned.step - 1 if planned.step else None) for planned in plan()]
    for own, wiring, durations, through in (
        (plan(), WIRING, {}, []),
        (plan(), replace(WIRING, ring_bytes=int(1.5 * MIB)), {"fetch": 5.0}, [("ring", near(1.0, rel=0.02))]),
        (tight, WIRING, {"write back": 2.5}, [("write_back", near(1.0, rel=0.02))]),
    ):
        found = walked(own, durations, wiring)
        assert found.through == through
        assert all(f"limited by {reason} 1.0 times a step" in described(found) for reason, _ in through)


def test_waits_are_shares_of_the_time_of_steady_steps() -> None:
    fast, slow = walked(plan()).waits, walked(plan(), {"fetch": 6.0}).waits
    assert "trainer: rows" not in fast
    # of 6.1 s between steps the trainer works 3.2 s
    assert slow["trainer: rows"] == near((6.1 - 3.0 - MOVES) / 6.1, rel=0.02)
    assert "fetcher: plans" not in slow


@pytest.mark.parametrize("every", [5, 20])
def test_barriers_add_their_time_and_what_they_let_run_dry(every: int) -> None:
    often = [replace(planned, barrier=planned.step % every == every - 1) for planned in plan()]
    step_s, _ = paced(often, {"barrier": 10.0})
    refill_s = 0.05 + 1.0 + 0.1 + 0.05  # the news of the last step, the next fetch, its announcement
    assert step_s == near(3.0 + MOVES + (10.0 + refill_s) / every, rel=0.02)


def test_a_checkpoint_that_is_not_durable_holds_up_the_next_barrier() -> None:
    often = [replace(planned, barrier=planned.step % 5 == 4) for planned in plan()]
    step_s, bound_by = paced(often, {"write": 50.0})
    assert (step_s, bound_by) == (near(10.0, rel=0.02), "write")


def test_no_step_ends_before_the_plan_and_the_work_that_it_needs() -> None:
    step_s, _ = paced(plan(), {name: 0.0 for name in SECONDS if name != "plan"})
    assert step_s == near(SECONDS["plan"], rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_room_in_staging_is_what_the_staging_itself_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    staging = Staging(PlainStreams(), 64 * 100)
    sizes = [64 * int(count) for count in random.integers(1, 60, 200)]
    spans, expected, used = list[StagingSpan](), [], 0
    for nbytes in sizes:
        while (span := staging.take(nbytes)) is None:
            spans[used].used = SeededEvent()
            used += 1
        spans.append(span)
        expected.append(used - 1 if used else None)
    assert room(sizes, staging.nbytes) == expected
