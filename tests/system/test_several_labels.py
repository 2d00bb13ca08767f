"""Several labels a sample, some of them unknown: the bits of the plain loop, evaluations by label, MMoE."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.session import PREFETCHER
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.model_state import unpack
from rowcast.trainer.report.report_json import read_report
from tests.hostile.peers import HostileRun
from tests.support.batches import NUM_DENSE, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.processes import Session
from tests.system import test_ranks
from tests.system.test_own_data import TABLES, trained_as_the_plain_loop
from tests.system.test_ranks import ranked

ROOT = Path(__file__).parents[2]
TASKS = {"labels": ["click", "buy", "stay"]}
SMALL_MMOE = {"kind": "examples.mmoe:build", "options": {"num_experts": 2, "expert_mlp": [6, 5], "tower_mlp": [3]}}


def several_job(**sections: Any) -> Job:
    return small_job("adagrad", "multi", data={"columns": TASKS}, model=SMALL_MMOE, **sections)


@functools.cache
def workload() -> tuple[Job, list[ScheduledBatch]]:
    """The fourth train batch knows no label at all, the first evaluation batch none of the second."""
    job = several_job()
    batches = small_batches(job, "multi", num_steps=6, eval_at=(2, 5, 7))
    batches[4].batch.labels[:] = np.nan
    batches[2].batch.labels[:, 1] = np.nan
    return job, batches


def test_training_has_the_bits_of_the_plain_loop() -> None:
    job, batches = workload()
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    assert [loss == 0 for loss in losses] == [False, False, False, True, False, False]
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)


def test_any_number_of_ranks_has_the_bits_and_the_evaluations_of_one() -> None:
    job, batches = workload()
    expected, results = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 4), []
    for ranks in (1, 4):
        run = ranked(job, batches, ranks, 4, "everything", seed=ranks)
        test_ranks.assert_equal_bits(run, expected)
        results.append(run.pairs[-1].results.evaluations)
    assert results[0] == results[1]
    assert [task.label for task in results[0][0].tasks] == TASKS["labels"]
    assert results[0][0].tasks[1].auc is None, "no label of the first evaluation is known"
    assert all(task.auc is not None for evaluation in results[0][1:] for task in evaluation.tasks)


def test_the_plan_of_one_label_has_the_shape_it_always_had() -> None:
    shapes = {}
    for job in (small_job("sgd"), several_job()):
        batches = small_batches(job, "single", num_steps=1, eval_at=())
        run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
        shapes[job.data.columns.label_shape] = run.results.losses
        assert batches[0].batch.labels.shape == (batches[0].batch.size, *job.data.columns.label_shape)
    assert len(shapes) == 2


LIES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "one label": lambda shape: shape[:1],
    "a label too many": lambda shape: (shape[0], shape[1] + 1),
    "no label": lambda shape: (shape[0], 0),
    "the labels of one sample more": lambda shape: (shape[0] + 1, shape[1]),
    "another order": lambda shape: shape[::-1],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_with_other_labels_than_the_job_names_is_refused(lie: str) -> None:
    job, batches = workload()

    def changed(message: Any, content: Any) -> Any:
        if getattr(message, "plan", None) is None:
            return None
        arrays = tuple(
            msgspec.structs.replace(spec, shape=LIES[lie](spec.shape)) if spec.name == "labels" else spec
            for spec in message.plan.arrays
        )
        return msgspec.structs.replace(message, plan=msgspec.structs.replace(message.plan, arrays=arrays))

    liar = HostileRun(PREFETCHER, changed)
    settings = Settings(slots=slots_for(group_specs(job), batches, "more"), mirrored=True, links=liar.links)
    with pytest.raises(RemoteProtocolError, match=r"array labels should be f4 \(64, 3\)"):
        InProcessRun(job, batches, settings).run()
    assert liar.told


def test_a_checkpoint_of_one_label_holds_what_it_always_held() -> None:
    job = small_job("sgd")
    batches = small_batches(job, "single", num_steps=2, eval_at=(2,))
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    names = [name for name in unpack(run.saved[-1]) if name.startswith("metrics.")]
    assert sorted(names) == [f"metrics.{name}" for name in ("histogram", "loss_sum", "num_correct", "num_samples")]


def test_a_model_with_one_logit_is_refused_at_the_job_file() -> None:
    with pytest.raises(ConfigError, match="names 3 labels, and dcnv2 has one logit a sample; name one as"):
        small_job("sgd", data={"columns": TASKS}, model={"kind": "dcnv2", "bottom_mlp": [5], "top_mlp": [1]})


def test_real_labels_need_a_loss_of_the_models_own() -> None:
    job = small_job("sgd", data={"columns": {"label_values": "real"}})
    with pytest.raises(ConfigError, match='label_values = "real": binary cross entropy needs labels of 0 or 1'):
        JobModel(job, NUM_DENSE)


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
    session.write_job(data=data, tables=TABLES, model=SMALL_MMOE | {"bottom_mlp": None, "top_mlp": None})
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
            logits = side.forward(torch.tensor(batch.dense), embeddings, training=False)
            found.append((logits, torch.tensor(batch.labels)))
    return torch.cat([logits for logits, _ in found]), torch.cat([labels for _, labels in found])


def test_the_example_learns_both_labels() -> None:
    overrides = ("data.synthetic.samples=40000", "data.batch_size=512", "data.synthetic.scale=0.0001")
    job = load_job(ROOT / "examples" / "mmoe.toml", overrides)
    batches = list(schedule(job, open_reader(job)))
    slots = slots_for(group_specs(job), batches, "more")
    run = InProcessRun(job, batches, Settings(slots=slots, seeded_streams=False)).run()
    [evaluation] = run.results.evaluations
    assert [task.label for task in evaluation.tasks] == ["click", "buy"]
    assert all(task.auc is not None and task.auc > 0.6 for task in evaluation.tasks)
