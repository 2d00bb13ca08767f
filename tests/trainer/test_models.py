"""DLRM as published, custom models, and what keeps their bits apart from where their inputs lie."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models import build_dense_optimizer, build_model
from rowcast.trainer.models.embedding import cut, joined
from tests.support.facts import facts
from tests.support.full_capacity import Concatenated, bits, make_job

NUM_DENSE = 5


def job_with(dim: int = 4, **model: Any) -> Job:
    tables = [{"name": f"t{i}", "num_embeddings": 10, "embedding_dim": dim, "features": [f"f{i}"]} for i in range(3)]
    return make_job(tables, model=model or {"bottom_mlp": [6, dim], "top_mlp": [8, 1]})


def inputs(batch_size: int, dim: int = 4) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(batch_size, dim, generator=generator) for _ in range(3)]
    return torch.randn(batch_size, NUM_DENSE, generator=generator), embeddings


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same values, `by` floats further into a block of memory."""
    block = torch.empty(tensor.numel() + by)
    return block[by:].view(tensor.shape).copy_(tensor)


def test_dlrm_is_bottom_mlp_then_pairwise_products_then_top_mlp() -> None:
    model = build_model(job_with(), NUM_DENSE)
    weights = model.state_dict()
    dense, embeddings = inputs(7)
    bottom = dense
    for layer in range(2):
        bottom = (bottom @ weights[f"bottom_mlp.{layer}.weight"].T + weights[f"bottom_mlp.{layer}.bias"]).relu()
    vectors = [bottom, *embeddings]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    top = torch.cat([bottom, torch.stack(pairs, dim=1)], dim=1)
    top = (top @ weights["top_mlp.0.weight"].T + weights["top_mlp.0.bias"]).relu()
    logits = top @ weights["top_mlp.1.weight"].T + weights["top_mlp.1.bias"]
    torch.testing.assert_close(model(dense, embeddings), logits[:, 0])


def test_a_fused_interaction_is_that_of_bmm_but_for_roundings_and_trains_with_bits_of_its_own_order() -> None:
    plain, fused = (
        build_model(job_with(dim=16, bottom_mlp=[6, 16], top_mlp=[8, 1], **own), NUM_DENSE)
        for own in ({}, {"interaction": "fused"})
    )
    dense, embeddings = inputs(7, dim=16)
    together = torch.cat(embeddings).requires_grad_()
    found = []
    for model in (plain, fused):
        logits = model(dense, cut(together, [7, 7, 7]))
        torch.autograd.backward(logits.sum())
        found.append((logits, together.grad))
        together.grad = None
    torch.testing.assert_close(found[1], found[0])
    with pytest.raises(ConfigError, match=facts("model.interaction", "fused", "model.compile")):
        job_with(dim=16, bottom_mlp=[16], top_mlp=[1], interaction="fused", compile=True)


def test_features_of_one_group_are_neither_stacked_nor_joined_by_a_copy() -> None:
    whole = torch.arange(24.0).view(6, 4).requires_grad_()
    parts = cut(whole, [1, 2, 3])
    assert joined(parts).data_ptr() == whole.data_ptr()
    grads = torch.randn(6, 4)
    kept: list[Tensor] = []
    whole.register_hook(kept.append)  # type: ignore[no-untyped-call]
    torch.autograd.backward(parts, list(grads.split_with_sizes([1, 2, 3])))
    assert kept[0].data_ptr() == grads.data_ptr()
    apart = [parts[1], parts[0], parts[2]]
    assert torch.equal(joined(apart), torch.cat(apart))
    assert torch.equal(joined([parts[0], parts[2]]), torch.cat([parts[0], parts[2]]))


def test_dlrm_names_its_parameters_by_linear_layer_and_keeps_nothing_else() -> None:
    names = list(build_model(job_with(), NUM_DENSE).state_dict())
    assert names == [
        f"{mlp}.{layer}.{kind}" for mlp in ("bottom_mlp", "top_mlp") for layer in (0, 1) for kind in ("weight", "bias")
    ]


def test_dlrm_starts_with_the_published_deviations() -> None:
    model = build_model(job_with(dim=64, bottom_mlp=[512, 64], top_mlp=[256, 1]), NUM_DENSE)
    weights = model.state_dict()
    assert weights["bottom_mlp.1.weight"].std().item() == pytest.approx((2 / (512 + 64)) ** 0.5, rel=0.03)
    assert weights["bottom_mlp.0.bias"].std().item() == pytest.approx((1 / 512) ** 0.5, rel=0.15)
    assert abs(weights["bottom_mlp.1.weight"].mean().item()) < 0.002


DCNV2 = {"kind": "dcnv2", "bottom_mlp": [6, 3], "top_mlp": [8, 1], "cross_layers": 2, "cross_rank": 4}


@pytest.mark.parametrize("model", [{}, DCNV2, {"kind": "tests.support.full_capacity:Concatenated"}])
def test_initial_weights_come_from_the_jobs_seed_and_leave_the_global_state_alone(model: dict[str, Any]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(job_with(**model), NUM_DENSE).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(job_with(**model), NUM_DENSE).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("model", [{}, {"kind": "tests.support.full_capacity:Concatenated"}])
@pytest.mark.parametrize("shift", range(1, 17))
def test_the_bits_of_a_model_do_not_depend_on_where_its_inputs_lie(model: dict[str, Any], shift: int) -> None:
    built = build_model(job_with(**model), NUM_DENSE)
    dense, embeddings = inputs(7)
    expected = built(dense, embeddings)
    assert torch.equal(built(shifted(dense, shift), [shifted(embedding, shift) for embedding in embeddings]), expected)


def test_a_custom_factory_gets_job_dense_features_and_options() -> None:
    job = job_with(kind="tests.support.full_capacity:Concatenated", options={"ignore": ["f1"]})
    model = build_model(job, NUM_DENSE)
    assert isinstance(model, Concatenated)
    assert model.used == [0, 2]
    assert model.linear.in_features == NUM_DENSE + 8


def not_a_model(job: Job, num_dense: int) -> str:
    return "no model"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no_such_package:factory", facts("model.kind", "No module named", "no_such_package")),
        ("tests.trainer.test_models:missing", facts("model.kind", "missing", "PYTHONPATH")),
        ("tests.trainer.test_models:not_a_model", facts("returned str", "torch.nn.Module")),
    ],
)
def test_a_factory_that_gives_no_model_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(job_with(kind=kind), NUM_DENSE)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"kind": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.01},
            {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01},
        ),
        (
            {"kind": "adagrad", "lr": 0.5, "initial_accumulator": 0.1},
            {"lr": 0.5, "eps": 1e-10, "initial_accumulator_value": 0.1},
        ),
        ({"kind": "adam", "lr": 0.5, "betas": [0.8, 0.9]}, {"lr": 0.5, "eps": 1e-8, "betas": (0.8, 0.9)}),
        ({"kind": "adam", "lr": 0.5, "eps": 1e-3}, {"eps": 1e-3}),
        (
            {"kind": "adamw", "lr": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.1},
            {"lr": 0.5, "eps": 1e-8, "betas": (0.8, 0.9), "weight_decay": 0.1},
        ),
        ({"kind": "adamw", "lr": 0.5}, {"weight_decay": 0.0}),
    ],
)
def test_the_dense_optimizer_is_torchs_with_the_jobs_settings(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    job = make_job([{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["f"]}], dense=settings)
    optimizer = build_dense_optimizer(job, [nn.Parameter(torch.zeros(2))])
    assert type(optimizer).__name__.lower() == settings["kind"]
    assert {name: optimizer.defaults[name] for name in expected} == expected
    together, alone = (trained_dense(job, foreach) for foreach in (True, False))  # torch's choice on a device and a CPU
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(together, alone, strict=True))


def trained_dense(job: Job, foreach: bool) -> list[Tensor]:
    """Parameters of three shapes after five steps of random gradients."""
    random = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=random)) for shape in ((5, 7), (33,), (1,))]
    optimizer = build_dense_optimizer(job, parameters)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
