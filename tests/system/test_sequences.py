"""Histories from Parquet with two real processes: the plain loop's bits, restarts, other commands on such a job."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_loop import run_plain_loop
from examples.sequence_data import NUM_CATEGORIES, make_sequences
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.trainer.report.report_json import read_report
from tests.support.driver import start_state
from tests.support.jobs import table
from tests.support.processes import Session

SECTIONS: dict[str, Any] = {
    "cache": {"capacity": "1300 rows"},
    "checkpoint": {"every": 5},
    "lookahead": {"depth": 2},
}


def assert_same_bits(end: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert plain.keys() <= end.keys()
    assert all(torch.equal(end[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in plain.items())


TABLES = {"item": (100_000, "past_items"), "category": (NUM_CATEGORIES, "past_categories")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "din": (
        "none",
        {
            "targets": {"past_items": "item", "past_categories": "category"},
            **{"attention_mlp": [5], "top_mlp": [8, 1], "history": 6},
        },
    ),
    "two-tower": (
        "mean",
        {
            "item_features": ["item", "category"],
            **{"user_mlp": [6, 5], "item_mlp": [5], "log_frequency": 1},
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_restarted_run_of_two_processes_has_the_bits_of_the_plain_loop(
    session: Session, tmp_path: Path, one_thread: None, kind: str
) -> None:
    pq.write_table(make_sequences(1000, seed=3), tmp_path / "sequences.parquet")
    pooling, model = MODELS[kind]
    session.write_job(
        data={
            **{"format": "parquet", "path": str(tmp_path / "sequences.parquet"), "eval_fraction": 0.1},
            **{"columns": {"dense": ["int_0", "log_frequency"]}, "synthetic": None},
        },
        tables=[
            *(table(name, rows, 4, name, past, pooling=pooling) for name, (rows, past) in TABLES.items()),
            table("user", 20_000, 4),
        ],
        model={"kind": kind, "bottom_mlp": None, "top_mlp": None, **model},
        **SECTIONS,
    )
    job = load_job(session.config)
    for options in (["--max-steps=7"], []):
        for process in session.start_both(*options):
            process.ended().quiet()
    session.export(tmp_path / "end").quiet()
    report = msgspec.to_builtins(read_report(session.run_dir / "report.json"))
    assert 0.0 <= report["auc"] <= 1.0
    losses, plain = run_plain_loop(job, start_state(job, 2), list(schedule(job, open_reader(job))))
    assert (session.run_dir / "losses.f32").read_bytes() == np.array(losses, np.float32).tobytes()
    assert_same_bits(load_file(tmp_path / "end"), plain)
    assert len(losses) == 15
    assert kind != "din" or plain["top_activations.0.running_var"].ne(1).all(), "running means are trained"
