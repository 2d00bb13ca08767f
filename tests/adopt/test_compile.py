"""`torch.compile` around a model with an EmbeddingBagCollection compiles it once and leaves the look-up alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rowcast
from tests.adopt.scripts import Launches, make
from tests.support.facts import facts

# torch hides this warning of its own, except where warnings are errors
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
WITH_EVALUATION = "tests.adopt.clicks:with_evaluation"


def losses_of(forward: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> list[tuple[str, float]]:
    """Kind and loss of each batch, of four epochs with 3 train and 2 evaluation batches."""
    found = []
    for _ in range(4):
        for batch in loader:
            model.train(batch.kind == "train")
            loss = nn.functional.binary_cross_entropy_with_logits(
                forward(batch.dense_features, batch.sparse_features), batch.labels
            )
            if batch.kind == "train":
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
            found.append((batch.kind, loss.item()))
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_compiled_once_and_has_the_same_losses(
    backend: str, tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    # imported late, as it imports Triton, which must first be asked for its interpreter (tests/kernels/conftest.py)
    from torch._dynamo.testing import CompileCounterWithBackend

    def run(name: str, counter: CompileCounterWithBackend | None) -> tuple[list[tuple[str, float]], list[int]]:
        model, optimizer = make(tmp_path / name)
        graphs: list[int] = []
        compiled = model if counter is None else torch.compile(model, backend=counter)

        def forward(dense: torch.Tensor, sparse: Any) -> torch.Tensor:
            logits: torch.Tensor = compiled(dense, sparse)
            graphs.append(0 if counter is None else counter.frame_count)
            return logits

        loader = rowcast.connect(model.ebc, WITH_EVALUATION, epochs=4, evaluate=True, options={"batches": 3})
        return losses_of(forward, model, optimizer, loader), graphs

    expected, _ = run("plain", None)
    torch._dynamo.reset()
    capfd.readouterr()
    found, graphs = run("compiled", CompileCounterWithBackend(backend))
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if not line.startswith("rowcast: ")] == []
    assert found == expected
    assert [kind for kind, _ in found] == (["train"] * 3 + ["eval"] * 2) * 4
    # one graph behind the look-up for training, one for evaluation
    assert graphs == [1] * 3 + [2] * 17


def test_a_model_that_must_be_one_graph_is_told_why_it_is_not(tmp_path: Path, launches: Launches) -> None:
    model, _ = make(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with rowcast.connect(model.ebc, WITH_EVALUATION) as loader:
        batch = next(iter(loader))
        with pytest.raises(Exception, match=facts("rowcast", "torch.compile")):
            compiled(batch.dense_features, batch.sparse_features)
