"""A prefetcher in the background: every thread of it, and its decoding process."""

import contextlib
import os
from pathlib import Path

import pytest

from tests.support.processes import Session

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no SCHED_IDLE")


def policies(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            found.add(os.sched_getscheduler(int(task.name)))
    return found


def test_the_prefetcher_gives_way_where_the_job_says_so(session: Session) -> None:
    own = os.sched_getscheduler(0)
    session.write_job(prefetcher={"background": True})
    prefetcher, trainer = session.start_training()
    if "prefetcher.background has no effect here" in prefetcher.stderr:
        pytest.skip("the system refuses SCHED_IDLE")
    decoders = session.children()
    assert decoders
    for pid in (prefetcher.pid, *decoders):
        assert policies(pid) == {os.SCHED_IDLE}
    assert policies(trainer.pid) == {own}
