"""Streaming metrics against the exact ones."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from trainer.evaluate import NUM_BINS, EvalMetrics, bins


def predictions(spread: float, center: float = -1.2, num_samples: int = 50_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_samples, generator=generator) * spread + center
    chance = torch.sigmoid((logits - center) / spread - 1)
    return logits, (torch.rand(num_samples, generator=generator) < chance).float()


def metrics_of(logits: Tensor, labels: Tensor, batch_size: int = 7_001) -> EvalMetrics:
    metrics = EvalMetrics()
    for batch_logits, batch_labels in zip(torch.split(logits, batch_size), torch.split(labels, batch_size), strict=True):
        metrics.update(batch_logits, batch_labels)
    return metrics


@pytest.mark.parametrize("spread", [0.001, 0.01, 1.0, 10.0, 1000.0])
def test_auc_is_close_to_the_exact_one_for_narrow_and_wide_logits(spread: float) -> None:
    logits, labels = predictions(spread)
    auc = metrics_of(logits, labels).compute().auc
    exact = binary_auroc(torch.argsort(torch.argsort(logits)).double() / len(logits), labels.long())
    assert auc == pytest.approx(float(exact), abs=1e-4)
    assert 0.6 < float(exact) < 0.9


def test_auc_agrees_with_torchmetrics_on_probabilities() -> None:
    logits, labels = predictions(1.0)
    exact = binary_auroc(torch.sigmoid(logits.double()), labels.long())
    assert metrics_of(logits, labels).compute().auc == pytest.approx(float(exact), abs=1e-5)


def test_ties_count_half() -> None:
    logits, labels = torch.tensor([0.5, 0.5, 2.0, 0.5]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert metrics_of(logits, labels).compute().auc == 0.75


def test_log_loss_and_accuracy_are_exact() -> None:
    logits, labels = predictions(3.0)
    result = metrics_of(logits, labels).compute()
    assert result.num_samples == len(labels)
    assert result.logloss == pytest.approx(binary_cross_entropy_with_logits(logits.double(), labels.double()).item(), rel=1e-12)
    assert result.accuracy == ((logits > 0) == (labels > 0)).double().mean().item()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_class_is_undefined(label: float) -> None:
    result = metrics_of(torch.tensor([0.1, -2.0]), torch.full((2,), label)).compute()
    assert result.auc is None
    assert result.logloss is not None


def test_metrics_of_no_samples_are_undefined() -> None:
    result = EvalMetrics().compute()
    assert (result.num_samples, result.auc, result.logloss, result.accuracy) == (0, None, None, None)


def test_logits_far_out_and_infinite_stay_in_order() -> None:
    logits = torch.tensor([-float("inf"), -1e30, -50.0, -1.0, 0.0, 1.0, 50.0, float("inf")])
    where = bins(logits).tolist()
    assert where == sorted(where)
    assert (where[0], where[-1]) == (0, NUM_BINS - 1)


def test_a_logit_that_is_not_a_number_shows_in_the_log_loss() -> None:
    logloss = metrics_of(torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])).compute().logloss
    assert logloss is not None
    assert logloss != logloss


def test_closing_gives_the_evaluation_and_starts_the_next() -> None:
    logits, labels = predictions(1.0)
    metrics = metrics_of(logits, labels)
    expected = metrics.compute()
    closed = metrics.close()
    metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]))
    assert closed.result() == expected
    assert metrics.compute().auc == 0.0
    assert metrics.compute().num_samples == 2
