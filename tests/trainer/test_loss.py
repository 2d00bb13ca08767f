"""A model's own loss, in place of binary cross entropy, and what is refused of it."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import as_fp32, own_loss
from rowcast.trainer.models.job_model import mean_loss
from tests.support.facts import facts

OUTPUTS, LABELS = torch.tensor([0.5, -2.0, 1.0], requires_grad=True), torch.tensor([1.0, 0.0, 0.0])


class Own(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Method(nn.Module):
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().mean()


def found(loss: Any) -> Tensor:
    own = own_loss(Own(loss))
    assert own is not None
    return own(OUTPUTS, LABELS)


def test_a_model_without_a_loss_has_binary_cross_entropy() -> None:
    assert own_loss(nn.Linear(1, 1)) is None
    expected = nn.functional.binary_cross_entropy_with_logits(OUTPUTS, LABELS)
    assert torch.equal(mean_loss(OUTPUTS, LABELS), expected)


def test_a_number_called_loss_is_none() -> None:
    assert own_loss(Own(0.5)) is None


def test_a_method_and_a_module_of_the_model_are_its_loss() -> None:
    method = own_loss(Method())
    assert method is not None
    assert torch.equal(method(OUTPUTS, LABELS), (OUTPUTS - LABELS).square().mean())
    assert torch.equal(found(nn.MSELoss()), nn.functional.mse_loss(OUTPUTS, LABELS))


@pytest.mark.parametrize("loss", [lambda batch: batch, lambda outputs, labels, weights: outputs, lambda: 0])
def test_a_loss_that_takes_other_things_is_refused_when_the_model_is_built(loss: Any) -> None:
    with pytest.raises(ConfigError, match=facts("Own.loss", "(outputs, labels)")):
        own_loss(Own(loss))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (0.5, "Own.loss returned float; return the batch's mean loss as a scalar tensor, such as losses.mean()"),
        (OUTPUTS, "Own.loss returned torch.float32 of shape [3]; return the batch's mean loss"),
        (OUTPUTS.sum()[None], "Own.loss returned torch.float32 of shape [1]; return"),
        (torch.tensor(1), "Own.loss returned torch.int64 of shape []; return"),
        ((OUTPUTS.sum(), 1), "Own.loss returned tuple; return"),
        (None, "Own.loss returned None, and every batch is trained; leave a sample out by a weight of 0 in the mean"),
        (
            OUTPUTS.sum().detach(),
            "Own.loss returned a loss without a gradient; compute it from the outputs by torch's operations, without",
        ),
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found(lambda outputs, labels: returned)
    assert str(refused.value).startswith(sentence)


def test_an_evaluation_needs_no_gradient() -> None:
    with torch.no_grad():
        assert found(lambda outputs, labels: outputs.sum()).item() == -0.5


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (
            torch.zeros(3, 1),
            facts("logits", "shape [3, 1]", "shape [3]"),
        ),
        (
            (OUTPUTS, OUTPUTS),
            facts("tuple", "shape [3]", "loss(outputs,"),
        ),
    ],
)
def test_outputs_that_are_no_logits_need_a_loss(outputs: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mean_loss(outputs, LABELS)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_every_half_precision_tensor_of_the_outputs_becomes_fp32() -> None:
    half, whole, index = torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.ones(2, dtype=torch.int64)
    outputs = as_fp32({"a": (half, [whole, index]), "b": Pair(half, "text")})
    assert [outputs["a"][0].dtype, outputs["a"][1][0].dtype, outputs["a"][1][1].dtype] == [
        torch.float32,
        torch.float32,
        torch.int64,
    ]
    assert isinstance(outputs["b"], Pair)
    assert outputs["b"].first.dtype == torch.float32
    assert outputs["b"].second == "text"
    assert as_fp32(OrderedDict(a=half))["a"].dtype == torch.float32


NAN = float("nan")
SEVERAL = torch.tensor([[1.0, 0.0], [NAN, 1.0], [NAN, NAN], [0.0, NAN]])


def test_an_unknown_label_has_no_loss_and_no_gradient_and_counts_in_the_mean() -> None:
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = mean_loss(logits, SEVERAL)
    torch.autograd.backward(loss)
    known = ~SEVERAL.isnan()
    expected = nn.functional.binary_cross_entropy_with_logits(
        logits[known].double(), SEVERAL[known].double(), reduction="sum"
    )
    assert loss.item() == pytest.approx(expected.item() / 8, rel=1e-6)
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, known)


def test_the_loss_of_a_batch_is_that_of_its_parts_by_their_share_of_the_samples() -> None:
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    parts = [mean_loss(logits[own], SEVERAL[own]) * (len(logits[own]) / 4) for own in (slice(0, 1), slice(1, 4))]
    assert mean_loss(logits, SEVERAL).item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)


def test_a_batch_without_a_known_label_has_loss_0_and_no_gradient() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    loss = mean_loss(logits, torch.full((3, 2), NAN))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_known_labels_have_the_bits_of_unmasked_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(50, 3, generator=generator), torch.rand(50, 3, generator=generator).round()
    assert torch.equal(mean_loss(logits, labels), nn.functional.binary_cross_entropy_with_logits(logits, labels))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (2, 4)])
def test_several_labels_need_a_logit_each(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=facts("one logit", "[4, 2]")):
        mean_loss(torch.zeros(shape), SEVERAL)
