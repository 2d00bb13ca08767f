"""A model's own loss, regression, and what is refused of both."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from rowcast.analysis.new import new as new_command
from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import as_fp32, own_loss
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel, mean_loss
from tests.support.facts import facts
from tests.support.jobs import job

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


REGRESSION: dict[str, Any] = {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1], "task": "regression"}
REAL = {"columns": {"label_values": "real"}, "format": "csv", "path": "log.csv"}


@pytest.mark.parametrize("error", ["squared", "huber"])
def test_the_loss_is_in_deviations_and_the_figures_are_in_the_labels_unit(error: str) -> None:
    own = JobModel(job(data=REAL, model={**REGRESSION, "target": [1e4, 250.0], "error": error}), 3)
    rng = torch.Generator().manual_seed(3)
    labels = 1e4 + 400 * torch.randn(64, generator=rng)
    rows = [torch.randn(64, 4, generator=rng) for _ in range(2)]
    outputs = own.forward(torch.randn(64, 3, generator=rng), rows, {}, training=False)
    wide, wanted = outputs.detach().double().numpy(), labels.double().numpy()
    errors = np.abs(wide - wanted) / 250
    losses = errors**2 if error == "squared" else np.where(errors < 1, errors**2 / 2, errors - 0.5)
    assert own.loss(outputs, labels).item() == pytest.approx(losses.mean(), rel=1e-5)
    assert outputs.dtype == torch.float32
    assert abs(wide.mean() - 1e4) < 1500, "an untrained model predicts about the mean"
    metrics = EvalMetrics(names=own.eval_names)
    for part in (slice(0, 40), slice(40, 64)):
        own.count(metrics, outputs[part], labels[part])
    found = metrics.counts.result(0, (), ())
    assert found is not None
    assert found.means["rmse"] == pytest.approx(np.sqrt(((wide - wanted) ** 2).mean()), rel=1e-12)
    assert found.means["mae"] == pytest.approx(np.abs(wide - wanted).mean(), rel=1e-12)
    assert (found.auc, found.is_own_loss, own.score_name) == (None, True, "score")


def test_the_weights_have_the_names_and_first_values_of_the_classifier() -> None:
    model = {**REGRESSION, "task": "classification"}
    one, other = (JobModel(job(data=data, model=of), 3) for data, of in ((REAL, REGRESSION), ({}, model)))
    assert all(torch.equal(one.model.state_dict()[name], own) for name, own in other.model.state_dict().items())


@pytest.mark.parametrize(
    ("data", "model", "said"),
    [({}, {}, 'task = "regression" does not go with data.columns.label_values = "binary"'),
     (REAL, {"task": "classification"}, 'task = "classification" does not go with data.columns.label_values = "real"'),
     (REAL, {"target": [1.0, 0.0]}, "target = [1.0, 0.0] must be a finite mean and a deviation above 0"),
     (REAL, {"kind": "tests.support.batches:small_model"}, "has a loss of its own")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(data: Any, model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        job(data=data, model={**REGRESSION, **model})


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_new_proposes_a_regression_for_a_measure_and_it_learns(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any) -> None:
        raise ConfigError("not asked here")

    monkeypatch.setattr(new_command, "advise_job", unavailable)
    rng = np.random.default_rng(5)
    region, age, smoker = rng.choice(["n", "s", "w"], 900), rng.integers(18, 65, 900), rng.integers(0, 2, 900)
    cost = [f"{2000 + 90 * a + 9000 * s + 500 * (r == 'n'):,.2f}" for a, s, r in zip(age, smoker, region, strict=True)]
    frame = pd.DataFrame({"age": age, "smoker": smoker, "region": region, "charges": cost})
    path = tmp_path / f"log.{form}"
    frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    refused = CliRunner().invoke(app, ["new", "--data", str(path)])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "smoker; --label charges, a measure, trains a regression" in refused.stderr
    made = CliRunner().invoke(app, ["new", "--data", str(path), "--label", "charges"])
    (tmp_path / "job.toml").write_text(made.stdout)
    own = load_job(tmp_path / "job.toml")
    assert (own.model.task, own.data.columns.dense) == ("regression", ["age", "smoker"])
    labels = np.concatenate([batch.labels for batch in open_reader(own).batches("train", 0)])
    assert labels.mean() == pytest.approx(own.model.target[0], rel=0.05)
