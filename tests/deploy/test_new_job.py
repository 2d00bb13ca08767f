"""`rowcast.new`: a frame, its file and `rowcast new` come to one job; what it proposes trains, and is compared."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet as pq
from typer.testing import CliRunner

import rowcast
from rowcast.command_line.rowcast import app
from rowcast.runtime.errors import ConfigError, DataError


def clicks() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"label": rng.integers(0, 2, 400), "price": rng.random(400)})
    return frame.assign(**{f"C{i}": [f"v{code}" for code in rng.integers(0, 5 * i, 400)] for i in range(1, 7)})


@pytest.fixture
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.chdir(tmp_path)
    return clicks()


def test_a_frame_and_its_file_have_the_job_of_the_command(frame: pd.DataFrame) -> None:
    of_frame = rowcast.new(frame, "label")
    [written] = Path("runs").iterdir()
    assert pq.read_table(written).to_pandas().equals(frame)
    command = CliRunner().invoke(app, ["new", "--data", str(written), "--label", "label"])
    assert of_frame.text == rowcast.new(written, "label").text == command.stdout
    assert repr(of_frame).splitlines() == [line.rstrip() for line in command.stderr.rstrip().splitlines()[:-4]]
    assert "C1 ... C6  ids" in repr(of_frame)
    rowcast.new(frame.rename(columns={"price": "cost"}), "label")
    assert len([*Path("runs").iterdir()]) == 2


def test_a_frame_is_trained_evaluated_and_compared(frame: pd.DataFrame) -> None:
    once = rowcast.train(frame, **{"label": "label", "data.epochs": 1})
    job = rowcast.new(frame, "label")
    job["data.epochs"], job["eval.patience"] = 2, 0
    twice = rowcast.train(job, **{"job.run_dir": "runs/twice"})
    assert (twice.job.data.epochs, len(twice.losses)) == (2, 2 * len(once.losses))
    last = twice.evaluate(frame[-40:])
    assert last in twice.evaluations
    table = rowcast.compare([once, twice]).to_pandas()
    assert table["run"].tolist() == [str(once.folder), *["runs/twice"] * 2]
    assert table["logloss"].tolist() == [own["logloss"] for run in (once, twice) for own in run.evaluations]


def test_what_is_no_job_is_refused_with_one_sentence(frame: pd.DataFrame) -> None:
    job = rowcast.new(frame, "label")
    with pytest.raises(ConfigError, match="epoch"):
        job["data.epoch"] = 2
    assert job.content() == rowcast.new(frame, "label").content()
    with pytest.raises(ConfigError, match="label"):
        rowcast.train(job, label="label")
    with pytest.raises(DataError, match="the frame has a column called 7; give every column a name of text"):
        rowcast.new(frame.rename(columns={"price": 7}), "label")
    with pytest.raises(DataError, match="give a pandas or polars frame"):
        rowcast.new(3)
    with pytest.raises(ConfigError, match="label"):
        rowcast.new(frame.drop(columns="label"))
