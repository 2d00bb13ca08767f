"""`rowcast timeline`: two recordings made by hand, and the page that is made of them."""

from pathlib import Path

import pytest

from rowcast.analysis.timeline import (
    TimelineOptions,
    began,
    lives,
    read_pair,
    read_pairs,
    run_timeline,
)
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.run_directory import pair_folder
from rowcast.runtime.telemetry.metrics import BOTH, Process
from rowcast.runtime.telemetry.timeline import timeline_path
from tests.support.facts import facts
from tests.support.made_up_timeline import announced_at, incarnation, later, leave, planned_at, span
from tests.support.timeline_format import Event, check_events

MAIN = "MainThread"
PREFETCHER = [
    span("work", "decoder 0", "decode", 1, 2, 0),
    *(span("work", "planning", "plan", 10 * step, 10 * step + 1, step) for step in range(4)),
    *(span("work", "fetcher", "fetch", 10 * step + 1, 10 * step + 2, step) for step in range(4)),
    *(span("work", "fetcher", "send", 10 * step + 3, 10 * step + 3.5, step) for step in range(4)),
    span("wait", "fetcher", "credit", 34, 60),
    span("work", "write-back", "write_back", 40, 41, 2),
]
TRAINER = [
    *(span("work", MAIN, "lookup", 10 * step + 5, 10 * step + 6, step) for step in range(4)),
    *(span("step", MAIN, "train step", 10 * step + 5, 10 * step + 12, step) for step in range(4)),
    span("work", MAIN, "fill", 17.2, 19.8, 1),
    span("work", MAIN, "gather", 17.2, 18, 1),
    span("work", "sender", "send back", 39, 39.5, 2),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    leave(tmp_path, "prefetcher", PREFETCHER)
    leave(tmp_path, "trainer", TRAINER)
    return tmp_path


def events_of(run_dir: Path) -> list[Event]:
    run_timeline(run_dir, TimelineOptions(out=run_dir / "t.json"))
    return check_events(run_dir / "t.json")


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def test_the_page_has_every_event_of_both_processes(run_dir: Path) -> None:
    events = events_of(run_dir)
    assert events == [event for process in BOTH for event in check_events(timeline_path(run_dir, process))]
    names = [event["args"]["name"] for event in named(events, "thread_name")]
    assert names == ["decoder 0", "planning", "fetcher", "write-back", MAIN, "sender"]
    begun, ended = ([event["ts"] for event in events if event["ph"] == phase] for phase in ("b", "e"))
    assert (begun, ended) == ([5000, 15_000, 25_000, 35_000], [12_000, 22_000, 32_000, 42_000])


def test_a_step_is_followed_through_both_processes(run_dir: Path) -> None:
    steps = lives(read_pair(run_dir))
    assert [life.number for life in steps] == [0, 1, 2, 3]
    assert [announced_at(life) for life in steps] == [10_000 * step + 3500 for step in range(4)]


def test_after_processes_met_again_steps_are_those_of_each_attempt(tmp_path: Path) -> None:
    leave(tmp_path, "prefetcher", [*PREFETCHER, incarnation(6, 1000), *later(PREFETCHER, 1000)])
    leave(tmp_path, "trainer", later(TRAINER, 1000), numbers=(6,))  # another process
    steps = lives(read_pair(tmp_path))
    assert [life.number for life in steps] == [0, 1, 2, 3]
    assert all(planned_at(life) >= 1e6 for life in steps)


def test_recordings_of_two_boots_are_put_together_by_the_wall_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, "prefetcher", PREFETCHER)
    leave(tmp_path, "trainer", later(TRAINER, 700), boot_id="b", clock_ms=700)
    assert [own.ts for own in read_pair(tmp_path).trainer.spans] == [own.ts for own in TRAINER if own.ph == "X"]
    run_timeline(tmp_path, TimelineOptions())
    assert "aligned by the wall clock" in capsys.readouterr().out


def test_recordings_of_two_runs_are_refused(run_dir: Path) -> None:
    leave(run_dir, "trainer", TRAINER, numbers=(6,))
    with pytest.raises(ConfigError, match=facts("two runs", "--timeline")):
        read_pair(run_dir)


@pytest.mark.parametrize("process", BOTH)
def test_a_missing_recording_is_named_with_what_makes_it(run_dir: Path, process: Process) -> None:
    path = timeline_path(run_dir, process)
    path.unlink()
    with pytest.raises(ConfigError, match=facts(f"timeline.{process}.json", f"{process} run", "--timeline")):
        read_pair(run_dir)
    path.with_suffix(".jsonl").touch()  # as an earlier version wrote it
    with pytest.raises(ConfigError, match=facts(f"timeline.{process}.jsonl", "record the run again", "4c36c62")):
        read_pair(run_dir)


def test_a_damaged_line_is_named(run_dir: Path) -> None:
    path = timeline_path(run_dir, "trainer")
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], b'{"ph":"X"', *lines[5:]]))
    with pytest.raises(DataError, match=facts("timeline.trainer.json", "line 5")):
        read_pair(run_dir)


@pytest.mark.parametrize("content", [b"", b"[\n", b"hello\n", b'[\n{"ph":"M","name":"process_name","pid":1}\n'])
def test_a_file_that_is_no_recording_is_refused(run_dir: Path, content: bytes) -> None:
    timeline_path(run_dir, "prefetcher").write_bytes(content)
    with pytest.raises(DataError, match="no timeline of rowcast"):
        read_pair(run_dir)


def test_a_page_that_cannot_be_written_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--out .*No such file"):
        run_timeline(run_dir, TimelineOptions(out=run_dir / "no" / "t.json"))


# several ranks


def leave_ranks(run_dir: Path, *later_ms: float, boots: str = "aaaa", clock_ms: float = 0.0) -> None:
    """A pair for each number: the recordings above, later by that many milliseconds."""
    for rank, (moved_ms, boot) in enumerate(zip(later_ms, boots, strict=False)):
        folder = pair_folder(run_dir, rank, len(boots))
        folder.mkdir()
        at_ms = clock_ms if rank == 1 else 0.0
        leave(folder, "prefetcher", later(PREFETCHER, moved_ms), boot_id=boot, rank=rank, clock_ms=at_ms)
        leave(folder, "trainer", later(TRAINER, moved_ms), boot_id=boot, rank=rank, clock_ms=at_ms)


def test_all_pairs_are_on_one_page_with_their_ranks(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1)
    events = events_of(tmp_path)
    names = [event["args"]["name"] for event in named(events, "process_name")]
    assert names == [f"{process} {rank} (process 42)" for rank in range(2) for process in BOTH]
    assert {(2, 5000), (4, 6000)} <= {(event["pid"], event["ts"]) for event in named(events, "lookup")}


def test_pairs_of_two_hosts_are_put_together_by_the_wall_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_ranks(tmp_path, 0, 1, boots="ab", clock_ms=-700)  # the other host's clock had shown 700 ms less
    first, second = (list(map(began, pair.prefetcher.spans)) for pair in read_pairs(tmp_path))
    assert [later - earlier for earlier, later in zip(first, second, strict=True)] == [701_000] * len(first)
    events_of(tmp_path)
    assert "aligned by the wall clock" in capsys.readouterr().out


def test_recordings_of_an_earlier_run_with_more_ranks_or_one_are_left_out(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1, 2)
    leave(tmp_path, "prefetcher", PREFETCHER)
    leave(tmp_path, "trainer", TRAINER)
    for folder in (tmp_path, tmp_path / "rank-002"):
        for process in BOTH:
            path = timeline_path(folder, process)
            path.write_bytes(path.read_bytes().replace(b'"unix":1000000000.0', b'"unix":900000000.0'))
    assert len(read_pairs(tmp_path)) == 2


def test_a_rank_that_recorded_nothing_is_named(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1)
    timeline_path(tmp_path / "rank-001", "trainer").unlink()
    with pytest.raises(ConfigError, match=r"rank-001 has no timeline\.trainer\.json"):
        read_pairs(tmp_path)
