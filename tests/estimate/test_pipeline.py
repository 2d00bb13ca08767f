"""The pipeline's wiring: with made-up durations, each bottleneck gives the pace that follows from it, and its name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rowcast.analysis.estimate.pipeline import Planned, Wiring, room
from rowcast.analysis.estimate.walk import Walked, described, walk
from rowcast.trainer.device.streams import PlainStreams
from rowcast.trainer.step.memory import Staging, StagingSpan
from tests.support.made_up_pipeline import MIB, SECONDS, WIRING, plan
from tests.support.seeded_streams import SeededEvent

MOVES = SECONDS["copy in"] + SECONDS["fill"]  # on the main thread, beside the step


def near(seconds: float, rel: float = 1e-6) -> Any:
    return pytest.approx(seconds, rel=rel)


def paced(plan: list[Planned], durations: Mapping[str, float] = {}, wiring: Wiring = WIRING) -> tuple[float, str]:
    """Seconds a step, and the task that most of the critical path is of."""
    found = walked(plan, durations, wiring)
    return found.step_s, found.bound_by[0][0]


def walked(plan: list[Planned], durations: Mapping[str, float] = {}, wiring: Wiring = WIRING) -> Walked:
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
