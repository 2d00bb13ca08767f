"""docs/data.md is run as it stands: its commands, its Python, its numbers."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job, parse_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.trainer.report.report_json import read_report
from tests.support.data_files import all_samples

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "data.md").read_text()
NUM_ROWS = 1500
COMMANDS = """
rowcast() { "$PYTHON" -m rowcast "$@"; }
prefetcher() { "$PYTHON" -m rowcast.prefetcher "$@"; }
python() { "$PYTHON" "$@"; }
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a clicks.csv that begins as the page shows."""
    rng = np.random.default_rng(2)
    user, item = rng.integers(0, 80, NUM_ROWS), rng.integers(0, 50, NUM_ROWS)
    genres = np.array(["drama", "comedy", "drama|comedy", "war|drama", ""])[rng.integers(0, 5, NUM_ROWS)]
    frame = pd.DataFrame(
        {
            "time": pd.date_range("2024-03-01", periods=NUM_ROWS, freq="7s"),
            "user": [f"u{number}" for number in user],
            "item": [f"sku-{number}" for number in item],
            "genres": genres,
            "device": np.array(["ios", "web", "android"])[rng.integers(0, 3, NUM_ROWS)],
            "price": rng.lognormal(2, 1, NUM_ROWS).round(2),
            "clicked": (user + item) % 2,
        }
    )
    [shown] = blocks("")[:1]
    assert list(frame.columns) == shown.splitlines()[0].split(",")
    (tmp_path / "clicks.csv").write_text(shown + frame.to_csv(index=False, header=False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A block of commands in the folder, with metrics on ports that are free."""
    ports = " --set metrics.prefetcher=127.0.0.1:0 --set metrics.trainer=127.0.0.1:0"
    script = re.sub(
        r"^(rowcast (train|check) --config job\.toml)",
        rf"\1{ports}",
        script,
        flags=re.MULTILINE,
    )
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euc", COMMANDS + script], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


def test_the_commands_train_a_model_on_the_csv_file(folder: Path) -> None:
    done = run(blocks("sh")[0], folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^time +left out +a timestamp is not a feature", done.stderr, re.MULTILINE)
    assert "0 errors" in done.stdout
    job = load_job(folder / "job.toml")
    assert job.data.columns.hash == ["user", "item", "genres", "device"]
    assert job.data.columns.lists == {"genres": "|"}
    report = read_report(folder / job.run_dir / "report.json")
    predicted = run(blocks("sh")[1], folder)
    assert predicted.returncode == 0, predicted.stderr
    scores, labels = (
        pd.read_csv(folder / "scores.csv")["probability"].to_numpy(),
        pd.read_csv(folder / "clicks.csv")["clicked"].to_numpy(),
    )
    held_out = slice(len(labels) - len(labels) // 10, None)
    losses = -np.log(np.where(labels == 1, scores, 1 - scores))
    best = min(own.logloss for own in report.evaluations if own.logloss is not None)
    assert best == pytest.approx(losses[held_out].mean(), abs=1e-5), "the best evaluation of the run"


def test_the_python_of_the_page_makes_files_that_jobs_are_written_for(folder: Path) -> None:
    _, pandas_way, _ = blocks("python")
    exec(pandas_way, {})
    assert len(pandas_way.splitlines()) <= 15
    shown = tomllib.loads(blocks("toml")[0])
    result, columns = CliRunner().invoke(app, ["new", "--data", "clicks.parquet"]), shown["data"]["columns"]
    assert result.exit_code == 0, result.stderr
    found = tomllib.loads(result.stdout)
    assert columns == {name: found["data"]["columns"][name] for name in columns}
    assert "hour" in {feature for table in found["tables"] for feature in table["features"]}
    reader = open_reader(parse_job(found))
    assert sum(batch.size for batch in reader.batches("train", 0)) == NUM_ROWS + 2 - (NUM_ROWS + 2) // 10
    written = tomllib.loads(CliRunner().invoke(app, ["new", "--data", "clicks.parquet"]).stdout)["data"]
    keys = set(shown["data"]) - {"columns"}
    assert {name: shown["data"][name] for name in keys} == {name: written[name] for name in keys}


def test_the_clocks_of_the_page_are_those_of_the_file(folder: Path) -> None:
    [shown] = [tomllib.loads(block) for block in blocks("toml") if "clock" in block]
    data = {"format": "csv", "path": "clicks.csv", "batch_size": NUM_ROWS + 2, "columns": shown["data"]["columns"]}
    content = {"job": {"run_dir": "unused"}, "data": data, "tables": shown["tables"], "cache": {"capacity": "1MiB"}}
    content["tables"] += [shown["tables"][0] | {"name": name, "features": [name]} for name in ("weekday", "item")]
    content |= {"model": {"kind": "dlrm", "bottom_mlp": [16], "top_mlp": [1]}}
    content["optimizer"] = {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}}
    [batch] = open_reader(parse_job(content)).batches("train", 0)
    hours = pd.to_datetime(pd.read_csv("clicks.csv")["time"]).dt
    features = batch.ids.reshape(3, batch.size)
    assert (features[0] == hours.hour + 1).all()
    assert (features[1] == hours.day_of_week + 1).all()
    assert (batch.dense[:, 0] == (hours.normalize() - pd.Timestamp("2024-03-01")).dt.days).all()


def test_the_rule_of_the_page_gives_the_rows_of_a_run(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[-1], names)
    row = names["row"]
    assert callable(row)
    words, numbers = ["ann", "bob", None, "ünï", "ann"], [7, None, -1, 2**40, 0]
    pq.write_table(
        pa.table({"label": [0, 1, 0, 1, 0], "int_0": [0.5] * 5, "user": words, "item": numbers}), tmp_path / "a.parquet"
    )
    content = {
        "job": {"run_dir": "unused"},
        "data": {"format": "parquet", "path": str(tmp_path), "columns": {"hash": True}},
        "tables": [
            {"name": name, "num_embeddings": rows, "embedding_dim": 4, "features": [name]}
            for name, rows in (("user", 10_000), ("item", 77))
        ],
        "model": {"bottom_mlp": [4], "top_mlp": [1]},
        "optimizer": {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "1MiB"},
    }
    found = [own.ids for own in all_samples(open_reader(parse_job(content)).batches("train", 0))]
    users = [0 if word is None else row(word.encode(), 10_000) for word in words]
    items = [0 if number is None else row(number.to_bytes(8, "little", signed=True), 77) for number in numbers]
    assert found == [((user,), (item,)) for user, item in zip(users, items, strict=True)]
