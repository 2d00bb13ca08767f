"""A prefetcher in the background: every thread of it, and its decoding process."""

import os
from pathlib import Path

import pytest

from tests.system.processes import Session

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no SCHED_IDLE")


def policies(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.parametrize(("background", "policy"), [(False, "SCHED_OTHER"), (True, "SCHED_IDLE")])
def test_the_prefetcher_gives_way_where_the_job_says_so(background: bool, policy: str, session: Session) -> None:
    session.write_job(prefetcher={"background": background})
    prefetcher, trainer = session.start_training()
    decoders = session.children()
    assert decoders
    assert {pid: policies(pid) for pid in [prefetcher.pid, *decoders]} == {
        pid: {getattr(os, policy)} for pid in [prefetcher.pid, *decoders]
    }
    assert policies(trainer.pid) == {os.SCHED_OTHER}
