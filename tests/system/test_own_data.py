"""Own Parquet and CSV files with two real processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torchmetrics.functional.classification import binary_auroc

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.report.report_json import read_report
from tests.support.batches import SEVERAL_LABELS
from tests.support.driver import start_state
from tests.support.processes import Session

TABLES = [
    {"name": "user", "num_embeddings": 300, "embedding_dim": 4, "features": ["user"]},
    {"name": "item", "num_embeddings": 50, "embedding_dim": 4, "features": ["item"]},
]


@pytest.mark.parametrize("model", [{"kind": "dlrm"}, {"kind": "dcnv2", "cross_rank": 3}], ids=["dlrm", "dcnv2"])
def test_a_job_without_dense_features_gives_the_plain_loops_bits_and_no_warning(
    model: dict[str, Any], session: Session, tmp_path: Path
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
    session.write_job(data=data, tables=TABLES, model=model, checkpoint={"every": 5})
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


def test_two_processes_train_mmoe_on_a_file_with_unknown_labels(session: Session, tmp_path: Path) -> None:
    """To the plain loop's bits; the report has the AUC and the log loss of each label over its known samples."""
    rng = np.random.default_rng(1)
    buys = [None if unknown else bool(buy) for unknown, buy in rng.random((1000, 2)) < 0.5]
    columns = {
        "click": rng.integers(0, 2, 1000),
        "buy": pa.array(buys),
        "user": rng.integers(0, 300, 1000),
        "item": rng.integers(0, 50, 1000),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    data: dict[str, Any] = {
        "format": "parquet",
        "path": str(tmp_path / "clicks.parquet"),
        "columns": {"labels": ["click", "buy"], "dense": []},
        "eval_fraction": 0.2,
        "synthetic": None,
    }
    session.write_job(data=data, tables=TABLES, model=SEVERAL_LABELS["model"] | {"bottom_mlp": None, "top_mlp": None})
    said = trained_as_the_plain_loop(session, num_dense=0)
    report = read_report(session.run_dir / "report.json")
    logits, labels = evaluated(load_job(session.config), session)
    assert [task.label for task in report.tasks] == ["click", "buy"]
    total = 0.0
    for task, own_logits, own_labels in zip(report.tasks, logits.T, labels.T, strict=True):
        known = ~own_labels.isnan()
        assert task.num_labels == int(known.sum())
        assert task.auc == pytest.approx(float(binary_auroc(own_logits[known], own_labels[known].long())), abs=1e-3)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            own_logits[known].double(), own_labels[known].double(), reduction="none"
        )
        assert task.logloss == pytest.approx(losses.mean().item(), rel=1e-6)
        total += losses.sum().item()
    assert report.tasks[1].num_labels < report.tasks[0].num_labels == 200
    assert report.logloss == pytest.approx(total / labels.numel(), rel=1e-6)
    assert report.auc == pytest.approx(np.mean([task.auc for task in report.tasks]))
    page = (session.run_dir / "report.html").read_text(encoding="utf-8")
    assert all(f"AUC of {name}." in page and f"<dt>label {name}</dt>" in page for name in ("click", "buy"))
    assert "Warning" not in said


def evaluated(job: Job, session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the evaluation batches by the trained model in plain PyTorch, and their labels."""
    batches = list(schedule(job, open_reader(job)))
    _, end = run_plain_loop(job, start_state(job, 0), batches)
    side = JobModel(job, 0)
    side.model.load_state_dict({name: end[name] for name in side.model.state_dict()})
    tables = [PlainTable(own, job.features.index(own.features[0]), job.optimizer.sparse, end) for own in job.tables]
    found = []
    with torch.no_grad():
        for batch in (own.batch for own in batches if own.kind == "eval"):
            embeddings = [feature for table in tables for feature in table.forward(batch)]
            logits = side.forward(torch.tensor(batch.dense), embeddings, {}, training=False)
            found.append((logits, torch.tensor(batch.labels)))
    return torch.cat([logits for logits, _ in found]), torch.cat([labels for _, labels in found])


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
