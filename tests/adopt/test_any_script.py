"""Scripts in the shapes of public ones train the same bits when they are adopted."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.adopt.any.__main__ import SCRIPTS
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.twins import bytes_by_name

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
