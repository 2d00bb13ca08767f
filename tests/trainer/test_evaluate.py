"""Streaming metrics and ranks against the exact ones, and what a model counts itself."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from examples.all_items import ItemRows, load_model, ranks_of, vectors_of
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_model
from rowcast.trainer.models.evaluate import (
    NUM_BINS,
    RANK_BINS,
    EvalMetrics,
    bins,
    count_ranks,
    own_sums,
    ranking_figures,
    ranks_among,
    require_integers,
)
from rowcast.trainer.models.next_item import rounding_of
from tests.support.evaluated import result_of
from tests.support.facts import facts
from tests.support.next_item import ITEMS, KINDS, LENGTH, WIDTH, job_of


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


class Model(nn.Module):
    def __init__(self, names: Any, given: Any) -> None:
        super().__init__()
        self.eval_names, self._given = names, given

    def eval_sums(self, outputs: Tensor, labels: Tensor) -> Any:
        return self._given


@pytest.mark.parametrize("names", [(), "error", ["a", "a"], [3], [""], {"a", "b"}, {"a": 1}])
def test_names_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match=facts("Model.eval_names", repr(names), "a list of different names")):
        own_sums(Model(names, {}))


def test_names_without_the_method_are_refused_and_a_model_without_both_has_none() -> None:
    model = nn.Linear(1, 1)
    assert own_sums(model)[0] == ()
    model.eval_names = ["a"]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="a method eval_sums"):
        own_sums(model)


MISTAKES = [
    *(None, {}, {"a": (1, 2), "b": (1, 2)}, {"a": 1}, {"a": (1, 2, 3)}, {"a": ("1", 2)}, {"a": (1j, 2)}),
    *({"a": (value, 3)} for value in (torch.ones(3), torch.ones((), device="meta"), None)),
]


@pytest.mark.parametrize("given", MISTAKES)
def test_anything_but_a_sum_and_a_weight_of_each_name_is_refused(given: Any) -> None:
    _, sums = own_sums(Model(["a"], given))
    with pytest.raises(ConfigError, match=facts("Model.eval_sums gave", "a")):
        sums(torch.ones(1), torch.ones(1))


def test_an_evaluation_goes_on_with_its_names_alone() -> None:
    before = EvalMetrics(names=["a", "b"])
    before.update(torch.zeros(4), torch.ones(4))
    before.update_sums({"a": (torch.tensor(0.1), np.int64(1)), "b": (np.float32(2), 4.0)})
    after = EvalMetrics(names=["b", "a"])
    assert after.restore(before.state())
    after.update_sums({"a": (torch.tensor(0.1), 2), "b": (0, 0)})
    found = after.counts.result(0, (), ())
    assert found is not None
    assert found.means == {"b": 0.5, "a": 2 * float(torch.tensor(0.1)) / 3}
    with pytest.raises(ConfigError, match=facts("eval_names = ['a', 'b']", "this one has ['a']")):
        EvalMetrics(names=["a"]).restore(before.state())


def test_parts_are_added_in_the_tree() -> None:
    metrics = EvalMetrics(parts=4, names=["a"])
    for part, value in enumerate((1.0, 1e16, -1e16, 1.0)):
        metrics.update(torch.zeros(1), torch.ones(1), part=part)
        metrics.update_sums({"a": (value, 1)}, part)
    found = metrics.counts.result(0, (), ())
    assert found is not None
    assert found.means == {"a": 0.0}, "(1 + 1e16) + (-1e16 + 1); from left to right it is 1"


CUTOFFS = (1, 10, 50, 1024)


def figures_of(ranks: Tensor) -> dict[str, float]:
    bins = torch.zeros(RANK_BINS, dtype=torch.int64)
    count_ranks(bins, ranks)
    return ranking_figures(bins.tolist(), CUTOFFS)


def test_figures_are_those_of_a_count_over_all_ranks() -> None:
    ranks = np.random.default_rng(3).geometric(0.01, 20_000) - 1
    figures = figures_of(torch.tensor(ranks))
    for k in CUTOFFS:
        hits = ranks < k
        assert figures[f"hr@{k}"] == pytest.approx(hits.mean(), abs=1e-12)
        assert figures[f"ndcg@{k}"] == pytest.approx((hits / np.log2(ranks + 2)).mean(), abs=1e-12)
        assert figures[f"mrr@{k}"] == pytest.approx((hits / (ranks + 1)).mean(), abs=1e-12)


def test_the_order_and_the_batches_of_ranks_change_no_bit() -> None:
    ranks = torch.randint(0, 3000, (999,), generator=torch.Generator().manual_seed(1))
    whole, parts = EvalMetrics(), EvalMetrics()
    whole.update_ranks(ranks)
    for part in torch.split(ranks.flip(0), 100):
        parts.update_ranks(part.view(-1, 1))
    continued = EvalMetrics()
    assert continued.restore(parts.state()), "an evaluation in progress"
    assert whole.counts.rank_bins.tolist() == parts.counts.rank_bins.tolist() == continued.counts.rank_bins.tolist()


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf])
def test_equal_scores_and_nan_count_against_the_model(score: float) -> None:
    positives, candidates = torch.full((5,), score), torch.full((5, 60), score)
    ranks = ranks_among(positives, candidates, torch.zeros(5, 60, dtype=torch.bool))
    assert ranks.tolist() == [60] * 5
    assert all(figures_of(ranks)[f"{name}@50"] == 0 for name in ("hr", "ndcg", "mrr"))


def test_a_candidate_that_is_the_positive_is_left_out() -> None:
    candidates = torch.tensor([[3.0, 1.0, 2.0]])
    same = torch.tensor([[True, False, False]])
    assert ranks_among(torch.tensor([2.5]), candidates, same).tolist() == [0]
    assert ranks_among(torch.tensor([2.0]), candidates, same).tolist() == [1], "a tie with another candidate"


def test_there_are_no_figures_without_positives() -> None:
    assert figures_of(torch.zeros(0, dtype=torch.int64)) == {}


def test_negative_ranks_are_refused_when_the_evaluation_ends() -> None:
    with pytest.raises(ConfigError, match=facts("2 ranks", "negative")):
        figures_of(torch.tensor([3, -1, -9]))


@pytest.mark.parametrize("ranks", [torch.zeros(3), torch.zeros(3, dtype=torch.int32), [1, 2]])
def test_ranks_that_are_no_integers_of_64_bits_are_refused(ranks: object) -> None:
    with pytest.raises(ConfigError, match=facts("MyModel.ranks", "torch.int64")):
        require_integers(ranks, "MyModel.ranks")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [1, 1000, 2**20])
def test_ranks_are_those_of_all_scores_at_once(kind: str, memory: int, tmp_path: Path) -> None:
    job, rng = job_of(kind), np.random.default_rng(1)
    table = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(4))
    table[7] = table[3]  # a tie
    path = tmp_path / "export.safetensors"
    save_file({"embedding_bags.item.weight": table, **build_model(job, num_dense=0).state_dict()}, path)
    lengths = [3, 1, LENGTH, LENGTH + 4, *rng.integers(1, LENGTH, 80)]
    histories = [rng.integers(0, ITEMS, length).tolist() for length in lengths]
    times = [np.cumsum(rng.integers(0, 1000, length)).tolist() for length in lengths]
    positives = rng.integers(0, ITEMS, len(lengths))
    positives[:2] = 3, 7
    with torch.no_grad(), path.open("rb") as file:
        rows = ItemRows(file, "item")
        vectors = vectors_of(load_model(job, path), rows, histories, times)
        ranks = ranks_of(vectors, positives, rows, memory)
        scores = vectors @ table.T
    own = scores.gather(1, torch.tensor(positives)[:, None]) - rounding_of(vectors, table[positives])[:, None]
    assert torch.equal(ranks, (scores >= own).sum(1) - 1)
    assert (ranks[:2] > 0).all(), "a tie counts against both"
