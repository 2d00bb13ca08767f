"""TBSM against its formula, written once more sample by sample and step by step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rowcast.trainer.models import Embedded, Sequences, build_model
from tests.support.full_capacity import NUM_DENSE, make_job

WIDTH = 4
HISTORY = 3
SETTINGS: dict[str, Any] = {
    **{"kind": "tbsm", "bottom_mlp": [6, WIDTH], "top_mlp": [7, 5], "history": HISTORY},
    **{"attention_mlp": [4, 6], "final_mlp": [6, 1]},
}
TABLES = [
    {"name": "user", "num_embeddings": 9, "embedding_dim": WIDTH, "features": ["user"]},
    {"name": "item", "num_embeddings": 9, "embedding_dim": WIDTH, "features": ["item"], "pooling": "none"},
    {"name": "category", "num_embeddings": 9, "embedding_dim": WIDTH, "features": ["category"], "pooling": "none"},
]
LENGTHS = [4, 6, 1, 0, 3]  # look-ups of each sample: just enough, too many, only a target, nothing, a step too few


def model_and_inputs(**settings: Any) -> tuple[nn.Module, Tensor, list[Embedded]]:
    model = build_model(make_job(TABLES, "sgd", SETTINGS | settings), NUM_DENSE)
    generator = torch.Generator().manual_seed(4)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    user = torch.randn(len(LENGTHS), WIDTH, generator=generator).requires_grad_()
    values = [torch.randn(sum(LENGTHS), WIDTH, generator=generator).requires_grad_() for _ in range(2)]
    sequences = [Sequences(values=own, offsets=offsets) for own in values]
    return model, torch.randn(len(LENGTHS), NUM_DENSE, generator=generator), [user, *sequences]


def layers(weights: dict[str, Tensor], name: str, values: Tensor) -> list[Tensor]:
    """What each layer of an MLP gives, before and after its ReLU: the last entries are those of the last layer."""
    found = [values]
    count = sum(key.startswith(f"{name}.") for key in weights) // 2
    for n in range(count):
        found.append(weights[f"{name}.{n}.weight"] @ found[-1] + weights[f"{name}.{n}.bias"])
        found.append(found[-1].clamp(min=0))
    return found


def dlrm_vector(weights: dict[str, Tensor], dense: Tensor, embeddings: list[Tensor]) -> Tensor:
    vectors = [layers(weights, "dlrm.bottom_mlp", dense)[-1], *embeddings]
    products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    vector = layers(weights, "dlrm.top_mlp", torch.cat([vectors[0], torch.stack(products)]))[-1]
    unit: Tensor = vector / vector.norm().clamp(min=1e-12)
    return unit


def slow_logit(weights: dict[str, Tensor], dense: Tensor, user: Tensor, items: Tensor, categories: Tensor) -> Tensor:
    """The logit of one sample; items and categories [n, D], the target last."""
    if not len(items):
        items = categories = torch.zeros(1, WIDTH)
    steps = [dlrm_vector(weights, dense, [user, *step]) for step in zip(items, categories, strict=True)]
    target, history = steps[-1], steps[:-1][-HISTORY:]
    history = [torch.zeros_like(target)] * (HISTORY - len(history)) + history
    matrix = weights["inner"]
    products = torch.stack([(matrix @ step) @ (matrix @ target) for step in history])
    coefficients = layers(weights, "attention_mlp", products)[-2].sigmoid()
    context = sum((c * step for c, step in zip(coefficients, history, strict=True)), torch.zeros_like(target))
    logit: Tensor = layers(weights, "final_mlp", torch.cat([context, target]))[-2][0]
    return logit


def slow_logits(model: nn.Module, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
    weights: dict[str, Tensor] = dict(model.named_parameters())
    user, *sequences = embeddings
    assert isinstance(user, Tensor)
    parts = [own.values.split(LENGTHS) for own in sequences if isinstance(own, Sequences)]  # type: ignore[no-untyped-call]
    return torch.stack([slow_logit(weights, dense[b], user[b], parts[0][b], parts[1][b]) for b in range(len(LENGTHS))])


def leaves(model: nn.Module, embeddings: list[Embedded]) -> list[Tensor]:
    inputs = [embedding.values if isinstance(embedding, Sequences) else embedding for embedding in embeddings]
    return [*inputs, *model.parameters()]


def test_logits_are_those_of_the_formula() -> None:
    model, dense, embeddings = model_and_inputs()
    logits = model(dense, embeddings)
    assert logits.shape == (len(LENGTHS),)
    torch.testing.assert_close(logits, slow_logits(model, dense, embeddings))
    assert len(set(logits.tolist())) == len(LENGTHS)


def test_gradients_of_rows_and_weights_are_those_of_the_formula() -> None:
    model, dense, embeddings = model_and_inputs()
    ours = torch.autograd.grad(model(dense, embeddings).square().sum(), leaves(model, embeddings))
    theirs = torch.autograd.grad(slow_logits(model, dense, embeddings).square().sum(), leaves(model, embeddings))
    for our, their in zip(ours, theirs, strict=True):
        assert our.abs().max() > 0
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)
    assert not ours[1][4:6].any(), "sample 1 has two look-ups before its history"


def test_a_vector_of_zeros_has_finite_gradients() -> None:
    model, dense, embeddings = model_and_inputs()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights["dlrm.top_mlp.1.bias"].fill_(-100.0)
    loss = model(dense, embeddings).sum()
    assert all(
        grad.isfinite().all()
        for grad in torch.autograd.grad(loss, leaves(model, embeddings), allow_unused=True)
        if grad is not None
    )


@pytest.mark.parametrize("hidden", [[], [4]])
def test_the_attention_mlp_goes_from_the_history_to_the_history(hidden: list[int]) -> None:
    model = model_and_inputs(attention_mlp=hidden)[0]
    shapes = [
        tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith("attention_mlp") and "weight" in name
    ]
    assert shapes == ([(3, 3)] if not hidden else [(4, 3), (3, 4)])
