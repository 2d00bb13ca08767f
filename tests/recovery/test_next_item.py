"""The job files of SASRec and HSTU: a stop and a kill inside evaluations change no bit, and no HR, NDCG or MRR."""

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from tests.recovery.restarted import ROLES, Outcome, Recovering, Role, end_well
from tests.support.processes import ROOT, Session
from tests.support.repeats import count
from tests.support.starter import Starter

OWNERS, BATCH_SIZE = 300, 16
LAST = {"prefetcher": "PlanReady sent", "trainer": "step computed"}  # the last crash point of a step in each process
MODELS = ["sasrec", "hstu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next-item")
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(OWNERS), rng.integers(5, 20, OWNERS))
    item = rng.integers(0, 60, len(owner)) ** 2 // 60
    log = pa.table({"who": owner, "what": item, "when": np.cumsum(rng.integers(0, 5_000, len(owner)))})
    pq.write_table(log, folder / "log.parquet")
    columns = ("--owner", "who", "--item", "what", "--time", "when", "--out", str(folder))
    command = [sys.executable, "-m", "examples.next_item", str(folder / "log.parquet"), *columns]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=ROOT)
    return folder


def recovering(session: Session, model: str, folder: Path) -> Recovering:
    """The example's job, on small data and with small batches."""
    run = Recovering(session)
    run.options = []
    own = tomllib.loads((ROOT / "examples" / f"{model}.toml").read_text())
    paths = {"path": str(folder / "train.parquet"), "eval_path": str(folder / "eval.parquet")}
    own["job"] = {"name": model}
    own["data"] |= {**paths, "batch_size": BATCH_SIZE, "epochs": 1, "synthetic": None}
    own["model"] |= {"bottom_mlp": None, "top_mlp": None}
    session.write_job(**own, eval={"every": 10}, checkpoint={"every": 8})
    return run


@pytest.fixture(scope="module")
def unhindered(tmp_path_factory: pytest.TempPathFactory, folder: Path, starter: Starter) -> dict[str, Outcome]:
    found = {}
    for model in MODELS:
        with Session(tmp_path_factory.mktemp(model), starter.launch) as session:
            run = recovering(session, model, folder)
            found[model] = run.finish()
            assert run.num_starts == 2, "nothing was disturbed"
            assert {"hr@10", "ndcg@10", "mrr@10"} <= set(found[model].ranking)
    return found


def armed(rng: random.Random, step: int, number: str) -> dict[Role, str]:
    """One of the two gets the signal at its last crash point of a step, counted from its start."""
    role: Role = rng.choice(ROLES)
    return {role: f"{LAST[role]}:{step + 1}:{number}"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(count(1, 10)))
def test_a_stop_and_a_kill_inside_evaluations_change_nothing(
    seed: int, model: str, tmp_path: Path, folder: Path, starter: Starter, unhindered: dict[str, Outcome]
) -> None:
    rng = random.Random(seed)
    with Session(tmp_path, starter.launch) as session:
        run = recovering(session, model, folder)
        job = load_job(session.config)
        kinds = [scheduled.kind for scheduled in schedule(job, open_reader(job), None)]
        end_well(*run.start_both(armed(rng, kinds.index("eval") + rng.randrange(5), "SIGTERM")).values())
        stopped = session.manifest().position
        assert stopped.eval_batch, f"the checkpoint of the stop is outside of an evaluation: {stopped}"
        left = kinds[stopped.step :]
        inside = [step for step in range(1, len(left)) if left[step - 1] == left[step] == "eval"]
        run.crash(armed(rng, rng.choice(inside), "SIGKILL"))
        assert run.finish().differs(unhindered[model]) == []
