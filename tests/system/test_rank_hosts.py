"""Two ranks of two hosts, both of which are this one: the commands of docs/ranks.md for several hosts."""

import os
import signal
import socket

from rowcast.runtime.run_directory import COMPLETE
from tests.support.processes import Session

STEPS = 400
SMALL = {"data": {"batch_size": 50, "synthetic": {"samples": 20_000}}}
END_S = 240.0


def test_each_host_starts_its_prefetchers_and_its_trainers_and_restarts_its_only_prefetcher(session: Session) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    losses = []
    for sections in ({"ranks": {"count": 2, "parts": 4, "per_host": 1}}, {"ranks": {"parts": 4}}):
        session.write_job(**SMALL, **sections)
        if "count" in sections["ranks"]:
            hosts = (0, 1)
            torchrun = ["--nnodes=2", "--nproc-per-node=1", f"--master-port={port}", "--max-restarts=1"]
            trainer = ["-m", "rowcast.trainer", "run", f"--config={session.config}"]
            processes = [session.start("prefetcher", f"--max-steps={STEPS}", f"--host={host}") for host in hosts]
            processes += [
                session.start_module("rowcast.deploy.torchrun", *torchrun, f"--node-rank={host}", *trainer)
                for host in hosts
            ]
            processes[-1].until_counted("rowcast_train_steps_total", 100)
            os.kill(int((session.run_dir / "rank-001" / "prefetcher.lock").read_text()), signal.SIGKILL)
        else:
            processes = [
                session.start("prefetcher", f"--max-steps={STEPS}", "--fresh"),
                session.start("trainer", "--fresh"),
            ]
        for process in processes:
            ended = process.ended(END_S)
            assert ended.code == 0, ended.stderr
        assert (session.run_dir / COMPLETE).exists()
        assert session.remains() == []
        losses.append((session.run_dir / "losses.f32").read_bytes())
    assert losses[0] == losses[1] != b""
