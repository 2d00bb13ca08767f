"""examples/adopt/complete.py as a user runs it: to its end, killed and started again, and its model without rowcast."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.adopt.complete import clicks
from examples.adopt.inference import Model
from tests.support.processes import ROOT

COMMAND = [sys.executable, "-m", "examples.adopt.complete", "--epochs", "8"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path) -> list[str]:
    """Lines on standard output."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        COMMAND, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_until(folder: Path, beginning: str, later_s: float) -> list[str]:
    """Lines up to the one that begins so; some time later the script is killed."""
    lines: list[str] = []
    with subprocess.Popen(COMMAND, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith(beginning):
                time.sleep(later_s)
                process.send_signal(signal.SIGKILL)
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("complete")
    return folder, run(folder)


def same_file(first: Path, second: Path) -> bool:
    one, other = torch.load(first), torch.load(second)
    return list(one) == list(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_it_keeps_the_best_model_and_stops_early(undisturbed: tuple[Path, list[str]]) -> None:
    folder, lines = undisturbed
    losses = [float(line.split("validation loss ")[1].split(",")[0]) for line in lines if line.startswith("epoch")]
    best = int(np.argmin(losses))
    assert 0 < best == len(losses) - 3
    assert lines[-1] == f"best validation loss {losses[best]:.6f}, in epoch {best}"
    assert not same_file(folder / "best.pt", folder / "last.pt")


@pytest.mark.parametrize("later_s", [0.0, 0.2])
def test_it_goes_on_where_it_was_killed_with_the_same_bits(
    later_s: float, undisturbed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, lines = undisturbed
    shown = [line for epoch in (0, 2) for line in run_until(tmp_path, f"epoch {epoch}:", later_s)] + run(tmp_path)
    assert list(dict.fromkeys(shown)) == lines, "an epoch may be shown twice, with the same numbers"
    assert same_file(tmp_path / "best.pt", folder / "best.pt")
    assert same_file(tmp_path / "last.pt", folder / "last.pt")


def test_its_best_model_is_used_without_rowcast(undisturbed: tuple[Path, list[str]]) -> None:
    folder, lines = undisturbed
    code = "import sys, examples.adopt.inference; print('rowcast' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    model = Model()
    model.load_state_dict(torch.load(folder / "best.pt"))
    hour, ids, clicked = clicks("validation", 1000).tensors
    with torch.no_grad():
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(hour, ids).double(), clicked.double())
    shown = float(lines[-1].split("validation loss ")[1].split(",")[0])
    assert shown == pytest.approx(loss.item(), abs=2e-6)  # the script adds in f32
