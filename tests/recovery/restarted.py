"""A small run that is killed and started again until it is complete, and what it must have come to.

The run has about 20 train steps, a checkpoint every 4, and evaluations at other steps; its model draws random numbers,
and its tables have two widths. It reads the retail log where ROWCAST_RETAIL names its folder, else made data.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.runtime.crash_points import VARIABLE
from rowcast.runtime.disk import Disk
from rowcast.trainer.report.report_json import read_report
from tests.support.processes import Process, Session

Role = Literal["prefetcher", "trainer"]
ROLES: tuple[Role, Role] = ("prefetcher", "trainer")
KILLED, PEER_LOST = -9, 3
MOST_STARTS = 12
END_TIMEOUT_S = 90.0  # generous: nothing may hang
NUM_TRAIN, NUM_EVAL, BATCH_SIZE = 20, 3, 64

RETAIL = os.environ.get("ROWCAST_RETAIL")
MADE: dict[str, Any] = {
    "data": {"batch_size": BATCH_SIZE, "eval_fraction": NUM_EVAL / (NUM_TRAIN + NUM_EVAL)}
    | {"synthetic": {"samples": BATCH_SIZE * (NUM_TRAIN + NUM_EVAL)}},
    "tables": [
        {"name": "narrow", "num_embeddings": 2000, "embedding_dim": 4, "features": ["cat_0", "cat_1"]},
        {"name": "wide", "num_embeddings": 300, "embedding_dim": 8, "features": ["cat_2"]},
    ],
    "tables_from": None,
    "model": {"kind": "tests.recovery.parts:model", "bottom_mlp": None, "top_mlp": None},
    "cache": {"capacity": "16KiB"},
}
CARDINALITIES = [1460, 583, 101312, 220260, 305, 24, 12517, 633, 3, 93145, 5683, 83515, 3194]
CARDINALITIES += [27, 14992, 54613, 10, 5652, 2173, 4, 70465, 18, 15, 28618, 105, 14257]
LOG: dict[str, Any] = {
    "data": {
        "format": "criteo-tsv",
        "path": f"{RETAIL}/train.tsv",
        "batch_size": 256,
        "eval_fraction": 0.005,
        "synthetic": None,
    },
    "tables": None,
    "tables_from": {"cardinalities": CARDINALITIES, "embedding_dim": 8},
    "model": {"kind": "dlrm", "bottom_mlp": [16, 8], "top_mlp": [16, 1]},
    "cache": {"capacity": "256KiB"},
}
TIERED = {"kind": "tiered", "memory": "4800 rows" if RETAIL else "320 rows"}  # less than a group of tables has


def sections(**more: dict[str, Any]) -> dict[str, Any]:
    """The sections of a job file."""
    common = {
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05}, "dense": {"kind": "adam", "lr": 0.01}},
        "eval": {"every": 6},
        "checkpoint": {"every": 4, "keep": 2},
    }
    return {**(LOG if RETAIL else MADE), **common, **more}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a restart must not change, byte for byte."""

    losses: bytes
    export: bytes  # tables, optimizer state of the rows, dense weights
    dense: bytes  # of the last checkpoint: weights, optimizer state, random state, losses, evaluation
    evaluation: tuple[float | None, ...]  # the last one, as the report has it
    ranking: dict[str, float]  # its HR, NDCG and MRR
    train_steps: int

    def differs(self, other: "Outcome") -> list[str]:
        ours, theirs = vars(self), vars(other)
        return [name for name in ours if ours[name] != theirs[name]]


def outcome_of(run_dir: Path) -> Outcome:
    exported = run_dir / "export.safetensors"
    manifest = export_run(run_dir, exported)
    checkpoints = Checkpoints(run_dir, Disk())
    checkpoints.verify(manifest)
    report = read_report(run_dir / "report.json")
    assert manifest.finished
    assert report.finished
    return Outcome(
        losses=(run_dir / "losses.f32").read_bytes(),
        export=exported.read_bytes(),
        dense=b"".join(dense_content(checkpoints.root, manifest)),
        evaluation=(report.auc, report.logloss, report.accuracy),
        ranking=report.ranking,
        train_steps=report.train_steps,
    )


class Recovering:
    """A run in a session whose two commands are started again, always the same, until it is complete."""

    def __init__(self, session: Session, **more: dict[str, Any]) -> None:
        self.session = session
        self.num_starts = 0
        self.options = [f"--max-steps={NUM_TRAIN}"]  # of the prefetcher
        session.write_job(**sections(**more))

    @property
    def complete(self) -> bool:
        return (self.session.run_dir / "complete").exists()

    def start(self, role: Role, armed: str | None = None) -> Process:
        self.num_starts += 1
        assert self.num_starts <= 2 * MOST_STARTS, f"not complete after {MOST_STARTS} starts"
        options = self.options if role == "prefetcher" else []
        return self.session.start(role, *options, **({VARIABLE: armed} if armed else {}))

    def start_both(self, armed: Mapping[Role, str] | None = None) -> dict[Role, Process]:
        return {role: self.start(role, (armed or {}).get(role)) for role in ROLES}

    def crash(self, armed: Mapping[Role, str]) -> None:
        """Starts both; those that are armed kill themselves, and the others end because of it."""
        for role, process in self.start_both(armed).items():
            ended = process.ended(END_TIMEOUT_S)
            if role in armed:
                assert ended.code == KILLED, f"{armed[role]!r} was not reached: exit code {ended.code}\n{ended.stderr}"
            else:
                assert ended.code in (0, PEER_LOST), f"exit code {ended.code}\n{ended.stderr}"

    def finish(self) -> Outcome:
        """Starts both until the run is complete."""
        while not self.complete:
            end_well(*self.start_both().values())
        return outcome_of(self.session.run_dir)


def end_well(*processes: Process) -> None:
    for process in processes:
        ended = process.ended(END_TIMEOUT_S)
        assert ended.code == 0, f"exit code {ended.code}\n{ended.stderr}"


def killed(process: Process) -> None:
    """By itself, at the point that it was armed for."""
    ended = process.ended(END_TIMEOUT_S)
    assert ended.code == KILLED, f"exit code {ended.code} instead of {KILLED}\n{ended.stderr}"
