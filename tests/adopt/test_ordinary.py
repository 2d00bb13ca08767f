"""An ordinary script with what such scripts have around a loop, as it was and adopted: what changes, and both train."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import torch

from examples.adopt import ordinary

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
from pathlib import Path
import torch
from examples.adopt.{name} import train
folder = Path.cwd()
torch.save(train(1, folder, folder / "{start}", samples=600), folder / "{name}.losses")
"""


def losses(name: str, start: str, folder: Path) -> torch.Tensor:
    """Of one epoch of six steps, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN.format(name=name, start=start)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.tensor(torch.load(folder / f"{name}.losses"))


def test_an_ordinary_script_trains_alike_when_it_is_adopted(tmp_path: Path) -> None:
    """The adopted one trains its small tables by Adam, and the rows' rate falls by step: later losses are not equal."""
    torch.manual_seed(1)
    state = ordinary.Model().state_dict()
    torch.save(state, tmp_path / "plain.pt")
    renamed = {name.replace("bags.", "bags.embedding_bags.", 1): tensor for name, tensor in state.items()}
    torch.save(renamed, tmp_path / "adopted.pt")
    plain = losses("ordinary", "plain.pt", tmp_path)
    adopted = losses("ordinary_adopted", "adopted.pt", tmp_path)
    assert len(plain) == len(adopted) == 6
    torch.testing.assert_close(adopted[0], plain[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(adopted, plain, rtol=0, atol=0.02)
    assert set(torch.load(tmp_path / "best.pt")) == set(renamed)


def test_the_page_says_how_many_lines_of_an_ordinary_script_change() -> None:
    plain, adopted = (
        (ROOT / "examples" / "adopt" / f"{name}.py").read_text().splitlines()
        for name in ("ordinary", "ordinary_adopted")
    )
    changes = [line[0] for line in list(difflib.unified_diff(plain, adopted, n=0))[2:]]
    sentence = f"{changes.count('+')} lines are added and {changes.count('-')} removed"
    assert sentence in " ".join((ROOT / "docs" / "connect.md").read_text().split())
