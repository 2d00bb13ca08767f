"""Same seed, same bits, with real processes: HSTU and DLRM with `ranks.parts = 4`, new runs on 1, 2 and 4 trainers.

All runs of a model end with one sha256 of all that was trained. Each trainer needs a device of its own.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.commands import command
from benchmarks.gpu_check.findings import Findings
from benchmarks.same_bits import trained

TRAINERS, PARTS = (1, 2, 4), 4
STEPS, RUNS = {"cpu": 4, "cuda": 40}, {"cpu": 1, "cuda": 3}
SMALL = ["data.synthetic.scale=0.005", "data.batch_size=256", "model.bottom_mlp=[16, 128]", "model.top_mlp=[16, 1]"]
DLRM: dict[str, list[str]] = {"cpu": SMALL, "cuda": []}
OWNERS, ITEMS, EVENTS = 400, 1000, 20_000
GUESS_S = 20.0  # a run takes about this long


def made_log(folder: Path) -> Path:
    """Writes purchases at random, and their histories as `examples/hstu.toml` reads them."""
    rng, log = np.random.default_rng(1), folder / "log.parquet"
    times = np.datetime64("2026-01-01", "s") + np.sort(rng.integers(0, 10**7, EVENTS))
    columns = {"owner": rng.integers(0, OWNERS, EVENTS), "item": rng.integers(0, ITEMS, EVENTS), "time": times}
    pq.write_table(pa.table(columns), log)
    names = ["--owner", "owner", "--item", "item", "--time", "time"]
    command("examples.next_item", str(log), *names, "--out", str(folder / "next-item"))
    return folder / "next-item"


def check_same_seed(findings: Findings, device: torch.device, folder: Path) -> None:
    kind, data = device.type, made_log(folder)
    history = [f'data.path="{data}/train.parquet"', f'data.eval_path="{data}/eval.parquet"']
    jobs = {"dlrm": (Path("benchmarks/jobs/dlrm.toml"), DLRM[kind]), "hstu": (Path("examples/hstu.toml"), history)}
    first: dict[str, str] = {}

    def run(model: str, trainers: int) -> dict[str, Any]:
        config, settings = jobs[model]
        own = [*settings, f'trainer.device="{kind}"']
        digest = trained(config, own, STEPS[kind], trainers, PARTS)
        return {"sha256": digest, "passed": digest == first.setdefault(model, digest)}

    has = torch.cuda.device_count() if kind == "cuda" else max(TRAINERS)
    for trainers, number, model in product(TRAINERS, range(RUNS[kind]), jobs):
        name = f"{model}, {trainers} trainers, run {number + 1}"
        if trainers > has:
            findings.not_here(name, f"needs {trainers} devices, and {has} are here")
        else:
            findings.item(name, partial(run, model, trainers), "run", GUESS_S)
