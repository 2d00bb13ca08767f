"""DIN against its formula, written once more from the paper, history entry by history entry."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rowcast.trainer.models import Embedded, Sequences, build_model
from rowcast.trainer.models.din import Dice
from tests.support.full_capacity import NUM_DENSE, assert_equal_to_plain_loop, make_job, table

WIDTHS = {"item": 4, "shop": 3}
HISTORY = 3
LENGTHS = [2, 5, 1, 0, 3]  # entries of each history: too few, too many, one, none, just enough
TARGETS = [1, 1, 2, 0, 1]  # entries of each target: the last counts, and without one it is zeros
TABLES = [
    table("user", 9, 5, ["user"]),
    table("item", 9, WIDTHS["item"], ["item", "bought"], "none"),
    table("shop", 9, WIDTHS["shop"], ["bought_at", "shop"], "none"),
]
SETTINGS: dict[str, Any] = {
    **{"kind": "din", "targets": {"bought": "item", "bought_at": "shop"}, "history": HISTORY},
    **{"attention_mlp": [6, 4], "top_mlp": [7, 5, 1]},
}


def sequences(width: int, lengths: list[int], generator: torch.Generator) -> Sequences:
    values = torch.randn(sum(lengths), width, generator=generator).requires_grad_()
    return Sequences(values=values, offsets=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))


def model_and_inputs(**settings: Any) -> tuple[nn.Module, Tensor, list[Embedded]]:
    model = build_model(make_job(TABLES, "sgd", SETTINGS | settings), NUM_DENSE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("alpha"):  # which begins with one value everywhere
                weight.normal_(generator=generator)
    dense, user = (torch.randn(len(LENGTHS), width, generator=generator) for width in (NUM_DENSE, 5))
    item, shop = WIDTHS["item"], WIDTHS["shop"]
    pairs = ((item, TARGETS), (item, LENGTHS), (shop, LENGTHS), (shop, TARGETS))
    return model, dense, [user.requires_grad_(), *(sequences(*pair, generator) for pair in pairs)]


def dice(weights: dict[str, Tensor], name: str, rows: list[Tensor], training: bool) -> list[Tensor]:
    """Over the mini-batch `rows`, each f32 [width]."""
    alpha, mean, variance = weights[f"{name}.alpha"], weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
    if training:
        mean = sum(rows, torch.zeros_like(alpha)) / len(rows)
        variance = sum(((row - mean) ** 2 for row in rows), torch.zeros_like(alpha)) / len(rows)
    shares = [1 / (1 + torch.exp(-(row - mean) / (variance + 1e-8) ** 0.5)) for row in rows]
    return [share * row + (1 - share) * alpha * row for share, row in zip(shares, rows, strict=True)]


def prelu(weights: dict[str, Tensor], name: str, rows: list[Tensor], training: bool) -> list[Tensor]:
    return [row.clamp(min=0) + weights[f"{name}.alpha"] * row.clamp(max=0) for row in rows]


def mlp(weights: dict[str, Tensor], name: str, rows: list[Tensor], activation: Any, training: bool) -> list[Tensor]:
    count = sum(key.startswith(f"{name}_mlp.") for key in weights) // 2
    for n in range(count):
        rows = [weights[f"{name}_mlp.{n}.weight"] @ row + weights[f"{name}_mlp.{n}.bias"] for row in rows]
        if n < count - 1:
            rows = activation(weights, f"{name}_activations.{n}", rows, training)
    return rows


def slow_logits(model: nn.Module, dense: Tensor, embeddings: list[Embedded], training: bool) -> Tensor:
    weights: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    user, *others = embeddings
    assert isinstance(user, Tensor)
    item, bought, bought_at, shop = (
        [own.values[own.offsets[b] : own.offsets[b + 1]] for b in range(len(LENGTHS))]
        for own in others
        if isinstance(own, Sequences)
    )
    queries, keys = [], []
    for b in range(len(LENGTHS)):
        last = [own[b][-1] if len(own[b]) else torch.zeros(own[b].shape[1]) for own in (item, shop)]
        queries.append(torch.cat(last))
        keys.append(list(torch.cat([bought[b], bought_at[b]], 1)[-HISTORY:]))
    activation = prelu if hasattr(model, "is_prelu") else dice
    owners = [b for b in range(len(LENGTHS)) for _ in keys[b]]
    entries = [key for own in keys for key in own]
    inputs = [torch.cat([q := queries[b], k, q - k, q * k]) for b, k in zip(owners, entries, strict=True)]
    scores = mlp(weights, "attention", inputs, activation, training)
    rows = []
    for b in range(len(LENGTHS)):
        own = [score[0] for score, owner in zip(scores, owners, strict=True) if owner == b]
        if getattr(model, "softmax"):  # noqa: B009 - a module's attribute is a Tensor to the type checker
            total = sum((score.exp() for score in own), torch.zeros(()))
            own = [score.exp() / total for score in own]
        interest = sum((a * key for a, key in zip(own, keys[b], strict=True)), torch.zeros(sum(WIDTHS.values())))
        rows.append(torch.cat([dense[b], user[b], queries[b], interest]))
    return torch.stack(mlp(weights, "top", rows, activation, training)).squeeze(1)


def leaves(model: nn.Module, embeddings: list[Embedded]) -> list[Tensor]:
    return [own.values if isinstance(own, Sequences) else own for own in embeddings] + list(model.parameters())


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("activation", ["dice", "prelu"])
def test_logits_and_gradients_are_those_of_the_paper(activation: str, softmax: bool) -> None:
    model, dense, embeddings = model_and_inputs(activation=activation, softmax=softmax)
    if activation == "prelu":
        model.is_prelu = torch.tensor(True)
    their_logits = slow_logits(model, dense, embeddings, training=True)
    logits = model(dense, embeddings)
    assert logits.shape == (len(LENGTHS),)
    torch.testing.assert_close(logits, their_logits)
    ours = torch.autograd.grad(logits.square().sum(), leaves(model, embeddings))
    theirs = torch.autograd.grad(their_logits.square().sum(), leaves(model, embeddings))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-3, atol=1e-5)
    assert sum(bool(our.abs().max() > 1e-4) for our in ours) >= len(ours) - 2
    assert not ours[2][2:4].any(), "sample 1 has two entries before its history"


def test_an_evaluation_takes_the_running_means_and_leaves_them() -> None:
    model, dense, embeddings = model_and_inputs()
    for _ in range(3):
        model(dense, embeddings)
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.testing.assert_close(model(dense, embeddings), slow_logits(model, dense, embeddings, training=False))
    assert len(before) == 2 * (2 + 2)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    first = embeddings[0]
    assert isinstance(first, torch.Tensor)
    alone = (
        first[2:3],
        *(
            Sequences(values=own.values[own.offsets[2] : own.offsets[3]], offsets=own.offsets[2:4] - own.offsets[2])
            for own in embeddings[1:]
            if isinstance(own, Sequences)
        ),
    )
    torch.testing.assert_close(model(dense[2:3], list(alone)), model(dense, embeddings)[2:3])


def test_dice_keeps_running_means_of_rows_that_are_present() -> None:
    layer, features = Dice(2), torch.tensor([[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]])
    layer(features, torch.tensor([[1.0], [1.0], [0.0]]))
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.2, 0.4]))
    torch.testing.assert_close(layer.running_var, torch.tensor([1.0, 1.3]))
    layer(features, torch.zeros(3, 1))
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.2, 0.4]))
    assert layer(torch.full((2, 2), 5.0), torch.ones(2, 1)).isfinite().all(), "a variance of 0"


@pytest.mark.parametrize("softmax", [False, True])
def test_a_batch_without_any_history_has_finite_gradients(softmax: bool) -> None:
    model, dense, embeddings = model_and_inputs(softmax=softmax)
    generator = torch.Generator().manual_seed(5)
    none = [0] * len(LENGTHS)
    embeddings[2:4] = [sequences(width, none, generator) for width in WIDTHS.values()]
    logits = model(dense, embeddings)
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(logits.sum(), leaves(model, embeddings)))


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("activation", ["dice", "prelu"])
def test_bits_are_those_of_the_plain_loop(optimizer: str, activation: str) -> None:
    job = make_job(TABLES, optimizer, SETTINGS | {"activation": activation})
    assert_equal_to_plain_loop(job, lengths=(0, 5))
