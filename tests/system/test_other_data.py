"""A data set that gives other batches to another rank, or after a restart, is refused by both processes."""

import re
import signal
from typing import Any

from tests.support.processes import Session


def unseeded(seeded_batches: int) -> dict[str, Any]:
    return {
        "format": "tests.system.odd_parts:unseeded",
        "batch_size": 64,
        "options": {"seeded_batches": seeded_batches},
        "synthetic": None,
    }


def test_ranks_that_read_other_batches_later_end_before_them(session: Session) -> None:
    session.write_job(data=unseeded(50), ranks={"count": 2}, checkpoint={"every": 10})
    ended = session.start("local").ended(200)
    assert ended.code == 5, ended.stderr
    assert "rank 1 reads other batches than rank 0" in ended.stderr
    assert "gloo::" not in ended.stderr
    made = sorted(path.parent.name for path in session.run_dir.glob("checkpoints/step-*/manifest.json"))
    assert made[-1] <= "step-000000000050"
    assert session.remains() == []


def test_a_restart_that_reads_other_batches_is_refused(session: Session) -> None:
    slow = {"kind": "tests.system.odd_parts:slow_model", "options": {"forward_s": 0.05}}
    session.write_job(data=unseeded(0), model=slow)
    processes = session.start_both()
    processes[1].until_counted("rowcast_train_steps_total", 3)
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        process.ended().quiet()
    refusals = {process.ended().refused(5) for process in session.start_both()}
    assert len(refusals) == 1
    assert re.match(r"the ids of train step \d+ are not those that were read before the checkpoint", refusals.pop())
