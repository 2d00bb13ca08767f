"""What docs/connect.md shows in Python is run as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rowcast
from rowcast import EmbeddingBagConfig

DOC = Path(__file__).parents[2] / "docs" / "connect.md"


def blocks() -> list[str]:
    found: list[str] = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), flags=re.MULTILINE | re.DOTALL)
    return found


def test_the_loop_of_the_complete_script_is_shown_as_it_runs() -> None:
    """tests/adopt/test_complete.py runs it."""
    [shown] = [block for block in blocks() if "old.pt" not in block]
    assert shown.rstrip() in (DOC.parents[1] / "examples" / "adopt" / "complete.py").read_text()


def test_tables_of_an_old_checkpoint_are_those_that_the_module_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [recipe] = [block for block in blocks() if "old.pt" in block]
    rows = {"user": 100_000, "item": 20_000, "shop": 50}
    model = nn.Module()
    model.bags = nn.ModuleDict(
        {name: nn.EmbeddingBag(count, 16, mode="sum", sparse=True) for name, count in rows.items()}
    )
    monkeypatch.chdir(tmp_path)
    torch.save(model.state_dict(), "old.pt")
    shown = {"torch": torch, "rowcast": rowcast, "EmbeddingBagConfig": EmbeddingBagConfig}
    exec(recipe, shown)
    [ebc] = [own for own in shown.values() if isinstance(own, rowcast.EmbeddingBagCollection)]
    found = ebc.state_dict()
    assert list(found) == [f"embedding_bags.{name}.weight" for name in rows]
    for name in rows:
        assert torch.equal(found[f"embedding_bags.{name}.weight"], model.state_dict()[f"bags.{name}.weight"])
