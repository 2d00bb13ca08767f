"""The recorder of `--timeline`."""

import os
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

import rowcast.prefetcher.pipeline.metrics
import rowcast.trainer.step.metrics
from rowcast.analysis.timeline import Pair, Recording, began, ended, lives, read_recording
from rowcast.job.tables import group_specs
from rowcast.protocol.counters import Counters
from rowcast.protocol.parts import Rank
from rowcast.runtime.disk import FileWrite
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Doorbell, StageThread
from rowcast.runtime.telemetry.metrics import BOTH, Process
from rowcast.runtime.telemetry.timeline import Timeline, recorded, timeline_path
from rowcast.trainer.models.exchanges import LocalCollectives
from tests.support import three_steps
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings, Sharing
from tests.support.facts import facts
from tests.support.made_up_timeline import announced_at, incarnation
from tests.support.timeline_format import check_events

IN_TWO_PARTS = Sharing(rank=Rank(number=0, count=1, parts=2), collectives=LocalCollectives())


def seconds_of(recording: Recording, name: str) -> float:
    return sum(span.dur or 0.0 for span in recording.named(name)) / 1e6


def steps_of(recording: Recording) -> list[int | None]:
    return [span.step for span in recording.spans]


@pytest.mark.parametrize("sharing", [None, IN_TWO_PARTS], ids=["one part", "two parts"])
def test_spans_add_up_to_the_seconds_that_the_metrics_count(tmp_path: Path, sharing: Sharing | None) -> None:
    job = small_job("adagrad", depth=2, horizon=3)
    batches = small_batches(job, "single")
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"), seeded_streams=False)
    run = InProcessRun(job, batches, settings, sharing=sharing)
    ours, theirs = run.prefetcher.counters, run.trainer.counters
    with Timeline(tmp_path, "prefetcher") as ours.timeline, Timeline(tmp_path, "trainer") as theirs.timeline:
        run.run()
        for reason in get_args(rowcast.prefetcher.pipeline.metrics.StallReason):
            ours.stalled(reason, 0.125)
            ours.stalled(reason, 0.001)
        for their_reason in get_args(rowcast.trainer.step.metrics.StallReason):
            theirs.stalled(their_reason, 0.25)
    sides: tuple[tuple[Process, Counters[Any, Any, Any]], ...] = (("prefetcher", ours), ("trainer", theirs))
    for process, counters in sides:
        recording = read_recording(tmp_path, process)
        rounding_s = len(recording.spans) * 1e-9
        assert {phase for phase, seconds in counters.phases.items() if seconds == 0} == (
            {"exchange"} if sharing is None and process == "trainer" else set()
        )
        for phase, seconds in counters.phases.items():
            assert seconds_of(recording, phase) == pytest.approx(seconds, abs=rounding_s), phase
        for waited, seconds in counters.stalls.items():
            assert seconds_of(recording, f"wait: {waited}") == pytest.approx(seconds, abs=rounding_s), waited
    steps = {life.number: life for life in lives(Pair(*(met(tmp_path, process) for process in BOTH)))}
    assert steps.keys() == set(range(len(batches)))
    assert all(announced_at(life) <= began(life.step) for life in steps.values())


def met(run_dir: Path, process: Process) -> Recording:
    """Of engines without processes: nobody noted that they met."""
    found = read_recording(run_dir, process)
    return Recording([incarnation(1, found.clock[1] / 1000), *found.events], found.threads, found.clock)


def test_without_a_timeline_nothing_is_recorded_and_one_null_object_serves_all() -> None:
    counters, _ = three_steps.run_of_three_steps()
    assert counters.timeline is None
    counters.show("work", "plan", 1.0)
    assert counters.shown("gather", 3) is counters.shown("scatter", 4)


def test_a_span_names_its_thread_its_step_and_when_it_was(tmp_path: Path) -> None:
    with Timeline(tmp_path, "trainer") as timeline:
        before_ns = time.perf_counter_ns()
        thread = threading.Thread(
            target=lambda: timeline.add("wait", "ring", 0.002, 7, ended_s=before_ns / 1e9), name="sender"
        )
        thread.start()
        thread.join()
        with timeline.work("gather", 8):
            time.sleep(0.001)
        timeline.add("work", "decode", 0.5, track="decoder 1")
        timeline.incarnation(77)
        timeline.add("step", "train", 0.25, 9)
    recording = read_recording(tmp_path, "trainer")
    first, second, third = recording.spans
    assert (first.cat, recording.threads[first.tid], first.name) == ("wait", "sender", "wait: ring")
    assert (first.step, first.dur) == (7, 2000.0)
    assert ended(first) == pytest.approx(before_ns / 1000, abs=0.002)
    assert (recording.threads[second.tid], second.name, second.step) == ("MainThread", "gather", 8)
    assert began(second) >= before_ns / 1000 - 0.001
    assert (second.dur or 0) >= 1000
    assert recording.threads[third.tid] == "decoder 1"
    assert recording.incarnations.keys() == {77}
    assert recording.clock[1] <= before_ns / 1000 + 0.001
    events = check_events(timeline_path(tmp_path, "trainer"))
    assert events[0]["args"]["name"] == f"trainer 0 (process {os.getpid()})"
    assert [(event["ph"], event["name"], event["args"]["step"]) for event in events[-2:]] == [
        ("b", "train step", 9),
        ("e", "train step", 9),
    ]


def test_a_full_timeline_stops_without_a_hole_and_says_so_once(tmp_path: Path) -> None:
    with capture_logs() as logs, Timeline(tmp_path, "prefetcher", max_events=12) as timeline:
        for step in range(25):
            timeline.add("work", "plan", 0.0, step)
    assert steps_of(read_recording(tmp_path, "prefetcher")) == list(range(10))
    (entry,) = logs
    assert (entry["log_level"], entry["events"]) == ("warning", 12)
    assert "nothing more is recorded" in entry["event"]


def test_a_disk_that_is_full_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FileWrite, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with capture_logs() as logs, Timeline(tmp_path, "trainer") as timeline:
        monkeypatch.setattr(FileWrite, "write", full)
        timeline.add("work", "plan", 0.0)
    assert ["No space left on device" in entry["event"] for entry in logs] == [True]


def test_a_process_that_was_killed_leaves_what_can_be_read(tmp_path: Path) -> None:
    with Timeline(tmp_path, "prefetcher") as timeline:
        for step in range(3):
            timeline.add("work", "plan", 0.0, step)
    path = timeline_path(tmp_path, "prefetcher")
    path.write_bytes(path.read_bytes()[: -len("}\n]\n")])
    assert steps_of(read_recording(tmp_path, "prefetcher")) == [0, 1]
    path.write_bytes(path.read_bytes().rpartition(b",\n")[0])
    assert len(check_events(path)) == 6, "names, and two spans"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=facts("--timeline", "timeline.trainer.json", "No such file")),
        Timeline(tmp_path / "no", "trainer"),
    ):
        pass


def test_a_level_is_recorded_when_it_has_changed(tmp_path: Path) -> None:
    values, looks = [3], 0

    def level() -> int:
        nonlocal looks
        looks += 1
        return values[-1]

    with Timeline(tmp_path, "trainer") as timeline:
        timeline.watch("ring", "bytes", level)
        for value in (3, 5, 5):
            values.append(value)
            seen = looks
            while looks < seen + 2:  # the next look records what the one before has found
                time.sleep(0.001)
    levels = [event for event in read_recording(tmp_path, "trainer").events if event.ph == "C"]
    assert [(level.name, level.args) for level in levels] == [("ring", {"bytes": 3}), ("ring", {"bytes": 5})]


def test_a_recorded_stage_shows_what_it_did_and_not_what_it_did_not(tmp_path: Path) -> None:
    class Busy:
        left = 3

        def advance(self) -> bool:
            self.left -= 1
            return self.left >= 0

    stage = Busy()
    with Timeline(tmp_path, "trainer") as timeline:
        thread = StageThread("mail", recorded(stage.advance, "deliver", timeline), Doorbell(), lambda error: None)
        thread.start()
        while stage.left >= 0:
            time.sleep(0.001)
        thread.stop()
    recording = read_recording(tmp_path, "trainer")
    assert [(recording.threads[span.tid], span.name) for span in recording.spans] == [("mail", "deliver")] * 3
