"""DCNv2 as published: its formula, its gradients, its first values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_model
from tests.support.facts import facts
from tests.support.full_capacity import make_job

NUM_DENSE, DIMS = 5, (4, 6, 4)
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
    return torch.randn(batch_size, NUM_DENSE, generator=generator), [
        torch.randn(batch_size, dim, generator=generator) for dim in DIMS
    ]


def test_it_is_bottom_mlp_then_cross_layers_over_everything_then_top_mlp() -> None:
    model = build_model(job_with(), NUM_DENSE)
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
    model = build_model(job_with(cross_rank=400, bottom_mlp=[386]), NUM_DENSE)  # a width of 400
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
