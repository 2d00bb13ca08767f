"""examples/adopt/complete.py as a user runs it: to its end, killed and started again, and its model without rowcast."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.adopt.complete import open_clicks
from examples.adopt.inference import load
from tests.support.processes import ROOT

bce = torch.nn.functional.binary_cross_entropy_with_logits
COMMAND = [sys.executable, "-m", "examples.adopt.complete", "--epochs", "8"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path) -> list[str]:
    """Lines on standard output."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        COMMAND, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_until(folder: Path, beginning: str, number: signal.Signals) -> list[str]:
    """Lines up to the one that begins so; then the script is sent the signal, and ends."""
    folder.mkdir()
    lines: list[str] = []
    with subprocess.Popen(COMMAND, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith(beginning):
                process.send_signal(number)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_goes_on_where_it_was_killed_with_the_same_bits(
    number: signal.Signals, undisturbed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, lines = undisturbed
    begun = run_until(tmp_path / "killed", "epoch 1:", number)
    rest = run(tmp_path / "killed")
    shown = [line for line in begun if line.startswith("epoch")] + rest
    assert list(dict.fromkeys(shown)) == lines, "an epoch may be shown twice, with the same numbers"
    assert same_file(tmp_path / "killed" / "best.pt", folder / "best.pt")
    assert same_file(tmp_path / "killed" / "last.pt", folder / "last.pt")


def test_its_best_model_is_served_without_rowcast(undisturbed: tuple[Path, list[str]]) -> None:
    folder, lines = undisturbed
    code = (
        "import sys, examples.adopt.inference; print(sorted({'trainer', 'prefetcher', 'protocol'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    model, losses, samples = load(folder / "best.pt"), 0.0, 0
    with torch.no_grad():
        for batch in open_clicks()("eval", 0):
            logits = model(batch["dense"], batch["sparse"])
            losses += torch.nn.functional.binary_cross_entropy_with_logits(
                logits.double(), batch["labels"].double(), reduction="sum"
            ).item()
            samples += len(logits)
    assert f"best validation loss {losses / samples:.6f}," in lines[-1]
