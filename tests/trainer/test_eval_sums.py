"""Figures of a model's own in evaluations: what `eval_sums` may give, and what a checkpoint within one needs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.evaluate import EvalMetrics, own_sums
from tests.support.facts import facts


class Model(nn.Module):
    def __init__(self, names: Any, given: Any) -> None:
        super().__init__()
        self.eval_names, self._given = names, given

    def eval_sums(self, outputs: Tensor, labels: Tensor) -> Any:
        return self._given


@pytest.mark.parametrize("names", [(), "error", ["a", "a"], [3], [""]])
def test_names_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match=facts("Model.eval_names", repr(names), "a list of different names")):
        own_sums(Model(names, {}))


def test_names_without_the_method_are_refused_and_a_model_without_both_has_none() -> None:
    model = nn.Linear(1, 1)
    assert own_sums(model)[0] == ()
    model.eval_names = ["a"]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="a method eval_sums"):
        own_sums(model)


@pytest.mark.parametrize(
    "given",
    [None, {}, {"a": (1, 2), "b": (1, 2)}, {"a": 1}, {"a": (1, 2, 3)}, {"a": ("1", 2)}, {"a": (torch.ones(3), 3)}],
)
def test_anything_but_a_sum_and_a_weight_of_each_name_is_refused(given: Any) -> None:
    _, sums = own_sums(Model(["a"], given))
    with pytest.raises(ConfigError, match=facts("Model.eval_sums gave", "a")):
        sums(torch.ones(1), torch.ones(1))


def test_an_evaluation_goes_on_with_its_names_alone() -> None:
    before = EvalMetrics(names=["a", "b"])
    before.update(torch.zeros(4), torch.ones(4))
    before.update_sums({"a": (torch.tensor(0.1), 1), "b": (2, 4.0)})
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
