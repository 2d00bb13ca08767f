"""Own Parquet and CSV files with two real processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from tests.support.driver import start_state
from tests.support.processes import Session

TABLES = [
    {"name": "user", "num_embeddings": 300, "embedding_dim": 4, "features": ["user"]},
    {"name": "item", "num_embeddings": 50, "embedding_dim": 4, "features": ["item"]},
]


def test_a_job_without_dense_features_gives_the_plain_loops_bits_and_no_warning(
    session: Session, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    columns = {"label": rng.integers(0, 2, 1000), "user": rng.integers(0, 300, 1000), "item": rng.integers(0, 50, 1000)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    data: dict[str, Any] = {
        "format": "parquet",
        "path": str(tmp_path / "clicks.parquet"),
        "columns": {"dense": []},
        "synthetic": None,
    }
    session.write_job(data=data, tables=TABLES, checkpoint={"every": 5})
    assert "Warning" not in trained_as_the_plain_loop(session, num_dense=0)


def test_a_csv_file_with_text_lists_and_missing_ids_gives_the_bits_of_the_plain_loop(
    session: Session, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    users = np.array(["ann", '"bob, b."', "", "ünï"])[rng.integers(0, 4, 1000)]
    items = ["|".join(map(str, rng.integers(0, 50, count))) for count in rng.integers(0, 4, 1000)]
    rows = (f"{i % 2},{i / 7},{user},{item}\n" for i, (user, item) in enumerate(zip(users, items, strict=True)))
    (tmp_path / "clicks.csv").write_text("label,int_0,user,item\n" + "".join(rows))
    columns = {"hash": ["user"], "lists": {"item": "|"}}
    data: dict[str, Any] = {
        "format": "csv",
        "path": str(tmp_path),
        "columns": columns,
        "eval_fraction": 0.1,
        "synthetic": None,
    }
    session.write_job(data=data | {"shuffle": "window:300"}, tables=TABLES, prefetcher={"workers": 2})
    trained_as_the_plain_loop(session, num_dense=1)


def trained_as_the_plain_loop(session: Session, num_dense: int) -> str:
    """What the trainer said of a run of the session's job, whose bits were compared."""
    job = load_job(session.config)
    losses, plain = run_plain_loop(job, start_state(job, num_dense), list(schedule(job, open_reader(job))))
    prefetcher, trainer = session.start_both()
    said = trainer.ended().quiet().stderr
    prefetcher.ended().quiet()
    session.export(session.folder / "end").quiet()
    assert (session.run_dir / "losses.f32").read_bytes() == np.array(losses, np.float32).tobytes()
    end = load_file(session.folder / "end")
    assert plain.keys() <= end.keys()
    assert all(torch.equal(end[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in plain.items())
    return said


def test_null_ids_that_take_row_0_are_counted_at_the_end_of_the_run(session: Session, tmp_path: Path) -> None:
    columns = {"label": [0, 1] * 100, "int_0": [0.5] * 200, "user": [1, None, 2, 3] * 50}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    data = {"format": "parquet", "path": str(tmp_path / "clicks.parquet"), "on_invalid_id": "zero", "synthetic": None}
    session.write_job(
        data=data, tables=[{"name": "user", "num_embeddings": 4, "embedding_dim": 4, "features": ["user"]}]
    )
    prefetcher, trainer = session.start_both()
    trainer.ended().quiet()
    assert "invalid_ids=50" in prefetcher.ended().quiet().stderr
