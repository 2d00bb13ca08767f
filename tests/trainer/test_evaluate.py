"""Streaming metrics against the exact ones."""

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from rowcast.trainer.models.evaluate import NUM_BINS, EvalMetrics, bins
from tests.support.evaluated import result_of


def predictions(spread: float, center: float = -1.2, num_samples: int = 50_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_samples, generator=generator) * spread + center
    chance = torch.sigmoid((logits - center) / spread - 1)
    return logits, (torch.rand(num_samples, generator=generator) < chance).float()


def metrics_of(logits: Tensor, labels: Tensor, batch_size: int = 7_001) -> EvalMetrics:
    metrics = EvalMetrics()
    for batch_logits, batch_labels in zip(
        torch.split(logits, batch_size), torch.split(labels, batch_size), strict=True
    ):
        metrics.update(batch_logits, batch_labels)
    return metrics


@pytest.mark.parametrize("spread", [0.001, 0.01, 1.0, 10.0, 1000.0])
def test_auc_is_close_to_the_exact_one_for_narrow_and_wide_logits(spread: float) -> None:
    logits, labels = predictions(spread)
    auc = result_of(metrics_of(logits, labels)).auc
    exact = binary_auroc(torch.argsort(torch.argsort(logits)).double() / len(logits), labels.long())
    assert auc == pytest.approx(float(exact), abs=1e-4)
    assert 0.6 < float(exact) < 0.9


def test_ties_count_half() -> None:
    logits, labels = torch.tensor([0.5, 0.5, 2.0, 0.5]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert result_of(metrics_of(logits, labels)).auc == 0.75


def test_log_loss_and_accuracy_are_exact() -> None:
    logits, labels = predictions(3.0)
    result = result_of(metrics_of(logits, labels))
    assert result.logloss == pytest.approx(
        binary_cross_entropy_with_logits(logits.double(), labels.double()).item(), rel=1e-12
    )
    assert result.accuracy == ((logits > 0) == (labels > 0)).double().mean().item()


def test_normalized_entropy_is_the_log_loss_over_that_of_the_base_rate() -> None:
    logits, labels = predictions(1.0)
    rate = labels.double().mean().expand(len(labels))
    of_base_rate = torch.nn.functional.binary_cross_entropy(rate, labels.double()).item()
    result = result_of(metrics_of(logits, labels))
    assert result.logloss is not None
    assert result.normalized_entropy == pytest.approx(result.logloss / of_base_rate, rel=1e-12)
    assert result_of(metrics_of(torch.logit(rate).float(), labels)).normalized_entropy == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_class_is_undefined(label: float) -> None:
    result = result_of(metrics_of(torch.tensor([0.1, -2.0]), torch.full((2,), label)))
    assert result.auc is None
    assert result.logloss is not None


def test_no_samples_have_no_result() -> None:
    assert EvalMetrics().counts.result(0, (), ()) is None


def test_logits_far_out_and_infinite_stay_in_order() -> None:
    logits = torch.tensor([-float("inf"), -1e30, -50.0, -1.0, 0.0, 1.0, 50.0, float("inf")])
    where = bins(logits).tolist()
    assert where == sorted(where)
    assert (where[0], where[-1]) == (0, NUM_BINS - 1)


def test_a_logit_that_is_not_a_number_shows_in_the_log_loss() -> None:
    logloss = result_of(metrics_of(torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0]))).logloss
    assert logloss is not None
    assert logloss != logloss


def test_closing_gives_the_evaluation_and_starts_the_next() -> None:
    logits, labels = predictions(1.0)
    metrics = metrics_of(logits, labels)
    expected = result_of(metrics)
    closed = metrics.close()
    metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]))
    assert result_of(closed) == expected
    assert result_of(metrics).auc == 0.0
    assert metrics.counts.num_samples == 2


def test_outputs_that_are_no_logits_have_the_mean_of_the_models_own_loss_only() -> None:
    metrics = EvalMetrics()
    for size, loss in ((3, 0.5), (1, 2.5)):
        metrics.update({"left": torch.ones(size, 2)}, torch.ones(size), torch.tensor(loss))
    result = result_of(metrics)
    assert (int(metrics.counts.num_samples), result.auc, result.logloss, result.accuracy) == (4, None, 1.0, None)


def test_logits_of_a_model_with_its_own_loss_have_auc_and_accuracy() -> None:
    logits, labels = predictions(1.0, num_samples=1000)
    expected = result_of(metrics_of(logits, labels))
    metrics = EvalMetrics()
    metrics.update(logits, labels, torch.tensor(0.25))
    assert result_of(metrics) == msgspec.structs.replace(
        expected, logloss=0.25, is_own_loss=True, normalized_entropy=None
    )


def test_labels_that_are_not_0_or_1_leave_auc_and_accuracy_out() -> None:
    metrics = EvalMetrics()
    metrics.update(torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1.0, 0.0, 3.5]), torch.tensor(0.25))
    result = result_of(metrics)
    assert (int(metrics.counts.num_samples), result.auc, result.logloss, result.accuracy) == (3, None, 0.25, None)


def several(num_samples: int = 20_000) -> tuple[Tensor, Tensor]:
    """Logits and labels [n, 3], some unknown; no label of the last is known."""
    columns = [predictions(spread, num_samples=num_samples) for spread in (1.0, 3.0, 0.5)]
    logits, labels = (torch.stack(own, dim=1) for own in zip(*columns, strict=True))
    labels[::3, 0] = labels[:, 2] = float("nan")
    return logits, labels


def metrics_of_several(logits: Tensor, labels: Tensor, batch_size: int = 7_001) -> EvalMetrics:
    metrics = EvalMetrics(num_labels=3)
    for own_logits, own_labels in zip(torch.split(logits, batch_size), torch.split(labels, batch_size), strict=True):
        metrics.update(own_logits, own_labels)
    return metrics


def test_each_of_several_labels_has_the_metrics_of_its_known_samples() -> None:
    logits, labels = several()
    result = result_of(metrics_of_several(logits, labels))
    assert [task.num_labels for task in result.tasks] == [13_333, 20_000, 0]
    assert (result.tasks[2].auc, result.tasks[2].logloss, result.auc) == (None, None, None)
    for task, own_logits, own_labels in zip(result.tasks[:2], logits.T, labels.T, strict=False):
        known = ~own_labels.isnan()
        alone = result_of(metrics_of(own_logits[known], own_labels[known]))
        assert task.auc == alone.auc
        assert task.logloss == pytest.approx(alone.logloss, rel=1e-12)
        assert task.auc == pytest.approx(float(binary_auroc(own_logits[known], own_labels[known].long())), abs=1e-4)
    known = ~labels.isnan()
    assert result.accuracy == ((logits > 0) == (labels > 0))[known].double().mean().item()
    total = sum(task.logloss * task.num_labels for task in result.tasks if task.logloss is not None)
    assert result.logloss == pytest.approx(total / labels.numel(), rel=1e-12), "as the loss that is trained on"
    both = result_of(metrics_of_several(logits, torch.where(known, labels, 0.0).index_fill(0, torch.tensor(0), 1.0)))
    aucs = [task.auc for task in both.tasks if task.auc is not None]
    assert both.auc == pytest.approx(sum(aucs) / 3)


def test_an_evaluation_of_several_labels_goes_on_from_its_state() -> None:
    logits, labels = several(1000)
    whole, second = metrics_of_several(logits, labels, 300), EvalMetrics(num_labels=3)
    assert second.restore(metrics_of_several(logits[:300], labels[:300]).state())
    for own in (slice(300, 600), slice(600, 900), slice(900, None)):
        second.update(logits[own], labels[own])
    assert result_of(second) == result_of(whole) == result_of(whole.close())
    assert not whole.counts.num_samples


@pytest.mark.parametrize("are_logits", [True, False])
def test_several_labels_of_a_model_with_its_own_loss_have_results_where_known_ones_are_0_or_1(are_logits: bool) -> None:
    labels = torch.tensor([[1.0, 0.0, 2.5], [0.0, float("nan"), 1.0], [1.0, 1.0, 0.0]])
    logits = torch.tensor([[1.0, -1.0, 0.0], [-2.0, 9.0, 0.0], [0.5, 2.0, 0.0]])
    metrics = EvalMetrics(num_labels=3)
    metrics.update(logits if are_logits else {"left": logits}, labels, torch.tensor(0.25))
    result = result_of(metrics)
    assert (int(metrics.counts.num_samples), result.logloss, result.auc, result.accuracy) == (3, 0.25, None, None)
    assert [task.num_labels for task in result.tasks] == [3, 2, 3]
    assert [task.auc for task in result.tasks] == ([1.0, 1.0, None] if are_logits else [None] * 3)


@pytest.mark.parametrize("are_logits", [True, False])
def test_an_evaluation_goes_on_from_its_state(are_logits: bool) -> None:
    logits, labels = predictions(1.0, num_samples=1000)
    first, second, whole = EvalMetrics(), EvalMetrics(), EvalMetrics()
    for metrics, part in ((first, slice(300)), (whole, slice(300))):
        metrics.update(logits[part] if are_logits else {}, labels[part], torch.tensor(0.5))
    assert second.restore(first.state())
    for metrics in (second, whole):
        metrics.update(logits[300:] if are_logits else {}, labels[300:], torch.tensor(0.25))
    assert result_of(second) == result_of(whole)
    assert (result_of(second).auc is not None) == are_logits


def test_an_older_versions_evaluation_state_has_as_many_samples_as_logits() -> None:
    logits, labels = predictions(1.0, num_samples=1000)
    state = metrics_of(logits, labels).state()
    del state["metrics.num_samples"]
    metrics = EvalMetrics()
    assert metrics.restore(state)
    assert result_of(metrics) == result_of(metrics_of(logits, labels))
