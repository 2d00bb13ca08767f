"""Scripts in the shapes of public ones train the same bits when they are adopted."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from examples.adopt.any.__main__ import SCRIPTS

CAPACITY = {  # less than the tables take
    "bare_parameters": "300 rows",
    "drawn_candidates": "700 rows",
    "fit_in_library": "40KB",
    "skip_gram": "800 rows",
    "sparse_bags": "500 rows",
    "weight_decay": "60KB",
}
PATCHES = Path(__file__).parents[2] / "examples" / "adopt" / "patches"
MOST_LINES = 5


def trained(script: str, capacity: str) -> dict[str, Any]:
    """What the script ends with, by name; bytes of tensors."""
    ended = import_module(f"examples.adopt.any.{script}").main(capacity)
    leaves = {"".join(map(str, path)): leaf for path, leaf in tree_flatten_with_path(ended)[0]}
    return {name: own.numpy().tobytes() if isinstance(own, Tensor) else own for name, own in leaves.items()}


@pytest.mark.usefixtures("let_go")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_the_same_bits_when_it_is_adopted(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trained(script, "")
    assert "adopted" not in capsys.readouterr().err
    adopted = trained(script, CAPACITY[script])
    assert "rows stay on the device" in capsys.readouterr().err
    assert plain.keys() == adopted.keys()
    assert [name for name, own in plain.items() if adopted[name] != own] == []


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_the_patches_of_public_scripts_are_short(patch: Path) -> None:
    changed = [line for line in patch.read_text().splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 2 <= len(changed) <= MOST_LINES
    row = next(line for line in (PATCHES / "README.md").read_text().splitlines() if patch.name in line)
    added = sum(line.startswith("+") for line in changed)
    assert f"| {added} | {len(changed) - added} |" in row
