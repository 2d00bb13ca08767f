"""The examples as a user runs them, and scripts in the shapes of public ones: adopted, they end with the same bits.

`complete.py` is run to its end, killed and started again, and its model used without rowcast.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.adopt.any.__main__ import SCRIPTS
from examples.adopt.complete import clicks
from examples.adopt.inference import Model
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.processes import ROOT, Session
from tests.support.twins import bytes_by_name


def test_a_script_with_ddp_ends_with_the_same_bits_when_it_is_adopted(tmp_path: Path) -> None:
    ends = []
    with Session(tmp_path) as session:
        for adopt in ("", "4000 rows"):
            arguments = ["--nproc-per-node=2", "-m", "examples.adopt.ddp", "--adopt", adopt, "--end", f"{tmp_path}/end"]
            ended = session.start_module("rowcast.deploy.torchrun", *arguments, PYTHONPATH=".").ended(200)
            assert ended.code == 0, ended.stderr
            assert ("rows stay on the device" in ended.stderr) == bool(adopt)
            ends.append(bytes_by_name(torch.load(tmp_path / "end")))
    assert ends[0] == ends[1]


def test_a_language_model_beside_a_hashed_table_ends_with_the_same_bits_when_it_is_adopted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} " * 3000)
    ends = []
    with Session(tmp_path) as session:
        for plain in ([], ["--plain"]):
            paths = [f"--text={tmp_path}/text", f"--tables={tmp_path}/tables{len(plain)}", f"--end={tmp_path}/end"]
            script = session.start_module(
                "examples.adopt.ngram_lm", *paths, "--rows=20000", "--steps=6", "--capacity=9000 rows", *plain
            )
            ended = script.ended(200)
            assert ended.code == 0, ended.stderr
            ends.append(bytes_by_name(torch.load(tmp_path / "end")))
    assert ends[0] == ends[1]


def test_the_import_of_adopt_draws_no_random_number_of_the_scripts() -> None:
    code = "import random, rowcast; random.seed(3); rowcast.adopt; print(random.random())"
    expected = random.Random(3).random()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected


ANY_WARNING = pytest.mark.filterwarnings("ignore")  # of these packages

CAPACITY = {  # less than the tables take
    "bare_parameters": "300 rows",
    "drawn_candidates": "700 rows",
    "fit_in_library": "40KB",
    "hugging_face": "700 rows",
    "lightning": "700 rows",
    "skip_gram": "800 rows",
    "sparse_bags": "500 rows",
    "torchrec_model": "2500 rows",
    "torchrec_sequence": "5000 rows",
    "weight_decay": "60KB",
}
STAND_INS = Path(__file__).parent / "stand_ins"  # where TorchRec is not installed
PATCHES = Path(__file__).parents[2] / "examples" / "adopt" / "patches"
MOST_LINES = 5
PACKAGES = {
    "hugging_face": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}  # that `make test-all` installs


def trained(script: str, capacity: str) -> dict[str, Any]:
    for package in PACKAGES.get(script, ()):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    return bytes_by_name(import_module(f"examples.adopt.any.{script}").main(capacity))


@pytest.mark.usefixtures("let_go")
@pytest.mark.parametrize(
    "script", [pytest.param(own, marks=[ANY_WARNING] if own in PACKAGES else []) for own in SCRIPTS]
)
def test_a_script_trains_the_same_bits_when_it_is_adopted(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("torchrec") is None:
        monkeypatch.syspath_prepend(STAND_INS)
    plain = trained(script, "")
    assert "rows stay on the device" not in capsys.readouterr().err
    adopted = trained(script, CAPACITY[script])
    assert "rows stay on the device" in capsys.readouterr().err
    assert plain.keys() == adopted.keys()
    assert [name for name, own in plain.items() if adopted[name] != own] == []


@ANY_WARNING
@pytest.mark.usefixtures("let_go")
def test_hugging_faces_fused_default_is_refused_with_the_setting_that_trains() -> None:
    for package in PACKAGES["hugging_face"]:
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    with pytest.raises(ConfigError, match=facts("AdamW(fused=True)", 'optim="adamw_torch"')):
        import_module("examples.adopt.any.hugging_face").main(CAPACITY["hugging_face"], "adamw_torch_fused")


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_the_patches_of_public_scripts_are_short(patch: Path) -> None:
    changed = [line for line in patch.read_text().splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 2 <= len(changed) <= MOST_LINES
    row = next(line for line in (PATCHES / "README.md").read_text().splitlines() if patch.name in line)
    added = sum(line.startswith("+") for line in changed)
    assert f"| {added} | {len(changed) - added} |" in row


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
