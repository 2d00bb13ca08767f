"""Reads the recordings of every pair of processes of a run: one, or one for each rank, all on one clock."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rowcast.analysis.timeline.recording import (
    Recordings,
    StepLife,
    TimelineRecording,
    ended_ns,
    lives,
    read_run,
    shifted,
    wall_offset,
)
from rowcast.runtime.telemetry.timeline import timeline_path


def read_pairs(run_dir: Path) -> list[Recordings]:
    """By rank, on the clock of the first prefetcher. Raises as `read_run` does.

    Only those that ran at the time of the newest: an earlier run of the folder may have had more ranks, or one."""
    folders = [run_dir, *sorted(run_dir.glob("rank-*"))]
    recorded = [folder for folder in folders if timeline_path(folder, "prefetcher").exists()]
    pairs = [read_run(folder) for folder in recorded or [run_dir]]
    newest = max(pairs, key=lambda pair: pair.prefetcher.header.unix_ns)
    together = [pair for pair in pairs if pair is newest or overlap_in_time(pair, newest)]
    return [on_clock_of(together[0].prefetcher, pair) for pair in together]


def overlap_in_time(pair: Recordings, other: Recordings) -> bool:
    (began, ended), (other_began, other_ended) = unix_times(pair), unix_times(other)
    return began < other_ended and other_began < ended


def unix_times(pair: Recordings) -> tuple[int, int]:
    """Returns when the pair's recordings began and ended, in nanoseconds of Unix time."""
    by_ns = wall_offset(pair.prefetcher.header)
    ends = [ended_ns(span) for recording in pair.both for span in recording.spans]
    return pair.began_ns + by_ns, max([pair.began_ns, *ends]) + by_ns


def on_clock_of(first: TimelineRecording, pair: Recordings) -> Recordings:
    header = pair.prefetcher.header
    if header.boot_id == first.header.boot_id:
        return pair
    by_ns = wall_offset(header) - wall_offset(first.header)
    return replace(
        pair, prefetcher=shifted(pair.prefetcher, by_ns), trainer=shifted(pair.trainer, by_ns), one_clock=False
    )


def waited_for_ranks(pair: Recordings, steps: Sequence[StepLife]) -> float:
    """The share of the time from the first of the steps to the last in which the trainer waited for other ranks."""
    if not steps:
        return 0.0
    began_ns, end_ns = steps[0].step.began_ns, ended_ns(steps[-1].step)
    waits = [span for span in pair.trainer.spans if (span.kind, span.name) == ("wait", "ranks")]
    waited_ns = sum(span.duration_ns for span in waits if began_ns <= span.began_ns < end_ns)
    return waited_ns / max(1, end_ns - began_ns)


def last_lives(pair: Recordings) -> list[StepLife]:
    """Returns the steps of the last incarnation, which start after its checkpoint."""
    steps = lives(pair)
    begins = [index for index, life in enumerate(steps) if index and life.number <= steps[index - 1].number]
    return steps[begins[-1] if begins else 0 :]
