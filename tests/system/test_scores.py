"""`rowcast score`: a prediction for each row of a file, in its order, with the bits of an evaluation."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv
from pyarrow import parquet as pq
from safetensors.torch import load_file

from examples.plain_loop import PlainTable
from rowcast.deploy.score import score
from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.parts import Rank, part_sizes
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.process import Signals
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.report.report_json import read_report
from rowcast.trainer.report.score_file import ScoreFile
from tests.support.batches import NUM_DENSE, SEVERAL_LABELS, small_job
from tests.support.evaluated import result_of
from tests.support.facts import facts
from tests.support.jobs import table
from tests.support.processes import Ended, Process, Session

NUM_ROWS = 1003  # no whole number of batches
LABELS = {"one": ["label"], "two": ["click", "buy"]}


def write_clicks(path: Path, seed: int, labels: list[str]) -> None:
    rng = np.random.default_rng(seed)
    users = np.array([f"u{number}" for number in rng.integers(0, 900, NUM_ROWS)])
    columns: dict[str, Any] = {"user": users, "item": rng.integers(0, 50, NUM_ROWS), "price": rng.random(NUM_ROWS)}
    write = csv.write_csv if path.suffix == ".csv" else pq.write_table
    write(pa.table(columns | {label: rng.integers(0, 2, NUM_ROWS) for label in labels}), path)


def write_job(session: Session, form: str, labels: list[str], **sections: Any) -> None:
    own = {"label": labels[0]} if len(labels) == 1 else {"labels": labels}
    session.write_job(
        data={
            "format": form,
            "path": str(session.folder / f"clicks.{form}"),
            "columns": {**own, "dense": ["price"], "hash": ["user"]},
            "shuffle": "window:300",
            "synthetic": None,
        },
        tables=[table("user", 3000, 4), table("item", 50, 4)],
        **sections,
    )


def start_scoring(session: Session, run_dir: Path, data: Path, out: Path, *options: str) -> Process:
    return session.start_module(
        "rowcast", "score", f"--run={run_dir}", f"--data={data}", f"--out={out}", f"--config={session.config}", *options
    )


def scored(session: Session, data: Path, out: Path, *options: str) -> Ended:
    return start_scoring(session, session.run_dir, data, out, *options).ended()


@torch.no_grad()
def plain_logits(session: Session, data: Path, parts: int) -> torch.Tensor:
    """By the exported model in plain PyTorch, in the order of the file."""
    job = load_job(session.config, (f"data.path={data}", "data.shuffle=none", "data.columns.label_values=none"))
    session.export(session.folder / "end").quiet()
    tensors = load_file(session.folder / "end")
    side = JobModel(job, 1, needs_labels=False)
    side.model.load_state_dict({name: tensors[name] for name in side.model.state_dict()})
    tables = [PlainTable(own, job.features.index(own.features[0]), job, tensors) for own in job.tables]
    found = []
    for batch in open_reader(job).batches("train", 0):
        sizes = part_sizes(batch.size, Rank(number=0, count=1, parts=parts))
        pooled = [torch.as_tensor(feature) for own in tables for feature in own.forward(batch)]
        features = [torch.split_with_sizes(own, sizes) for own in (torch.tensor(batch.dense), *pooled)]
        for dense, *embeddings in zip(*features, strict=True):
            found.append(side.forward(dense.clone(), [own.clone() for own in embeddings], {}, training=False))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("form", "labels", "parts", "model"),
    [
        ("csv", LABELS["one"], 2, {}),
        ("parquet", LABELS["two"], 1, SEVERAL_LABELS["model"] | {"bottom_mlp": None, "top_mlp": None}),
    ],
    ids=["parts", "labels"],
)
def test_scores_are_the_predictions_of_an_evaluation_row_by_row(
    form: str, labels: list[str], parts: int, model: dict[str, Any], session: Session
) -> None:
    write_clicks(session.folder / f"clicks.{form}", 1, labels)
    write_job(session, form, labels, model=model, ranks={"parts": parts})
    session.start("train").ended().quiet()
    new, labelled = session.folder / f"new.{form}", session.folder / f"labelled.{form}"
    write_clicks(new, 2, [])
    write_clicks(labelled, 2, labels)

    as_parquet, as_csv = session.folder / "scores.parquet", session.folder / "scores.csv"
    said = scored(session, new, as_parquet).quiet().stdout
    assert said.splitlines()[-1] == f"scored 1,003 rows of {new} to {as_parquet}, by the model after 16 train steps"
    said = scored(session, labelled, as_csv, "--probability").quiet().stdout
    assert f"scored 1,003 rows of {labelled} to {as_csv}, " in said
    columns = pq.read_table(as_parquet)
    assert columns.column_names == (["logit"] if len(labels) == 1 else ["click_logit", "buy_logit"])
    header = as_csv.read_text().partition("\n")[0]
    assert header == ('"probability"' if len(labels) == 1 else '"click_probability","buy_probability"')
    scores = np.stack([column.to_numpy() for column in columns.columns], axis=1)
    assert scores.dtype == np.float32
    likely = np.loadtxt(as_csv, np.float32, delimiter=",", skiprows=1, ndmin=2)
    np.testing.assert_allclose(likely, torch.sigmoid(torch.tensor(scores).double()).numpy(), rtol=1e-7)

    found = torch.tensor(scores if len(labels) > 1 else scores[:, 0])
    assert torch.equal(plain_logits(session, new, parts).view(torch.int32), found.view(torch.int32))
    session.start("train", "--eval", f"--set=data.eval_path={labelled}").ended().quiet()
    evaluated = read_report(session.run_dir / "eval.json")
    metrics = EvalMetrics(num_labels=0 if len(labels) == 1 else len(labels))
    known = csv.read_csv(labelled) if form == "csv" else pq.read_table(labelled)
    of_rows = np.stack([known[label].to_numpy() for label in labels], axis=1).astype(np.float32)
    metrics.update(found, torch.tensor(of_rows if len(labels) > 1 else of_rows[:, 0]))
    result = result_of(metrics)
    assert (evaluated.auc, evaluated.accuracy) == (result.auc, result.accuracy)
    assert evaluated.logloss == pytest.approx(result.logloss, rel=1e-12)


MODELS = {
    **dict.fromkeys(["dropout_model", "signed_model"], "logit"),
    **dict.fromkeys(["hinge_model", "two_tower_model"], "score"),
    "priced_model": "price",
}


@pytest.mark.parametrize("labels", [[], ["click", "buy"]], ids=["one", "two"])
@pytest.mark.parametrize("probability", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_columns_say_what_the_model_gives(model: str, probability: bool, labels: list[str], tmp_path: Path) -> None:
    name = JobModel(small_job("sgd", model={"kind": f"tests.system.odd_models:{model}"}), NUM_DENSE).score_name
    assert name == MODELS[model]
    file = ScoreFile(tmp_path / "scores.parquet", labels, probability=probability)
    if probability and name != "logit":
        with pytest.raises(ConfigError, match=facts("--probability", repr(name), "logits(outputs)")):
            file.begin(name)
        return
    file.begin(name)
    logits = np.array([[0.0, -800.0, 800.0, np.nan]] * max(1, len(labels)), np.float32).T
    file.write(logits)
    file.finish()
    own, found = "probability" if probability else name, pq.read_table(tmp_path / "scores.parquet")
    assert found.column_names == ([own] if not labels else [f"click_{own}", f"buy_{own}"])
    for column, values in zip(found.columns, logits.T, strict=True):
        expected = np.array([0.5, 0, 1, np.nan], np.float32) if probability else values
        np.testing.assert_array_equal(column.to_numpy(), expected)


def with_names(path: Path, seed: int, names: str, labels: list[str]) -> None:
    """Clicks whose dense columns have these names, all with the values of one."""
    write_clicks(path, seed, labels)
    own = csv.read_csv(path)
    price = own.column("price")
    named = own.drop_columns(["price"])
    for name in names.split():
        named = named.append_column(name, price)
    csv.write_csv(named, path)


def test_only_the_dense_columns_that_were_trained_on_are_scored_and_evaluated(session: Session) -> None:
    with_names(session.folder / "clicks.csv", 1, "int_0 int_3", ["label"])
    write_job(session, "csv", ["label"])
    session.config.write_text(session.config.read_text().replace('dense = ["price"], ', ""))
    assert load_job(session.config).data.columns.dense is None
    session.start("train").ended().quiet()
    new, out = session.folder / "new.csv", session.folder / "scores.csv"
    with_names(new, 2, "int_0 int_1", ["label"])
    refused = scored(session, new, out)
    assert refused.code == 5
    assert re.search(facts("dense columns", "int_1 instead of int_3"), refused.sentences[-1])
    assert not out.exists()
    evaluated = session.start("train", "--eval", f"--set=data.eval_path={new}").ended()
    assert evaluated.code == 4
    assert re.search(facts("data.eval_path", "int_1 instead of int_3", "data.path"), evaluated.stderr)
    with_names(new, 2, "int_3 int_0", [])
    scored(session, new, out).quiet()


DENSE, ROWS = "dense-*", "fp32*"


def flipped(path: Path) -> Callable[[], None]:
    """Flips a bit in the middle of a file. Returns what flips it back."""

    def flip() -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    flip()
    return flip


def test_a_damaged_newest_checkpoint_is_refused_at_every_door_and_the_next_whole_one_named(session: Session) -> None:
    write_clicks(session.folder / "clicks.csv", 1, ["label"])
    write_job(session, "csv", ["label"], checkpoint={"every": 8, "keep": 2})
    session.start("train").ended().quiet()
    checkpoints = Checkpoints(session.run_dir, Disk())
    chosen = checkpoints.choose(None)
    assert checkpoints.choose(f"{chosen.name}@{chosen.checksum}") == chosen
    with pytest.raises(DataError, match=facts(chosen.name, "replaced")):
        checkpoints.choose(f"{chosen.name}@{'0' * 16}")
    older, newest = sorted((session.run_dir / "checkpoints").glob("step-*"))
    write_clicks(session.folder / "new.csv", 2, [])
    out = session.folder / "scores.csv"
    for pattern in (DENSE, ROWS):
        (file,) = newest.glob(pattern)
        back = flipped(file)
        for door in (
            scored(session, session.folder / "new.csv", out),
            session.start("train", "--eval").ended(),
            session.export(session.folder / "end"),
        ):
            sentence = door.sentences[-1]
            assert door.code == 4
            assert str(file) in sentence
            assert f"the next whole one is {older.name}, for --checkpoint" in sentence
        assert {path.name for path in session.folder.iterdir()} & {"scores.csv", "end"} == set()
        back()
    flipped(newest / "manifest.json")
    named = scored(session, session.folder / "new.csv", out, f"--checkpoint={older.name}").quiet().stdout
    assert named.splitlines()[-1].endswith(", by the model after 8 train steps")


def test_files_beside_the_scores_stay_and_two_scorings_of_one_name_do_not_mix(session: Session) -> None:
    write_clicks(session.folder / "clicks.csv", 1, ["label"])
    write_job(session, "csv", ["label"])
    session.start("train").ended().quiet()
    write_clicks(session.folder / "new.csv", 2, [])
    (session.folder / "bad.csv").write_text("user,price\nu1,0.5\n")
    theirs = [session.folder / f"{name}.partial" for name in ("alone.csv", "both.csv", "end")]
    for path in theirs:
        path.write_text("a user's")
    alone, both = session.folder / "alone.csv", session.folder / "both.csv"
    bad = scored(session, session.folder / "bad.csv", alone)
    assert (bad.code, list(session.folder.glob("alone.csv"))) == (2, [])
    assert "the prefetcher" in bad.sentences[-1]
    assert f"feature item is not in {session.folder / 'bad.csv'}" in bad.sentences[-1]
    scored(session, session.folder / "new.csv", alone).quiet()
    shutil.copytree(session.run_dir, session.folder / "copy")
    runs = [
        start_scoring(session, run, session.folder / "new.csv", both)
        for run in (session.run_dir, session.folder / "copy")
    ]
    codes = sorted(run.ended().code for run in runs)
    assert codes in ([0, 0], [0, 2]), "the second one is refused if the first has ended"
    assert both.read_bytes() == alone.read_bytes()
    session.export(session.folder / "end").quiet()
    assert [path.read_text() for path in theirs] == ["a user's"] * len(theirs)
    assert {path for path in session.folder.iterdir() if path.name.endswith(".partial")} == set(theirs)
    assert not list(session.folder.glob(".*"))


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("scores.txt", "the name must end in .csv or .parquet"),
        ("there.csv", "exists; remove it, or give another name"),
        ("no/scores.csv", "does not exist; make it"),
        ("scores.csv", facts("no checkpoint")),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(out: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "there.csv").touch()
    with pytest.raises(ConfigError, match=sentence) as refused:
        score(run=tmp_path, data=tmp_path / "new.csv", out=tmp_path / out)(Signals())
    assert str(tmp_path) in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["there.csv"]
