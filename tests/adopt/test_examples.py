"""The example scripts, as they were and adopted: each runs as a user would start it, and the two give the same."""

import difflib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rowcast.prefetcher.checkpoints.export import export_run

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
# lines added but imports
PAIRS = {"plain_dlrm": 2, "torchrec_model": 2, "torchrec_sequence": 4, "own_dataset": 2, "ddp": 3}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(
    name: str, folder: Path, *options: str, stand_ins: bool, launcher: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """What the script ends with; it has no more than its own folder to write to."""
    paths = [str(ROOT), *([str(STAND_INS)] if stand_ins else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", f"examples.adopt.{name}", "--end", str(folder / "end"), *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "end")


def both(name: str, folder: Path, *, stand_ins: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The script and its adopted twin, from one state dict."""
    begun = run(name, folder, stand_ins=stand_ins)
    begun.pop("losses")
    save_file(begun, folder / "start")
    options = ("--start", str(folder / "start"))
    return run(name, folder, *options, stand_ins=stand_ins), run(
        f"{name}_adopted", folder, *options, stand_ins=stand_ins
    )


def test_a_script_with_nn_embedding_gives_the_same_bits_when_it_is_adopted(tmp_path: Path) -> None:
    plain, adopted = both("own_dataset", tmp_path, stand_ins=False)
    assert list(plain) == list(adopted)
    assert len(plain["losses"]) == 40
    for name, tensor in plain.items():
        assert torch.equal(tensor, adopted[name]), name
    export_run(tmp_path / "runs" / "own_dataset_adopted", tmp_path / "exported")
    exported = load_file(tmp_path / "exported")
    assert torch.equal(adopted["embeddings.embedding_bags.tags.weight"], exported["embedding_bags.tags.weight"])


def test_a_language_model_beside_a_table_of_n_grams_has_the_bits_of_its_twin_over_nn_embedding(tmp_path: Path) -> None:
    options = ("--text", str(ROOT / "job"), "--rows", "20000", "--steps")
    save_file(run("ngram_lm", tmp_path, *options, "0", stand_ins=False), tmp_path / "start")
    found = [
        run("ngram_lm", tmp_path, *options, "6", "--start", str(tmp_path / "start"), *plain, stand_ins=False)
        for plain in ((), ("--plain",))
    ]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@pytest.mark.parametrize(
    ("name", "stand_ins"),
    [
        ("plain_dlrm", False),
        ("torchrec_model", True),
        ("torchrec_sequence", True),
        *(
            pytest.param(
                name,
                False,
                marks=pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is missing"),
            )
            for name in ("torchrec_model", "torchrec_sequence")
        ),
    ],
)
def test_a_script_with_embedding_bags_gives_the_same_but_for_rounding(
    name: str, stand_ins: bool, tmp_path: Path
) -> None:
    plain, adopted = both(name, tmp_path, stand_ins=stand_ins)
    assert list(plain) == list(adopted)
    assert len(plain["losses"]) == 30
    # Adagrad makes steps of the roundings of an attention's key bias, whose gradient is 0, so losses alone are compared
    for key in ["losses"] if name == "torchrec_sequence" else list(plain):
        tensor = plain[key]
        torch.testing.assert_close(adopted[key], tensor, rtol=1e-3, atol=1e-3 if "weight" in key else 1e-5, msg=key)


def test_a_script_on_two_ranks_gives_the_same_but_for_rounding(tmp_path: Path) -> None:
    begun = run("ddp", tmp_path, stand_ins=False, launcher=TORCHRUN)
    begun.pop("losses")
    save_file(begun, tmp_path / "begun")
    plain, adopted = (
        run(name, tmp_path, "--begin", str(tmp_path / "begun"), stand_ins=False, launcher=TORCHRUN)
        for name in ("ddp", "ddp_adopted")
    )
    assert list(plain) == list(adopted)
    for key, tensor in plain.items():
        torch.testing.assert_close(adopted[key], tensor, rtol=1e-3, atol=1e-3 if "weight" in key else 1e-5, msg=key)


def changed_lines(name: str) -> Iterator[str]:
    plain, adopted = (
        (ROOT / "examples" / "adopt" / f"{name}{end}.py").read_text().splitlines() for end in ("", "_adopted")
    )
    for line in difflib.unified_diff(plain, adopted, f"{name}.py", f"{name}_adopted.py", lineterm="", n=1):
        yield line.rstrip()


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_shows_what_changes_in_each_example(name: str) -> None:
    lines = list(changed_lines(name))
    assert "\n".join(["```diff", *lines, "```"]) in (ROOT / "docs" / "connect.md").read_text()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len([line for line in added if "import" not in line and line != "+"]) == PAIRS[name], (
        "the module and the loader, of ranks that may start again what they begin with, and nothing else"
    )
