"""A script may set torch's default device: no tensor of ours follows it."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from rowcast.trainer.models.model_state import model_state, optimizer_state, pack

ROOT = Path(__file__).parents[2]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def without_a_device(text: str) -> list[str]:
    """The calls of torch's constructors that name no device, nor stand in a block that does."""
    tree = ast.parse(text)
    named = {
        id(call)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and ast.unparse(block.items[0]).startswith("torch.device(")
        for call in ast.walk(block)
    }
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in CONSTRUCTORS}
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
        and id(call) not in named
    ]


SELF_CHECK = Path("trainer/kernels/choose.py")  # called within such a block


def test_every_tensor_of_the_trainer_names_its_device() -> None:
    assert {"zeros", "as_tensor", "randn"} <= CONSTRUCTORS
    assert without_a_device("torch.zeros(3)") == ["line 1: torch.zeros(3)"]
    assert without_a_device("with torch.device('cpu'):\n    torch.zeros(3)") == []
    files = [path for path in (ROOT / "trainer").rglob("*.py") if path.relative_to(ROOT) != SELF_CHECK]
    found = {str(path.relative_to(ROOT)): without_a_device(path.read_text()) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_state_of_a_model_is_not_moved_by_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    torch.autograd.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    try:
        torch.set_default_device("meta")
        tensors = {**model_state(model), **optimizer_state(model, optimizer)}
        assert pack(tensors)
    finally:
        torch.set_default_device(None)
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
