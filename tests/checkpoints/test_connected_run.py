"""A run that `rowcast.connect` wrote before it left (commit ae8a0ab): its tables and weights are still read."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rowcast
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.runtime.errors import ConfigError

WRITTEN = Path(__file__).parent / "connected_run"
CODE = "their_script:clicks"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "checkpoints", tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def expected() -> dict[str, torch.Tensor]:
    return load_file(WRITTEN / "expected.safetensors")


def test_it_is_exported(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, tmp_path / "exported")
    exported = load_file(tmp_path / "exported")
    for name in ("item", "shop"):
        assert torch.equal(exported[f"embedding_bags.{name}.weight"], expected()[f"e.embedding_bags.{name}.weight"])
        assert exported[f"optimizer.{name}.sum"].any()


def test_its_model_is_refused_with_what_to_do(run_dir: Path) -> None:
    run = rowcast.load(run_dir, trust=[CODE])
    with pytest.raises(
        ConfigError, match=r"model\.kind: the model of this run is in a training script of its own; run"
    ):
        run.model()


@pytest.mark.parametrize("name", ["connect", "EmbeddingBagCollection"])
def test_a_name_that_left_leads_to_the_page(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rowcast\.{name} has left: .* \(docs/scripts\.md\)$"):
        getattr(rowcast, name)
    assert not hasattr(rowcast, name)
    assert not hasattr(rowcast, "no_name")
