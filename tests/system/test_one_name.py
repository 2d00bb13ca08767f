"""rowcast beside modules of the user's own that have the names of its parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = ("trainer", "protocol", "deploy", "prefetcher", "runtime", "job", "analysis")
DATA = """
import numpy as np
import rowcast

def batches(job, count=8):
    def read(split, epoch):
        rng = np.random.default_rng(epoch)
        for _ in range(count):
            ids = rng.integers(0, 50, 32)
            yield rowcast.Batch(dense=np.zeros((32, 2), np.float32), labels=(ids % 2).astype(np.float32), ids=ids)
    return read
"""
MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, dense, embeddings):
        return self.layer(embeddings[0]).squeeze(1)

def build(job, num_dense):
    return Model()
"""
SCRIPT = """
import torch
import rowcast

model = torch.nn.Sequential(torch.nn.Embedding(5000, 4), torch.nn.Linear(4, 1))
rowcast.adopt(model, capacity="1000 rows")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for ids in torch.utils.data.DataLoader(torch.arange(800), 32, shuffle=True):
    loss = model(ids).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""
JOB = """
job.run_dir = "runs/own"
data = { format = "trainer:batches", batch_size = 32 }
tables = [{ name = "t", num_embeddings = 50, embedding_dim = 4, features = ["f"] }]
model.kind = "protocol:build"
optimizer = { sparse = { kind = "sgd", lr = 0.1 }, dense = { kind = "sgd", lr = 0.1 } }
cache.capacity = "20KB"
metrics = { prefetcher = "127.0.0.1:0", trainer = "127.0.0.1:0" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder whose modules have the names of rowcast's parts."""
    for name in OWN:
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    (tmp_path / "trainer.py").write_text(DATA)
    (tmp_path / "protocol.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    installed = tmp_path / "installed"  # as a wheel has it: one name
    installed.mkdir()
    (installed / "rowcast").symlink_to(ROOT / "rowcast")
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "installed"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    return output


def test_a_script_beside_modules_named_like_ours_trains(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    assert "trained\n" in said(start(folder, "script.py"))


def test_both_commands_find_factories_in_modules_named_like_ours(folder: Path) -> None:
    commands = ("rowcast.command_line.prefetcher", "rowcast.command_line.trainer")
    both = [
        start(folder, "-P", "-c", f"from {name} import app; app()", "run", "--config", "job.toml") for name in commands
    ]
    for process in both:
        said(process)
    assert (folder / "runs" / "own" / "report.json").exists()
