"""A stop of any process of several ranks ends all of them after the same step, with the bits of as many plain steps."""

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import EndOfData, StopRequest
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.models.shared_runner import AgreedStop
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = 3
DEPTH = 2
EVALUATION = range(4, 10)  # steps
SIDES = ("trainer", "prefetcher")


@functools.cache
def workload() -> tuple[Job, list[ScheduledBatch]]:
    job = small_job("adagrad", "multi", depth=DEPTH, horizon=4)
    return job, small_batches(job, "multi", num_steps=14, eval_at=EVALUATION)


def new_run(seed: int, ranks: int = RANKS) -> RankedRun:
    job, batches = workload()
    settings = Settings(slots=slots_for(group_specs(job), batches, "two batches"), seed=seed)
    return RankedRun(job, batches, settings, ranks=ranks, parts=3)


def stop(pair: InProcessRun, side: str) -> None:
    if side == "trainer":
        pair.stop.ask("SIGTERM to the trainer")
    else:
        pair.prefetcher.stop("SIGTERM to the prefetcher")


def assert_stopped_alike(run: RankedRun) -> EndOfData:
    """Returns where all have stopped."""
    ends = [pair.trainer.barrier.end for pair in run.pairs]
    assert ends[0] is not None
    places = {(end.last_plan, end.finished) for end in ends if end is not None}
    assert len(places) == 1, f"ranks have stopped at {places}"
    job, batches = workload()
    done = batches[: (-1 if ends[0].last_plan is None else ends[0].last_plan) + 1]
    losses, expected = run_plain_loop(job, start_state(job, NUM_DENSE), done, 3)
    assert_equal_bits(run, losses, expected)
    return ends[0]


def once_after(chance: random.Random, run: RankedRun) -> Callable[[], bool]:
    """At some turn after some rank has begun a random step."""
    loop, step = chance.choice(run.pairs).trainer.loop, chance.randrange(-1, 20)
    return lambda: step <= (-1 if loop.step_begun is None else loop.step_begun) and chance.random() < 0.001


def test_signals_at_random_instants_stop_all_ranks_after_the_same_step() -> None:
    found: Counter[str] = Counter()
    for seed in range(count(8, 80)):
        chance, run = random.Random(seed), new_run(seed)
        for _ in range(chance.choice((1, 1, 2))):
            run.when(once_after(chance, run), functools.partial(stop, chance.choice(run.pairs), chance.choice(SIDES)))
        end = assert_stopped_alike(run.run())
        found["finished" if end.finished else "in an evaluation" if end.last_plan in EVALUATION else "stopped"] += 1
        found["apart"] += run.most_apart >= 3
    for what in ("finished", "in an evaluation", "stopped", "apart"):
        assert found[what], found


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("begun", "last"),
    [(None, 2 * DEPTH + 3), (1, None), (2, None), (11, None), (19, 19)],
    ids=["before the first step", "into an evaluation", "in step 2", "in the last part", "in the last step"],
)
def test_a_stop_is_made_wherever_it_comes(side: str, begun: int | None, last: int | None) -> None:
    run = new_run(seed=5)
    number = 1
    run.when(lambda: run.pairs[number].trainer.loop.step_begun == begun, lambda: stop(run.pairs[number], side))
    end = assert_stopped_alike(run.run())
    assert end.last_plan is not None
    if last is not None:
        assert end.last_plan == last or (side == "prefetcher" and end.last_plan > last)
    assert end.finished == (end.last_plan == len(workload()[1]) - 1)
    if not end.finished:
        reasons = [pair.trainer.barrier.stop_reason for pair in run.pairs]
        assert reasons == ["a request to rank 1", f"SIGTERM to the {side}", "a request to rank 1"]


def stop_all_at_once(run: RankedRun) -> None:
    for pair in run.pairs:
        pair.prefetcher.planning.due.stop(StopRequest(reason="at once"))


def test_a_request_without_an_agreement_is_seen() -> None:
    """Stopped at once, as a trainer that is alone, ranks end after different steps, or wait for each other."""
    for seed in range(10):
        run = new_run(seed)
        run.when(once_after(random.Random(seed), run), functools.partial(stop_all_at_once, run))
        try:
            assert_stopped_alike(run.run())
        except AssertionError:
            return
    pytest.fail("10 seeds agreed by chance")


def test_one_rank_of_several_parts_stops_at_once() -> None:
    sent: list[StopRequest] = []
    alone = AgreedStop(Rank(number=0, count=1, parts=3), workload()[0], sent.append)
    alone.ask("SIGTERM to the trainer")
    alone.seen(3, [True])
    assert sent == [StopRequest(reason="SIGTERM to the trainer")]
    run = new_run(seed=2, ranks=1)
    run.when(lambda: run.pairs[0].trainer.loop.step_begun == 2, lambda: stop(run.pairs[0], "prefetcher"))
    end = assert_stopped_alike(run.run())
    assert end.last_plan is not None
    assert end.last_plan <= 2 + 2 * DEPTH + 2


def test_a_last_step_that_is_planned_already_is_refused() -> None:
    run = new_run(seed=2)
    planning = run.pairs[0].prefetcher.planning
    run.when(
        lambda: (planning.due.planned_through or 0) > 3,
        lambda: planning.due.stop(StopRequest(reason="late", after_step=2)),
    )
    with pytest.raises(RemoteProtocolError, match="the last step is to be 2, but step"):
        run.run()
