"""`prefetcher timeline`: two recordings made by hand, and the events that are made of them."""

import json
from pathlib import Path

import msgspec
import pytest

from rowcast.analysis.timeline.pairs import read_pairs
from rowcast.analysis.timeline.recording import lives, overlap, read_run
from rowcast.analysis.timeline.timeline import TimelineOptions, parse_steps, run_timeline
from rowcast.analysis.timeline.trace_events import write_events
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.run_directory import pair_folder
from rowcast.runtime.telemetry.metrics import BOTH, Process
from rowcast.runtime.telemetry.timeline import (
    VERSION,
    Incarnation,
    Level,
    SpanKind,
    TimelineHeader,
    TimelineSpan,
    timeline_path,
)
from tests.support.facts import facts
from tests.support.timeline_format import Event, check_events

MS = 10**6  # ns
ALWAYS = (0, float("inf"))


def span(
    kind: SpanKind, track: str, name: str, began_ms: float, ended_ms: float, step: int | None = None
) -> TimelineSpan:
    return TimelineSpan(kind, track, name, round(began_ms * MS), round((ended_ms - began_ms) * MS), step)


PREFETCHER = [
    span("work", "decoder 0", "decode", 1, 2, 0),
    *(span("work", "planning", "plan", 10 * step, 10 * step + 1, step) for step in range(4)),
    *(span("work", "fetcher", "fetch", 10 * step + 1, 10 * step + 2, step) for step in range(4)),
    *(span("work", "fetcher", "send", 10 * step + 3, 10 * step + 3.5, step) for step in range(4)),
    span("wait", "fetcher", "credit", 34, 60),
    span("work", "write-back", "write_back", 40, 41, 2),
]
TRAINER = [
    *(span("work", "MainThread", "lookup", 10 * step + 5, 10 * step + 6, step) for step in range(4)),
    *(span("step", "MainThread", "train", 10 * step + 5, 10 * step + 12, step) for step in range(4)),
    span("work", "MainThread", "fill", 17.2, 19.8, 1),
    span("work", "MainThread", "gather", 17.2, 18, 1),
    span("work", "sender", "send back", 39, 39.5, 2),
]


def leave(
    run_dir: Path,
    process: Process,
    spans: list[TimelineSpan],
    *,
    boot_id: str = "a",
    numbers: tuple[int, ...] = (5,),
    clock_ms: int = 0,
    version: int = VERSION,
) -> None:
    """A recording whose clock showed `clock_ms` at Unix time 1,000 s."""
    header = TimelineHeader(
        version=version, process=process, pid=42, boot_id=boot_id, clock_ns=clock_ms * MS, unix_ns=10**12
    )
    records = [
        *spans,
        *(Incarnation(number, clock_ms * MS) for number in numbers),
        Level(f"{process} ring", "bytes", 3 * MS, 4096),
    ]
    lines = [msgspec.json.encode(header), *map(msgspec.json.encode, records)]
    timeline_path(run_dir, process).write_bytes(b"\n".join(lines) + b"\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    leave(tmp_path, "prefetcher", PREFETCHER)
    leave(tmp_path, "trainer", TRAINER)
    return tmp_path


def events_of(run_dir: Path, **options: str) -> list[Event]:
    run_timeline(run_dir, TimelineOptions(out=run_dir / "t.json", **options))  # type: ignore[arg-type]
    return check_events(json.loads((run_dir / "t.json").read_text()))


def test_the_timeline_has_every_span_under_its_process_and_thread(run_dir: Path) -> None:
    events = events_of(run_dir)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["decoder 0", "planning", "fetcher", "write-back", "main", "sender"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["prefetcher (process 42)", "trainer (process 42)"], "in containers both may have one id"
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(PREFETCHER) + len(TRAINER) - 4
    assert {event["cat"] for event in spans} == {"work", "wait"}
    (plan,) = [event for event in spans if event["name"] == "plan" and event["args"]["step"] == 2]
    assert (names[plan["pid"], plan["tid"]], plan["ts"], plan["dur"]) == ("planning", 20_000, 1000)
    (wait,) = [event for event in spans if event["cat"] == "wait"]
    assert (wait["name"], wait["cname"], "args" in wait) == ("wait: credit", "grey", False)


def test_the_timeline_has_each_steps_life_levels_and_arrows(run_dir: Path) -> None:
    events = events_of(run_dir)
    begun, ended = (
        {(event["name"], int(event["id2"]["local"], 16)): event["ts"] for event in events if event["ph"] == phase}
        for phase in ("b", "e")
    )
    assert begun.keys() == {(name, step) for name in ("train step", "from plan to done") for step in range(4)}
    assert (begun["from plan to done", 1], ended["from plan to done", 1]) == (10_000, 22_000)
    in_flight = [(event["ts"], event["args"]["in flight"]) for event in events if event["name"] == "steps"]
    assert in_flight[:4] == [(3500, 1), (12_000, 0), (13_500, 1), (22_000, 0)]
    rings = {event["name"]: event["args"] for event in events if event["ph"] == "C" and event["name"] != "steps"}
    assert rings == {f"{process} ring": {"bytes": 4096} for process in BOTH}
    arrows = [(event["name"], event["ts"]) for event in events if event["ph"] == "f"]
    assert sorted(arrows) == [*(("rows", 10_000 * step + 5000) for step in range(4)), ("victims", 40_000)]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["incarnation 5"] * 2


def test_steps_choose_the_time_in_which_they_were_computed(run_dir: Path) -> None:
    events = events_of(run_dir, steps="1:2")
    assert {event["args"]["step"] for event in events if event["name"] == "lookup"} == {1}
    assert {event["args"]["step"] for event in events if event["name"] == "plan"} == {2}, (
        "step 2 is planned under the compute of step 1"
    )
    (lookup,) = [event for event in events if event["name"] == "lookup"]
    assert lookup["ts"] == 15_000, "times are those of the whole timeline"


@pytest.mark.parametrize("text", ["5", "5:5", "7:3", "a:b", "-1:3", ""])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--steps .*: give the first step"):
        parse_steps(text)


def test_steps_that_the_run_has_not_are_refused_with_those_that_it_has(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="has steps 0 to 3"):
        events_of(run_dir, steps="10:20")


def test_work_for_later_steps_under_the_compute_of_earlier_ones_is_measured(run_dir: Path) -> None:
    recordings = read_run(run_dir)
    steps = lives(recordings)
    assert [life.number for life in steps] == [0, 1, 2, 3]
    assert [life.announced_ns for life in steps] == [round((10 * step + 3.5) * MS) for step in range(4)]
    found = overlap(recordings, steps)
    assert found.num_over == {"plan": 3, "fetch": 3, "send": 0, "any": 3}
    assert found.exposed_share == 0


def test_a_steps_own_plan_under_its_own_compute_is_no_overlap(tmp_path: Path) -> None:
    leave(tmp_path, "prefetcher", [span("work", "fetcher", name, 1, 2, 0) for name in ("plan", "fetch", "send")])
    leave(tmp_path, "trainer", [span("step", "MainThread", "train", 0, 9, 0)])
    recordings = read_run(tmp_path)
    found = overlap(recordings, lives(recordings))
    assert (found.num_steps, found.num_over) == (1, {"plan": 0, "fetch": 0, "send": 0, "any": 0})


def test_what_passes_while_the_trainer_waits_for_rows_is_exposed(tmp_path: Path) -> None:
    first = [span("work", "fetcher", name, 0, 1, 0) for name in ("plan", "fetch", "send")]
    ahead = [
        span("work", "fetcher", name, began, began + 4, 1) for name, began in (("plan", 6), ("fetch", 10), ("send", 20))
    ]
    leave(tmp_path, "prefetcher", [*first, *ahead])
    waits = [
        span("wait", "MainThread", "barrier", 7, 8),
        span("wait", "MainThread", "rows", 11, 12),
        span("wait", "MainThread", "rows", 13, 21),
    ]
    steps = [span("step", "MainThread", "train", 5, 7, 0), span("step", "MainThread", "train", 24, 29, 1)]
    leave(tmp_path, "trainer", [*waits, *steps])
    recordings = read_run(tmp_path)
    assert overlap(recordings, lives(recordings)).exposed_share == pytest.approx((1 + 1 + 1) / 12)


def test_after_processes_met_again_steps_are_those_of_each_incarnation(tmp_path: Path) -> None:
    again = 1000 * MS
    later = [
        [msgspec.structs.replace(each, began_ns=each.began_ns + again) for each in spans]
        for spans in (PREFETCHER, TRAINER)
    ]
    leave(tmp_path, "prefetcher", [*PREFETCHER, *later[0]])
    leave(tmp_path, "trainer", later[1], numbers=(6,))  # another process
    path = timeline_path(tmp_path, "prefetcher")
    path.write_bytes(path.read_bytes() + msgspec.json.encode(Incarnation(6, again)) + b"\n")
    steps = lives(read_run(tmp_path))
    assert [life.number for life in steps] == [0, 1, 2, 3]
    assert all(life.planned_ns >= again for life in steps)


def test_recordings_of_two_boots_are_put_together_by_the_wall_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, "prefetcher", PREFETCHER)
    moved = [msgspec.structs.replace(each, began_ns=each.began_ns + 700 * MS) for each in TRAINER]
    leave(tmp_path, "trainer", moved, boot_id="b", clock_ms=700)
    recordings = read_run(tmp_path)
    assert not recordings.one_clock
    assert [each.began_ns for each in recordings.trainer.spans] == [each.began_ns for each in TRAINER]
    run_timeline(tmp_path, TimelineOptions())
    assert "aligned by the wall clock" in capsys.readouterr().out
    assert "wall clock" in json.loads((tmp_path / "timeline.json").read_text())["otherData"]["clock"]


def test_recordings_of_two_runs_are_refused(run_dir: Path) -> None:
    leave(run_dir, "trainer", TRAINER, numbers=(6,))
    with pytest.raises(ConfigError, match=facts("two runs", "--timeline")):
        read_run(run_dir)


@pytest.mark.parametrize("process", BOTH)
def test_a_missing_recording_is_named_with_the_command_that_makes_it(run_dir: Path, process: Process) -> None:
    timeline_path(run_dir, process).unlink()
    with pytest.raises(ConfigError, match=facts(f"timeline.{process}.jsonl", f"{process} run", "--timeline")):
        read_run(run_dir)


def test_a_damaged_line_is_named(run_dir: Path) -> None:
    path = timeline_path(run_dir, "trainer")
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], b'["span","work"]', *lines[5:]]))
    with pytest.raises(DataError, match=facts("timeline.trainer.jsonl", "line 5")):
        read_run(run_dir)


@pytest.mark.parametrize("content", [b"", b"\n", b"hello\n", b'{"version":1}\n'])
def test_a_file_that_is_no_recording_is_refused(run_dir: Path, content: bytes) -> None:
    timeline_path(run_dir, "prefetcher").write_bytes(content)
    with pytest.raises(DataError, match="line 1: not a timeline"):
        read_run(run_dir)


def test_another_version_is_refused(run_dir: Path) -> None:
    leave(run_dir, "prefetcher", PREFETCHER, version=VERSION + 1)
    with pytest.raises(DataError, match=f"is of version {VERSION + 1}"):
        read_run(run_dir)


def test_a_timeline_that_cannot_be_written_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--out .*No such file"):
        write_events([read_run(run_dir)], ALWAYS, run_dir / "no" / "t.json")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_has_a_row_for_each_thread(run_dir: Path, suffix: str) -> None:
    picture = run_dir / f"picture.{suffix}"
    run_timeline(run_dir, TimelineOptions(plot=picture, steps="0:4"))
    assert picture.stat().st_size > 5000
    if suffix == "svg":
        text = picture.read_text()
        for row in ("planning", "fetcher", "write-back", "main", "sender", "trainer", "credit"):
            assert f"<!-- {row} -->" in text, row


# several ranks


def leave_ranks(run_dir: Path, *later_ms: float, boots: str = "aaaa") -> None:
    """A pair for each number: the recordings above, later by that many milliseconds, with waits for the others."""
    for rank, (moved_ms, boot) in enumerate(zip(later_ms, boots, strict=False)):
        folder = pair_folder(run_dir, rank, len(boots))
        folder.mkdir()
        waits = [
            span("wait", "MainThread", "ranks", 10 * step + 6, 10 * step + 7 - rank / 2, step) for step in range(4)
        ]
        for process, spans in (("prefetcher", PREFETCHER), ("trainer", [*TRAINER, *waits])):
            moved = [msgspec.structs.replace(each, began_ns=each.began_ns + round(moved_ms * MS)) for each in spans]
            leave(folder, "prefetcher" if process == "prefetcher" else "trainer", moved, boot_id=boot)


def test_all_pairs_are_on_one_page_with_their_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_ranks(tmp_path, 0, 1)
    events = events_of(tmp_path)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"{process} {rank} (process 42)" for rank in range(2) for process in BOTH]
    lookups = {(event["pid"], event["ts"]) for event in events if event["name"] == "lookup"}
    assert {(2, 5000), (4, 6000)} <= lookups, "rank 1 begins 1 ms later"
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[1:]] == ["rank 0", "rank 1"]
    assert "and for other ranks during 10.8% of the time" in said[1], "4 of 37 ms"
    assert "and for other ranks during 5.4% of the time" in said[2]


def test_steps_of_ranks_are_the_time_in_which_any_of_them_computed(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1)
    events = events_of(tmp_path, steps="1:2")
    assert {event["ts"] for event in events if event["name"] == "lookup"} == {15_000, 16_000}


def test_pairs_of_two_hosts_are_put_together_by_the_wall_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_ranks(tmp_path, 0, 1, boots="ab")
    for process in BOTH:  # the other host's clock had shown 700 ms less
        path = timeline_path(tmp_path / "rank-001", process)
        path.write_bytes(path.read_bytes().replace(b'"clock_ns":0', b'"clock_ns":-700000000'))
    first, second = read_pairs(tmp_path)
    began_ns = [[span.began_ns for span in pair.prefetcher.spans] for pair in (first, second)]
    assert [later - earlier for earlier, later in zip(*began_ns, strict=True)] == [701 * MS] * len(began_ns[0])
    events_of(tmp_path)
    assert "aligned by the wall clock" in capsys.readouterr().out


def test_recordings_of_an_earlier_run_with_more_ranks_or_one_are_left_out(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1, 2)
    leave(tmp_path, "prefetcher", PREFETCHER)
    leave(tmp_path, "trainer", TRAINER)
    for folder in (tmp_path, tmp_path / "rank-002"):
        for process in BOTH:
            path = timeline_path(folder, process)
            path.write_bytes(path.read_bytes().replace(b'"unix_ns":1000000000000', b'"unix_ns":900000000000'))
    assert len(read_pairs(tmp_path)) == 2


def test_a_rank_that_recorded_nothing_is_named(tmp_path: Path) -> None:
    leave_ranks(tmp_path, 0, 1)
    timeline_path(tmp_path / "rank-001", "trainer").unlink()
    with pytest.raises(ConfigError, match=r"rank-001 has no timeline\.trainer\.jsonl"):
        read_pairs(tmp_path)
