"""Restarts on this device: a trainer, a prefetcher or both are killed, and the run ends with the same bits.

The run has two groups of tables, a model that draws random numbers, evaluations, and a checkpoint every 4 steps. A
trainer that waits for a new prefetcher makes its second cache on a device that held the first.
"""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import threads_of
from tests.recovery.restarted import Outcome, Recovering, Role, end_well, killed
from tests.support.processes import Session

REJOIN = {"ring": "1MiB", "connect_timeout": "90s", "rejoin_timeout": "90s"}
ARMED: dict[Role, str] = {"prefetcher": "PlanReady sent:24", "trainer": "loss written:10"}
CASES: dict[str, tuple[Role, ...]] = {  # who is killed: the first by itself, at a point; then the one that waits
    "nothing is killed": (),
    "the prefetcher is killed": ("prefetcher",),
    "both are killed": ("trainer", "prefetcher"),
    "the trainer is killed": ("trainer",),
}
GUESS_S = 30.0  # one run takes about this long


def check_recovery(findings: Findings, device: torch.device, folder: Path) -> None:
    expected: list[Outcome] = []

    def run(name: str, killed_roles: tuple[Role, ...]) -> dict[str, Any]:
        own = folder / name
        own.mkdir()
        with Session(own) as session:
            job = Recovering(session, transport=REJOIN, trainer={"device": str(device), "threads": threads_of(device)})
            processes = job.start_both({role: ARMED[role] for role in killed_roles[:1]})
            for role in killed_roles[:1]:
                killed(processes[role])
            for role in killed_roles[1:]:
                processes[role].insist(signal.SIGKILL)
                processes[role].reap()
            for role in killed_roles:
                processes[role] = job.start(role)
            end_well(*processes.values())
            outcome = job.finish()
        expected.append(outcome)
        differs = outcome.differs(expected[0])
        return {"train_steps": outcome.train_steps, "starts": job.num_starts, "differs": differs, "passed": not differs}

    for name, roles in CASES.items():
        if expected or not roles:
            findings.item(name, partial(run, name, roles), "run", GUESS_S)
