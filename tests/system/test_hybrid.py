"""The example of both parallelisms: any number of trainers has the plain loop's bits, and its job file scores."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.processes import ROOT, Session

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
NUM_ROWS, BATCH_SIZE = 640, 64


def write_clicks(path: Path) -> Path:
    rng = np.random.default_rng(5)
    past = [rng.integers(0, 1000, n) for n in rng.integers(0, 6, NUM_ROWS)]
    columns: dict[str, Any] = {"label": rng.integers(0, 2, NUM_ROWS).astype(np.float32)}
    columns |= {name: rng.random(NUM_ROWS, np.float32) for name in ("int_0", "log_frequency")}
    columns |= {"item": rng.integers(0, 1000, NUM_ROWS), "past_items": past, "user": rng.integers(0, 500, NUM_ROWS)}
    pq.write_table(pa.table(columns), path)
    return path


def test_one_then_two_then_four_trainers_have_the_plain_loops_bits_and_the_job_file_scores(session: Session) -> None:
    own = tomllib.loads((ROOT / "examples" / "hybrid.toml").read_text())
    own["data"] |= {"path": str(write_clicks(session.folder / "clicks.parquet")), "batch_size": BATCH_SIZE}
    own["data"] |= {"synthetic": None}
    own["model"] |= {"bottom_mlp": None, "top_mlp": None}
    own["optimizer"] |= {"dense": None}
    del own["job"]
    for ranks, steps in ((1, 3), (2, 6), (4, 9)):
        session.write_job(**own | {"ranks": {"count": ranks, "parts": 4}}, checkpoint={"every": 3})
        session.start("local", "--max-steps", str(steps)).ended(300).quiet()
        assert session.manifest().train_steps == steps
    assert_trained_as_the_plain_loop(session, 9, 4)
    scores, run = session.folder / "scores.csv", [f"--run={session.run_dir}", f"--config={session.config}"]
    data = f"--data={session.folder / 'clicks.parquet'}"
    session.start_module("rowcast", "score", *run, data, f"--out={scores}").ended(300).quiet()
    assert len(scores.read_text().splitlines()) == 1 + NUM_ROWS
