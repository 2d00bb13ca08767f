"""Two towers and DCNv2 against their papers, written once more."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_model
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel
from tests.support.evaluated import result_of
from tests.support.facts import facts
from tests.support.full_capacity import NUM_DENSE, assert_equal_to_plain_loop, make_job, table

TABLES = [table("item", 40, 4, ["item"]), table("user", 9, 5, ["user", "friend"]), table("shop", 9, 3, ["shop"])]
SETTINGS: dict[str, Any] = {
    **{"kind": "two-tower", "item_features": ["item", "shop"], "user_mlp": [7, 6], "item_mlp": [6]},
    **{"temperature": 0.2, "log_frequency": 1},
}
ITEMS = torch.tensor([0, 1, 2, 1, 3, 1, 0])  # of the samples of a batch
LABELS = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
COUNTS = torch.tensor([4.0, 90.0, 1.0, 7.0])  # how often each item occurs


def model_and_inputs(**settings: Any) -> tuple[nn.Module, Tensor, list[Tensor]]:
    model = build_model(make_job(TABLES, "sgd", SETTINGS | settings), NUM_DENSE)
    generator = torch.Generator().manual_seed(4)
    rows = {name: torch.randn(4, width, generator=generator) for name, width in (("item", 4), ("shop", 3))}
    user, friend = (torch.randn(len(ITEMS), 5, generator=generator) for _ in range(2))
    dense = torch.randn(len(ITEMS), NUM_DENSE, generator=generator)
    dense[:, 1] = COUNTS[ITEMS].log()
    embeddings = [rows["item"][ITEMS], user, friend, rows["shop"][ITEMS]]
    return model, dense, [own.requires_grad_() for own in embeddings]


def layers(weights: dict[str, Tensor], name: str, row: Tensor) -> Tensor:
    count = sum(key.startswith(f"{name}.") for key in weights) // 2
    for n in range(count):
        row = weights[f"{name}.{n}.weight"] @ row + weights[f"{name}.{n}.bias"]
        row = row if n == count - 1 else row.clamp(min=0)
    unit: Tensor = row / row.square().sum().sqrt()
    return unit


def slow_loss(model: nn.Module, dense: Tensor, embeddings: list[Tensor], corrected: bool) -> Tensor:
    weights: dict[str, Tensor] = dict(model.named_parameters())
    item, user, friend, shop = embeddings
    users, items = [], []
    for i in range(len(ITEMS)):
        own_dense = [dense[i, 0], dense[i, 2]] if corrected else [*dense[i]]
        users.append(layers(weights, "user_mlp", torch.cat([torch.stack(own_dense), user[i], friend[i]])))
        items.append(layers(weights, "item_mlp", torch.cat([item[i], shop[i]])))
    total = torch.zeros(())
    for i, label in enumerate(LABELS):
        powers = [
            (users[i] @ items[j] / 0.2).exp() / (COUNTS[ITEMS[j]] / COUNTS.sum() if corrected else 1.0)
            for j in range(len(ITEMS))
            if j == i or ITEMS[j] != ITEMS[i]
        ]
        own = (users[i] @ items[i] / 0.2).exp() / (COUNTS[ITEMS[i]] / COUNTS.sum() if corrected else 1.0)
        total = total - label * (own / sum(powers, torch.zeros(()))).log()
    return total / len(ITEMS)


@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradients_are_those_of_the_paper(corrected: bool) -> None:
    model, dense, embeddings = model_and_inputs(**({} if corrected else {"log_frequency": None}))
    leaves = [*embeddings, *model.parameters()]
    ours: Tensor = model.loss(model(dense, embeddings), LABELS)  # type: ignore[operator]
    theirs = slow_loss(model, dense, embeddings, corrected)
    torch.testing.assert_close(ours, theirs)
    for our, their in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert our.abs().max() > 0
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


def test_a_constant_in_the_frequencies_cancels() -> None:
    model, dense, embeddings = model_and_inputs()
    more = dense.clone()
    more[:, 1] += math.log(1000)
    losses = [model.loss(model(own, embeddings), LABELS) for own in (dense, more)]  # type: ignore[operator]
    torch.testing.assert_close(*losses)


def test_samples_without_a_label_ask_for_nothing_but_are_negatives() -> None:
    model, dense, embeddings = model_and_inputs()
    loss = model.loss(model(dense, embeddings), torch.zeros(len(ITEMS)))  # type: ignore[operator]
    assert loss == 0
    item, user = torch.autograd.grad(model.loss(model(dense, embeddings), LABELS), embeddings[:2])  # type: ignore[operator]
    assert not user[LABELS == 0].any()
    assert item[LABELS == 0].any(1).all()


def test_items_are_the_same_if_all_their_features_are() -> None:
    model, dense, embeddings = model_and_inputs()
    ids = model(dense, embeddings).item_ids
    assert torch.equal(ids[:, None] == ids, ITEMS[:, None] == ITEMS)
    embeddings[3] = embeddings[3].detach().clone()
    embeddings[3][5] += 1  # item 1 in another shop
    ids = model(dense, embeddings).item_ids
    assert ids[1] == ids[3]
    assert ids[5] not in ids[:5]


def test_an_evaluation_scores_each_samples_own_item() -> None:
    job = make_job(TABLES, "sgd", SETTINGS)
    side, (_, dense, embeddings) = JobModel(job, NUM_DENSE), model_and_inputs()
    metrics = EvalMetrics()
    with torch.no_grad():
        outputs = side.forward(dense, embeddings, {}, training=False)
        logits, loss = side.logits(outputs), side.loss(outputs, LABELS)
    torch.testing.assert_close(logits, (outputs.users @ outputs.items.T).diagonal() / 0.2)
    assert side.score_name == "score", "a softmax over other users' items gives no logit"
    metrics.update(logits, LABELS, loss)
    result = result_of(metrics)
    pairs = [(p > n) + 0.5 * (p == n) for p in logits[LABELS == 1] for n in logits[LABELS == 0]]
    assert result.auc == pytest.approx(float(sum(pairs)) / len(pairs))
    assert result.logloss == pytest.approx(float(loss))


def test_an_unknown_dense_feature_and_an_empty_user_are_refused() -> None:
    with pytest.raises(ConfigError, match=facts(f"log_frequency = {NUM_DENSE}", f"{NUM_DENSE} dense features")):
        model_and_inputs(log_frequency=NUM_DENSE)
    job = make_job(TABLES, "sgd", SETTINGS | {"item_features": ["item", "user", "friend", "shop"], "log_frequency": 0})
    with pytest.raises(ConfigError, match="no dense features for the user"):
        build_model(job, 1)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_bits_are_those_of_the_plain_loop(optimizer: str) -> None:
    assert_equal_to_plain_loop(make_job(TABLES, optimizer, SETTINGS))


DENSE_WIDTH, DIMS = 5, (4, 6, 4)
WIDTH = 3 + sum(DIMS)


def job_with(**model: Any) -> Job:
    tables = [
        {"name": f"t{i}", "num_embeddings": 10, "embedding_dim": dim, "features": [f"f{i}"]}
        for i, dim in enumerate(DIMS)
    ]
    terms = {"bottom_mlp": [6, 3], "top_mlp": [8, 1], "cross_layers": 2, "cross_rank": 4}
    return make_job(tables, model={"kind": "dcnv2", **terms, **model})


def inputs(batch_size: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch_size, DENSE_WIDTH, generator=generator), [
        torch.randn(batch_size, dim, generator=generator) for dim in DIMS
    ]


def test_it_is_bottom_mlp_then_cross_layers_over_everything_then_top_mlp() -> None:
    model = build_model(job_with(), DENSE_WIDTH)
    for name, parameter in model.named_parameters():
        if name.endswith("w.bias"):
            torch.nn.init.normal_(parameter)  # zeros would hide where it is added
    w = model.state_dict()
    dense, embeddings = inputs(7)
    x = dense
    for n in range(2):
        x = (x @ w[f"bottom_mlp.{n}.weight"].T + w[f"bottom_mlp.{n}.bias"]).relu()
    x0 = x = torch.cat([x, *embeddings], dim=1)
    for n in range(2):
        x = x0 * (x @ w[f"cross.{n}.v.weight"].T @ w[f"cross.{n}.w.weight"].T + w[f"cross.{n}.w.bias"]) + x
    x = (x @ w["top_mlp.0.weight"].T + w["top_mlp.0.bias"]).relu()
    torch.testing.assert_close(model(dense, embeddings), (x @ w["top_mlp.1.weight"].T + w["top_mlp.1.bias"])[:, 0])


def test_it_starts_with_the_published_values() -> None:
    model = build_model(job_with(cross_rank=400, bottom_mlp=[386]), DENSE_WIDTH)  # a width of 400
    weights = model.state_dict()
    for matrix in ("v", "w"):
        assert weights[f"cross.0.{matrix}.weight"].std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.02)
        assert abs(weights[f"cross.0.{matrix}.weight"].mean().item()) < 0.001
    assert not weights["cross.0.w.bias"].any()
    assert not torch.equal(weights["cross.0.v.weight"], weights["cross.1.v.weight"])


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"top_mlp": [8]}, facts("dcnv2", "bottom_mlp = [...]", "top_mlp = [..., 1]")),
        ({"bottom_mlp": []}, r"dcnv2 needs bottom_mlp"),
        ({"cross_layers": 0}, "cross_layers = 0 must be a whole number from 1"),
        ({"cross_rank": -1}, "cross_rank = -1 must be a whole number from 1"),
    ],
)
def test_what_it_cannot_be_built_from_is_refused(model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_with(**model)
