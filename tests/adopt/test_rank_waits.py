"""Each wait of a script of several ranks is needed, and all are enough: scripts in one process, in an order of turns
that a seed decides, end with the bits of the plain loop in as many parts.

On a CPU a script's streams run everything at once, so its waits for other ranks are those below. What it awaits of its
own device has tests of its own: tests/system/test_device_order.py, tests/adopt/test_streams.py.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import StopRequest
from rowcast.runtime.errors import RowcastError
from rowcast.trainer.adopt.connect.batch import LoadedBatch
from rowcast.trainer.adopt.connect.loader import Loader
from rowcast.trainer.device.streams import PlainStreams, Streams, Wait
from rowcast.trainer.models.evaluate import Evaluation
from tests.support.batches import NUM_DENSE, PLACED, placed, slots_for, small_batches, small_job
from tests.support.comparisons import Plain, assert_equal_bits
from tests.support.driver import Settings, StuckError, start_state
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count
from tests.support.script_ranks import GATHERED, Place, ScriptPair, ScriptRanks
from tests.support.stream_races import ClockedStream, Races

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = 4
# the scripts stop where prefetchers differ in the checkpoints that they have planned, and before the step is told
HIDDEN = 112  # a seed that shows the wait for the counts of an evaluation: two later exchanges nearly always hide it
STOPS_BETWEEN_PLANS = 21, 37
# The job has two groups of tables, and one rank pools a table of each. The number counts the exchanges of a name.
WAITS: tuple[Place, ...] = (
    ("the rows of step", 0),
    ("the rows of step", 1),
    ("the pooled vectors of step", 0),
    ("the pooled vectors of step", 1),
    ("the gradients of pooled vectors of step", 0),
    ("the gradients of pooled vectors of step", 1),
    ("the gradients of step", 0),
    ("the gradients of step", 1),
    ("the dense gradients of train step", 0),  # slices: each rank adds up one
    ("the dense gradients of train step", 1),  # sums
    ("what they tell of step", 0),
    ("the counts of an evaluation", 0),  # losses of parts
    ("the counts of an evaluation", 1),  # slices
    ("the counts of an evaluation", 2),  # sums
    ("random states", 0),
    (GATHERED, 0),
)


@functools.cache
def workload() -> tuple[Job, list[ScheduledBatch]]:
    """All parts have one size: a gradient is the mean over ranks, whatever their samples."""
    job = small_job("adagrad", "multi", depth=1, horizon=4, checkpoint={"every": 2})
    job = placed(job, PLACED, RANKS, RANKS)
    return job, small_batches(job, "multi", num_steps=7, eval_at=(2, 5, 6))[:-1]


@functools.cache
def plain(train_steps: int) -> Plain:
    job, batches = workload()
    trained = [scheduled for scheduled in batches if scheduled.kind == "train"]
    return run_plain_loop(job, start_state(job, NUM_DENSE), trained[:train_steps], RANKS)


@functools.cache
def evaluations() -> list[Evaluation]:
    job, batches = workload()
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"))
    return RankedRun(job, batches, settings, ranks=1, parts=RANKS).run().pairs[0].results.evaluations


def run_scripts(seed: int, folder: Path, without: Place | None = None) -> int:
    """Raises where the result has other bits than the plain loop's, or the run breaks. Every second run is stopped: by
    a request to one rank, by all scripts, or by the prefetchers in an evaluation."""
    job, batches = workload()
    settings = Settings(
        slots=slots_for(group_specs(job), batches, ("one batch", "two batches")[seed % 2]),
        seed=seed,
        late_store=seed % 3 == 0,
    )

    def stop(pair: ScriptPair, train_step: int) -> None:
        if seed % 8 == 1 and (pair.script.number, train_step) == (1, 0):
            pair.session.run.ask_to_stop("SIGTERM")
        if seed % 8 == 5 and train_step == 3:
            pair.loader.stop("enough")

    folder = folder / str(seed)
    folder.mkdir()
    with ScriptRanks(folder, job, batches, settings, RANKS, without=without, behind=stop) as run:
        if seed % 4 == 3:
            for pair in run.pairs:
                pair.prefetcher.planning.stop(StopRequest(reason="within the evaluation", after_step=5))
        run.run()
        done = {pair.session.train_steps for pair in run.scripts}
        assert len(done) == 1, "ranks have stopped after other steps"
        assert seed % 2 == (done != {len(plain(100)[0])}), "the run was stopped"
        assert_equal_bits(run, *plain(*done))
        run.assert_each_row_stays_with_its_owner()
        found = run.pairs[0].results.evaluations
        assert found == evaluations()[: len(found)]
        assert len(found) == 2 - (seed % 2)
        for pair in run.pairs:
            assert pair.saved == run.pairs[0].saved, "ranks would save other states"
        assert {place for pair in run.scripts for place in pair.collectives.places} == {*WAITS[:-1]}
        return run.most_apart


def test_every_order_that_the_waits_allow_gives_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    seeds = {*range(count(4, 60)), *STOPS_BETWEEN_PLANS}
    assert max(run_scripts(seed, tmp_path) for seed in seeds) > 0, "the ranks went in step"


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_without_any_one_wait_some_order_gives_wrong_bits(wait: Place, tmp_path: Path) -> None:
    for seed in (*range(20), HIDDEN):
        try:
            run_scripts(seed, tmp_path, without=wait)
        except StuckError:
            raise  # leaving out a wait must not block a run
        except (AssertionError, RowcastError, IndexError, RuntimeError, ValueError):
            return
    pytest.fail(f"21 seeds without the wait {wait!r} gave the right bits: it is not needed, or this test cannot see it")


class TwoStreams(ScriptPair):
    """Draws batches on one stream and does all else on another, as a script does that copies them meanwhile."""

    races: Races
    without: ClassVar[Wait | None] = None

    def make_streams(self, settings: Settings) -> Streams:
        streams, self.races = PlainStreams(), Races()
        streams.compute = streams.exchange = ClockedStream(self.races, self.without)
        return streams

    def draw(self, loader: Loader) -> Iterator[LoadedBatch]:
        batches = iter(loader)
        with self.races:
            while True:
                self.races.current = "loader"
                batch = next(batches, None)
                if batch is None:
                    return
                self.races.current = "script"
                self.races.forget([batch.dense_features, batch.labels])
                yield batch


def found_on_two_streams(folder: Path, without: Wait | None) -> list[str]:
    job, batches = workload()
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"))
    with ScriptRanks(folder, job, batches, settings, RANKS, kind=type("", (TwoStreams,), {"without": without})) as run:
        run.run()
        assert_equal_bits(run, *plain(len(plain(100)[0])))
        return [race for pair in run.scripts if isinstance(pair, TwoStreams) for race in pair.races.found]


def test_a_script_may_draw_on_one_stream_and_compute_on_another(tmp_path: Path) -> None:
    assert found_on_two_streams(tmp_path, None) == []


@pytest.mark.parametrize("wait", ["used", "filled"])
def test_without_a_wait_both_use_some_memory_in_no_order(wait: Wait, tmp_path: Path) -> None:
    assert found_on_two_streams(tmp_path, wait)
