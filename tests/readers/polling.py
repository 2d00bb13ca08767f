"""Asking a source as the planner does: again and again, without waiting inside it. And processes that have one."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.source import RankSource, Source
from rowcast.protocol.batch import Batch, Lookups, Samples, Scheduled, ScheduledBatch

ROOT = Path(__file__).parents[2]
LONG_S = 60.0  # only a test that fails waits so long
Answer = TypeVar("Answer")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def asked(ask: Callable[[], Answer | None], ended: Callable[[], bool]) -> Answer | None:
    deadline = time.monotonic() + LONG_S
    while (answer := ask()) is None and not ended():
        assert time.monotonic() < deadline, "nothing arrived"
        time.sleep(0.001)
    return answer


def next_batch(source: Source) -> ScheduledBatch | None:
    """None at the end."""
    return asked(source.poll, lambda: source.ended)


def whole_batch(ids: Scheduled[Lookups], dense: Samples) -> ScheduledBatch:
    return ids.holding(Batch.of(ids.batch, dense))


def next_ids(source: Source | RankSource) -> Scheduled[Lookups] | None:
    """None at the end."""
    return asked(source.poll_ids, lambda: source.ended)


def next_dense(source: Source | RankSource) -> Samples:
    rest = asked(source.poll_dense, lambda: False)
    assert rest is not None, "rest has no end of its own"
    return rest


def rest_of(source: Source) -> list[ScheduledBatch]:
    """Every batch that is left."""
    return list(iter(lambda: next_batch(source), None))


def polled_ahead(source: Source | RankSource, horizon: int) -> list[ScheduledBatch]:
    """Every batch that is left, the ids polled `horizon` batches ahead of the rest."""
    known: list[Scheduled[Lookups]] = []
    whole: list[ScheduledBatch] = []
    while (ids := next_ids(source)) is not None:
        known.append(ids)
        if len(known) > horizon:
            whole.append(whole_batch(known.pop(0), next_dense(source)))
    return [*whole, *(whole_batch(ids, next_dense(source)) for ids in known)]


def is_alive(pid: int | None) -> bool:
    """Not gone, and not only waiting to be reaped either, which nobody may do for an orphan in a container."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def parent_process(job: Job, ending: str) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a source, prints its decoders' pids once data is open, does `ending` and is killed."""
    lines = [
        "import msgspec, time",
        "from rowcast.prefetcher.readers.workers import WorkerSource",
        "from rowcast.job.file import parse_job",
        f"source = WorkerSource(parse_job(msgspec.json.decode({msgspec.json.encode(job)!r})))",
        "source.start()",
        "source.info()",
        "print(*source.pids, flush=True)",
        ending,
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def decoders_of(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    return [int(pid) for pid in parent.stdout.readline().split()]
