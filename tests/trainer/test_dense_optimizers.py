"""The job's dense side has the bits and the state of torch's, without what torch imports to compile."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowcast.job.optimizers import learning_rate
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.kernels.torch_ops import clip_rows
from rowcast.trainer.models import build_dense_optimizer
from rowcast.trainer.models.job_model import CPU, JobModel, check_compiler, mean_loss, set_precision
from rowcast.trainer.models.model_state import model_state, pack, restore_model, unpack
from rowcast.trainer.models.runner import StepRunner
from tests.support import jobs
from tests.support.facts import facts
from tests.support.full_capacity import bits, make_job, table

SHAPES = ((5, 7), (33,), (1,), (0, 3))
STEPS = 12
TORCHS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
share = st.floats(0.0, 0.99)
positive = st.floats(1e-12, 1.0)
common = {"lr": positive, "weight_decay": st.just(0.0) | share}
dense = st.one_of(
    st.fixed_dictionaries({"kind": st.just("sgd"), "momentum": st.just(0.0) | share, **common}),
    st.fixed_dictionaries({"kind": st.just("adagrad"), "initial_accumulator": share, "eps": positive, **common}),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["adam", "adamw"]), "betas": st.tuples(share, share), "eps": positive, **common}
    ),
)
JOBS_NAMES = {"initial_accumulator": "initial_accumulator_value"}  # where they differ from torch's


class Side:
    """Parameters and their optimizer: ours, or torch's with the same arguments."""

    def __init__(self, kind: str, own: dict[str, Any], *, is_ours: bool, foreach: bool) -> None:
        random = torch.Generator().manual_seed(3)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]
        if is_ours:
            job = make_job([table("t", 9, 4, ["f"])], dense={"kind": kind, **own})
            self.optimizer: Any = build_dense_optimizer(job, self.parameters)
        else:
            named = {JOBS_NAMES.get(name, name): value for name, value in own.items()}
            self.optimizer = TORCHS[kind](self.parameters, **named)
        for group in self.optimizer.param_groups:
            group["foreach"] = foreach  # torch's choice on a device

    def step(self, at: int) -> None:
        random = torch.Generator().manual_seed(at)
        for place, parameter in enumerate(self.parameters):
            grad = torch.randn(parameter.shape, generator=random)
            parameter.grad = None if (at + place) % 5 == 0 else grad  # a model may leave one without a gradient
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in self.parameters)

    def take_over(self, other: "Side") -> None:
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        with torch.no_grad():
            for own, another in zip(self.parameters, other.parameters, strict=True):
                own.copy_(another)


def state(side: Side) -> list[tuple[str, torch.dtype, Tensor]]:
    """Every tensor that training changes, with its name."""
    found = side.optimizer.state_dict()["state"]
    tensors = {f"{index}.{name}": value for index, own in found.items() for name, value in own.items()}
    tensors |= {str(place): own.detach() for place, own in enumerate(side.parameters)}
    return [(name, own.dtype, bits(own)) for name, own in tensors.items() if own is not None]


def same(one: Side, another: Side) -> bool:
    pairs = zip(state(one), state(another), strict=True)
    return all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in pairs)


@settings(max_examples=60)
@given(dense, st.booleans(), st.integers(0, STEPS))
def test_bits_and_states_are_torchs_and_each_goes_on_from_the_other(
    chosen: dict[str, Any], foreach: bool, handed_over: int
) -> None:
    kind = chosen.pop("kind")
    ours, torchs = (Side(kind, chosen, is_ours=is_ours, foreach=foreach) for is_ours in (True, False))
    for at in range(STEPS):
        if at == handed_over:
            ours_before, torchs_before = copy.deepcopy((ours, torchs))
            ours.take_over(torchs_before)
            torchs.take_over(ours_before)
        ours.step(at)
        torchs.step(at)
        assert same(ours, torchs)
    groups = [side.optimizer.state_dict()["param_groups"] for side in (ours, torchs)]
    assert groups[0] == groups[1]
    assert isinstance(ours.optimizer, TORCHS[kind])
    assert type(ours.optimizer).__name__ == type(torchs.optimizer).__name__


NUM_DENSE, DIM, BATCH = 5, 4, 16
TABLES = [{"name": f"t{i}", "num_embeddings": 10, "embedding_dim": DIM, "features": [f"f{i}"]} for i in range(3)]
MODEL = {"bottom_mlp": [6, DIM], "top_mlp": [8, 1]}
DECAY = {"warmup": 2, "kind": "cosine", "decay_steps": 6}


def job_with(model: dict[str, Any] | None = None, **dense: Any) -> Job:
    return make_job(TABLES, model={**MODEL, **(model or {})}, dense={"kind": "adam", "lr": 0.1, **dense})


def batch(seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = [torch.randn(BATCH, DIM, generator=generator) for _ in TABLES]
    return (
        torch.randn(BATCH, NUM_DENSE, generator=generator),
        embeddings,
        torch.rand(BATCH, generator=generator).round(),
    )


def train(side: JobModel, train_step: int) -> Tensor:
    dense, embeddings, labels = batch(train_step)
    loss = mean_loss(side.forward(dense, embeddings, {}, training=True), labels)
    torch.autograd.backward(loss)
    side.step(train_step)
    return loss.detach()


def test_bf16_is_autocast_of_the_forward_with_weights_gradients_and_logits_in_fp32() -> None:
    side, plain = JobModel(job_with({"precision": "bf16"}), NUM_DENSE), JobModel(job_with(), NUM_DENSE)
    dense, embeddings, _ = batch(0)
    seen: list[torch.dtype] = []
    side.model.get_submodule("top_mlp.1").register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    logits = side.forward(dense, embeddings, {}, training=True)
    torch.autograd.backward(logits.sum())
    assert seen == [torch.bfloat16]
    assert logits.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in side.model.parameters() if parameter.grad is not None} == {
        torch.float32
    }
    exact = plain.forward(dense, embeddings, {}, training=True)
    assert not torch.equal(logits, exact)
    torch.testing.assert_close(logits, exact, atol=0.05, rtol=0.05)


def test_tf32_without_cuda_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        ConfigError,
        match=facts('model.precision = "tf32"', "CUDA", "trainer.device is cpu"),
    ):
        JobModel(job_with({"precision": "tf32"}), NUM_DENSE)


def test_tf32_of_a_cuda_device_is_torchs_high_precision() -> None:
    try:
        set_precision("tf32", torch.device("cuda:0"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        set_precision("fp32", CPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_machine_without_a_compiler_is_told_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*args: Any, **options: Any) -> Any:
        def fail(tensor: Tensor) -> Tensor:
            raise RuntimeError("no working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with pytest.raises(
        ConfigError,
        match=facts("model.compile", "C++ compiler", "g++"),
    ):
        check_compiler(CPU)


def test_a_compiled_model_over_sequences_is_refused_at_load() -> None:
    tables = [{**TABLES[0], "pooling": "none"}]
    with pytest.raises(ConfigError, match=facts("model.compile", "table t0", 'pooling = "none"')):
        make_job(tables, model={"kind": "tests.support.full_capacity:Concatenated", "compile": True})


def test_what_only_evaluates_asks_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    job = job_with({"compile": True})
    records = [torch.zeros(4, group.record_floats) for group in group_specs(job)]
    StepRunner(job, records, NUM_DENSE, trains=False)


def test_full_train_batches_run_compiled_and_all_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def compiled(model: Any, **options: Any) -> Any:
        def call(dense: Tensor, *rest: Any) -> Any:
            sizes.append(len(dense))
            return model(dense, *rest)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("rowcast.trainer.models.job_model.check_compiler", lambda device: None)
    job = job_with({"compile": True})
    side = JobModel(job, NUM_DENSE)
    full = job.data.batch_size
    for size, training in ((full, True), (full, False), (full - 1, True), (full, True)):
        side.forward(torch.zeros(size, NUM_DENSE), [torch.zeros(size, DIM) for _ in TABLES], {}, training=training)
    assert sizes == [full, full]
    assert not any("_orig_mod" in name for name in side.model.state_dict())


@pytest.mark.parametrize(
    "clip", [{"clip_norm": 0.01}, {"clip_value": 0.001}, {"clip_value": 0.005, "clip_norm": 0.01}, {"clip_norm": 1e6}]
)
def test_gradients_are_clipped_as_torch_clips_them(clip: dict[str, Any]) -> None:
    side = JobModel(job_with(kind="sgd", **clip), NUM_DENSE)
    free = JobModel(job_with(kind="sgd"), NUM_DENSE)
    start = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
    for each in (side, free):
        train(each, 0)
    moved, unclipped = (
        torch.cat([(start[name] - tensor).flatten() / 0.1 for name, tensor in each.model.state_dict().items()])
        for each in (side, free)
    )
    expected = nn.Parameter(torch.zeros_like(unclipped))
    expected.grad = unclipped.clone()
    nn.utils.clip_grad_value_([expected], clip.get("clip_value", 1e9))
    nn.utils.clip_grad_norm_([expected], clip.get("clip_norm", 1e9))
    torch.testing.assert_close(moved, expected.grad, atol=1e-6, rtol=1e-3)
    assert moved.norm() < 0.5 * unclipped.norm() or clip == {"clip_norm": 1e6}


def test_rows_are_clipped_with_bits_that_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(0)
    for dim in (1, 5, 16, 33, 128):
        grads = torch.randn(700, dim) * 10 ** (torch.rand(700, 1) * 4 - 2)
        grads[::7] = 0
        clipped = clip_rows(grads, 0.5)
        assert clipped.norm(dim=1).max() <= 0.5 * (1 + 1e-5)
        short = grads.norm(dim=1) < 0.49
        assert short.any()
        assert not short.all()
        assert torch.equal(clipped[short], grads[short]), "a short gradient stays as it is"
        for block in (1, 3, 64):
            apart = torch.cat([clip_rows(part.clone(), 0.5) for part in torch.split(grads, block)])
            assert torch.equal(apart, clipped)


def test_each_step_is_trained_at_its_own_rate() -> None:
    job = job_with(schedule=DECAY)
    side = JobModel(job, NUM_DENSE)
    rates = []
    for step in range(9):
        train(side, step)
        rates.append(side.dense_step.objects[0].param_groups[0]["lr"])
    assert job.optimizer.dense is not None
    assert rates == [learning_rate(job.optimizer.dense, step) for step in range(9)]
    assert len(set(rates)) > 5
    assert rates[-1] == 0


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_a_restart_in_the_middle_of_a_schedule_cannot_be_seen(kind: str) -> None:
    job = job_with(kind=kind, schedule=DECAY, clip_norm=0.5)
    whole = JobModel(job, NUM_DENSE)
    losses = [train(whole, step) for step in range(8)]
    first = JobModel(job, NUM_DENSE)
    again = [train(first, step) for step in range(4)]
    saved = unpack(pack({**model_state(first.model), **first.dense_step.state()}))
    second = JobModel(job, NUM_DENSE)
    restore_model(second.model, saved)
    second.dense_step.restore(saved)
    again += [train(second, step) for step in range(4, 8)]
    assert torch.equal(torch.stack(again), torch.stack(losses))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


@pytest.mark.parametrize(("section", "key"), [("sparse", "clip_rows"), ("dense", "clip_norm"), ("dense", "clip_value")])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_clip_is_refused(section: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=facts(f"optimizer.{section}.{key} = {value}")):
        make_with_optimizer({section: {key: value}})


def test_one_norm_over_rows_and_weights_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError,
        match=facts("clip_norm over rows", "backward", "dense.clip_norm"),
    ):
        make_with_optimizer({"clip_norm": 1.0})


def make_with_optimizer(optimizer: dict[str, Any]) -> Job:
    sides = {side: {"kind": "sgd", "lr": 0.1, **optimizer.get(side, {})} for side in ("sparse", "dense")}
    return jobs.job(tables=TABLES, model={"kind": "dlrm", **MODEL}, optimizer={**optimizer, **sides})
