"""A data set that gives other batches to another rank, or after a restart, is refused by both processes."""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.data_files import write_day
from tests.support.jobs import table
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


def write_hosts(session: Session) -> list[Path]:
    """Two folders with the same log; the job's data.path begins at the folder in which a process is started."""
    hosts = [session.folder / "host 0", session.folder / "host 1"]
    for host in hosts:
        (host / "days").mkdir(parents=True)
        write_day(host / "days", "day_0", 12_000, num_ids=30)
    session.write_job(
        data={"format": "criteo-npy", "path": "days", "batch_size": 16, "synthetic": None},
        tables=[table("narrow", 30, 4, "cat_0"), table("wide", 30, 4, "cat_1")],
        ranks={"count": 2, "parts": 2, "per_host": 1},
    )
    return hosts


def test_a_host_with_another_file_is_refused_before_the_first_step(session: Session) -> None:
    hosts = write_hosts(session)
    changed = hosts[1] / "days" / "day_0_labels.npy"
    labels = np.load(changed)
    labels[-1] ^= 1  # in step 750, which no rank has read before the first
    np.save(changed, labels)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torchrun = ["--nnodes=2", "--nproc-per-node=1", f"--master-port={port}", "--max-restarts=0"]
    trainer = ["-m", "rowcast.trainer", "run", f"--config={session.config}"]
    for host, folder in enumerate(hosts):
        session.start_patched("prefetcher", f"import os; os.chdir({str(folder)!r})", f"--host={host}")
    trainers = [
        session.start_module("rowcast.deploy.torchrun", *torchrun, f"--node-rank={host}", *trainer) for host in (0, 1)
    ]
    for ended in [process.ended(200) for process in trainers]:
        assert ended.code == 5, ended.stderr
        assert "rank 1 reads other data than rank 0: data file 3 (day_0_labels.npy) differs" in ended.stderr
    assert not (session.run_dir / "losses.f32").exists()
