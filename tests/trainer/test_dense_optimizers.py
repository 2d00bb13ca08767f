"""The job's dense optimizers are torch's, to the bit and to the state, without what torch imports to compile."""

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowcast.trainer.models import build_dense_optimizer
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
