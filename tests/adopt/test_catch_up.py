"""Rows that were away get the steps that they missed: the bits of torch.optim over a whole table."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import catch_up as module
from rowcast.trainer.adopt import missed_steps
from rowcast.trainer.adopt.catch_up import catch_up
from rowcast.trainer.adopt.missed_steps import (
    EPS,
    KEPT,
    LOOK,
    RATE,
    ROOT,
    AdamLoops,
    LoggedStep,
    StepLog,
    has_rows,
    is_calm,
)
from rowcast.trainer.adopt.records import Records

ROWS, DIM = 24, 6
RULES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": torch.tensor(0.01), "momentum": 0.9}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.01}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("Adam", {"lr": torch.tensor(0.01)}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("NAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {"lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.01}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adadelta", {}),
    ("ASGD", {"t0": 10, "lambd": 0.01}),
    ("Rprop", {}),
]


class Whole:
    """A table [ROWS, DIM] whose every row takes every step in torch, and what each step was."""

    def __init__(self, rule: type[Optimizer], values: Tensor, **hyper: Any) -> None:
        self.param = nn.Parameter(values.clone())
        self.optimizer = rule([self.param], **hyper)
        self.log = StepLog(rule)

    def step(self, grad: Tensor, **changed: Any) -> None:
        group = self.optimizer.param_groups[0]
        group.update(changed)
        self.log.append(group, self.optimizer.state.get(self.param, {}))
        self.param.grad = grad
        self.optimizer.step()

    def rows(self) -> dict[str, Tensor]:
        """Copies of the weights and of each state that has rows."""
        state = self.optimizer.state.get(self.param, {})
        return {"weights": self.param.detach().clone()} | {k: x.clone() for k, x in state.items() if has_rows(x)}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, int]:
    """The values of each name with other bits; all NaN are one value."""
    bits = {
        name: (a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())
        for name, a, b in ((name, one[name], other[name]) for name in other)
    }
    return {name: int(each.sum()) for name, each in bits.items() if each.any()}


def caught_up(rows: dict[str, Tensor], lasts: Tensor, log: StepLog) -> dict[str, Tensor]:
    states = {name: state for name, state in rows.items() if name != "weights"}
    missed = log.steps * len(lasts) - int(lasts.sum())
    assert catch_up(Records(rows["weights"], states, lasts), log) == missed
    assert (lasts == log.steps).all()
    return rows


def odd_values(generator: torch.Generator) -> Tensor:
    """Values of many sizes, some zero, -0.0 or denormal."""
    sizes = 10 ** (torch.rand(ROWS, DIM, generator=generator) * 12 - 8)
    values = (torch.randn(ROWS, DIM, generator=generator) * sizes).float()
    kinds = torch.randint(0, 20, (ROWS, DIM), generator=generator)
    for kind, value in ((0, 0.0), (1, -0.0), (2, 1e-41), (3, -7e-45)):
        values[kinds == kind] = value
    return values


def gradients(seed: int) -> Callable[[], Tensor]:
    """Of about half the rows; zero elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(ROWS, DIM, generator=generator) * (torch.rand(ROWS, 1, generator=generator) < 0.5)


@pytest.mark.parametrize(("name", "hyper"), RULES, ids=lambda each: str(each))
def test_rows_alone_end_with_the_bits_of_a_whole_table(name: str, hyper: dict[str, Any]) -> None:
    """Each step trains the rows with a gradient only, after they have caught up; at the end all rows catch up."""
    rule = getattr(torch.optim, name)
    generator = torch.Generator().manual_seed(3)
    whole = Whole(rule, odd_values(generator), **hyper)
    kept, lasts = whole.rows(), torch.zeros(ROWS, dtype=torch.int64)
    base = whole.optimizer.param_groups[0]["lr"]
    for step in range(60):
        used = (torch.rand(ROWS, generator=generator) < 0.15).nonzero().view(-1)
        before = whole.rows()
        mine = caught_up({k: x[used] for k, x in kept.items()}, lasts[used], whole.log)
        assert differing(mine, {k: x[used] for k, x in before.items()}) == {}
        grad = torch.zeros(ROWS, DIM)
        grad[used] = torch.randn(len(used), DIM, generator=generator)
        whole.step(grad, lr=base * (1 + 0.5 * float(np.cos(step / 9))))
        for key, value in whole.rows().items():
            kept.setdefault(key, torch.full((ROWS, DIM), float("nan")))[used] = value[used]
        lasts[used] = whole.log.steps
    assert len(set(lasts.tolist())) > 5
    assert differing(caught_up(kept, lasts, whole.log), whole.rows()) == {}


def rates(kind: str, base: float, step: int) -> float:
    return {
        "constant": base,
        "falling": base * 0.999**step,
        "warm-up": base * min(1.0, (step + 1) / 300),
        "cosine": base * (1 + 0.9 * float(np.cos(step / 50))),
        "restarts": base * (1000.0 if step % 400 == 399 else 0.99 ** (step % 400)),
        "growing": base * min(1e4, 1.12**step),
    }[kind]


LASTS = st.lists(st.integers(3, 2000), min_size=1, max_size=5)
ADAMS = st.fixed_dictionaries(
    {
        "betas": st.tuples(st.sampled_from([0.0, 0.4, 0.9, 0.95, 0.99]), st.sampled_from([0.5, 0.98, 0.999, 0.99999])),
        "eps": st.sampled_from([0.0, 1e-30, 1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.0, 1e-6, 0.3]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from([Adam, AdamW]),
    hyper=ADAMS,
    base=st.sampled_from([1e-5, 1e-3, 0.1, 3.0]),
    kind=st.sampled_from(["constant", "falling", "warm-up", "cosine", "restarts", "growing"]),
    lasts=LASTS,
    seed=st.integers(0, 1000),
)
def test_adam_has_the_bits_of_torch_for_all_hyper_parameters_and_gaps(
    rule: type[Optimizer], hyper: dict[str, Any], base: float, kind: str, lasts: list[int], seed: int
) -> None:
    if hyper["betas"][0] == 0:  # torch gives zeros another sign at other places (docs/log/catch-up.md)
        hyper["maximize"] = False
    check_gaps(Whole(rule, odd_values(torch.Generator().manual_seed(seed)), **hyper), base, kind, lasts, seed)


@settings(max_examples=15, deadline=None)
@given(
    hyper=st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.5, 0.99]),
            "weight_decay": st.sampled_from([0.0, 1e-6, 0.3]),
            "dampening": st.just(0.0) | st.floats(0, 1),
            "maximize": st.booleans(),
        }
    ),
    nesterov=st.booleans(),
    base=st.sampled_from([1e-3, 0.1]),
    kind=st.sampled_from(["constant", "cosine", "restarts"]),
    lasts=LASTS,
    seed=st.integers(0, 1000),
)
def test_sgd_has_the_bits_of_torch_for_all_hyper_parameters_and_gaps(
    hyper: dict[str, Any], nesterov: bool, base: float, kind: str, lasts: list[int], seed: int
) -> None:
    if nesterov and hyper["momentum"]:
        hyper |= {"nesterov": True, "dampening": 0.0}
    check_gaps(Whole(SGD, odd_values(torch.Generator().manual_seed(seed)), **hyper), base, kind, lasts, seed)


def check_gaps(whole: Whole, base: float, kind: str, lasts: list[int], seed: int) -> None:
    """The first 3 steps have gradients. Row i is taken from the table after 3 or lasts[i] steps."""
    draw, taken, lasts = gradients(seed), {}, [3, *lasts]
    for step in range(max(lasts)):
        whole.step(draw() if step < 3 else torch.zeros(ROWS, DIM), lr=rates(kind, base, step))
        if step + 1 in lasts:
            taken[step + 1] = whole.rows()
    expected = whole.rows()
    chosen = [lasts[row % len(lasts)] for row in range(ROWS)]
    mine = {k: torch.stack([taken[last][k][row] for row, last in enumerate(chosen)]) for k in expected}
    assert differing(caught_up(mine, torch.tensor(chosen), whole.log), expected) == {}


def after_training(rule: type[Optimizer] = Adam, steps: int = 3, **hyper: Any) -> Whole:
    """Weights of about 0.1 after some steps with gradients."""
    whole = Whole(rule, torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)) * 0.1, **hyper)
    draw = gradients(5)
    for _ in range(steps):
        whole.step(draw())
    return whole


def absent(whole: Whole, steps: int, **changed: Any) -> None:
    for _ in range(steps):
        whole.step(torch.zeros(ROWS, DIM), **changed)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The full steps that `AdamLoops` takes from now on, a call each."""
    calls: list[int] = []
    original = AdamLoops.in_full

    def in_full(self: AdamLoops, block: Any, at: Any, steps: int, end: int) -> None:
        calls.append(steps)
        original(self, block, at, steps, end)

    monkeypatch.setattr(AdamLoops, "in_full", in_full)
    return calls


def most_full_steps(rows: Mapping[str, Tensor], beta1: float, steps: int, beta2: float = 0.999) -> float:
    """The bound of docs/log/catch-up.md at a rate of 0.001 and eps 0."""
    corrections = (1 - beta2**steps) ** 0.5 / (1 - beta1**steps)
    root = rows["max_exp_avg_sq" if "max_exp_avg_sq" in rows else "exp_avg_sq"].sqrt()
    moved = rows["exp_avg"] != 0
    updates = 0.001 * rows["exp_avg"][moved].abs() / root[moved] / rows["weights"][moved].abs()
    return math.log(2**26 * float(updates.max()) * max(1, corrections)) / math.log(beta2**0.5 / max(beta1, 1e-9))


@pytest.mark.parametrize(("beta1", "most"), [(0.0, 40), (0.5, 100), (0.9, 300), (0.95, 450)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_weights_come_to_rest_and_then_only_decay(
    beta1: float, most: int, amsgrad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = after_training(betas=(beta1, 0.999), amsgrad=amsgrad)
    rows = whole.rows()
    bound = most_full_steps(rows, beta1, 3)
    assert bound < most
    absent(whole, math.ceil(bound))
    resting = whole.rows()["weights"]
    absent(whole, 2000 - math.ceil(bound))
    assert torch.equal(whole.rows()["weights"], resting)
    calls = counted(monkeypatch)
    assert differing(caught_up(rows, torch.full((ROWS,), 3), whole.log), whole.rows()) == {}
    calls = calls[1:]  # the first tries the loops
    assert LOOK <= sum(calls) <= bound + 4 * LOOK  # rows leave in groups


def test_a_rate_that_grows_moves_resting_weights_again() -> None:
    whole = after_training(lr=1e-4)
    rows = whole.rows()
    absent(whole, 200)
    before = whole.rows()["weights"]
    absent(whole, 200, lr=1e6)
    assert not torch.equal(whole.rows()["weights"], before)
    assert differing(caught_up(rows, torch.full((ROWS,), 3), whole.log), whole.rows()) == {}


def test_resting_weights_of_adamw_only_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = after_training(AdamW, weight_decay=0.5)
    rows = whole.rows()
    absent(whole, 2000)
    calls = counted(monkeypatch)
    assert differing(caught_up(rows, torch.full((ROWS,), 3), whole.log), whole.rows()) == {}
    assert sum(calls) < 700


@pytest.mark.parametrize(
    "hyper", [{"weight_decay": 1e-6}, {"weight_decay": 1e-30}, {"eps": 0.0}, {"betas": (0.9995, 0.9)}]
)
def test_where_the_proof_does_not_hold_each_step_is_taken_in_full(
    hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = after_training(**hyper)
    rows = whole.rows()
    absent(whole, 1000)
    calls = counted(monkeypatch)
    assert differing(caught_up(rows, torch.full((ROWS,), 3), whole.log), whole.rows()) == {}
    assert sum(calls[1:]) == 1000


def test_calm_ends_where_the_rate_grows_by_more_than_the_moments_shrink() -> None:
    loops = AdamLoops(adam_settings())
    loops.add(LoggedStep(adam_settings(), {"step": torch.tensor(1e4)}, ()))
    numbers = loops.numbers.table[0].tolist()

    def calm(**changed: float) -> bool:
        places = {"rate": RATE, "root": ROOT, "eps": EPS, "kept": KEPT}
        now = list(numbers)
        for name, factor in changed.items():
            now[places[name]] *= factor
        return is_calm(numbers, now)

    most = 0.999**0.5 / 0.9
    assert calm()
    assert calm(rate=most * (1 - 1e-5))
    assert not calm(rate=most * (1 + 1e-5))
    assert not calm(rate=1 / 0.9)
    assert calm(kept=0.99)
    assert not calm(kept=0.99, rate=most * (1 - 1e-5))
    assert not calm(eps=0.5)
    assert not calm(root=0.99)
    assert not calm(rate=0.0)


def adam_settings() -> dict[str, Any]:
    return dict(Adam([nn.Parameter(torch.zeros(1))]).param_groups[0])


@settings(max_examples=30, deadline=None)
@given(
    beta1=st.sampled_from([0.0, 0.3, 0.6, 0.9, 0.95, 0.99]),
    beta2=st.sampled_from([0.9, 0.99, 0.999]),
    growth=st.floats(0.98, 1.0),
    start=st.integers(0, 200),
    seed=st.integers(0, 1000),
)
def test_rest_lasts_though_the_rate_grows_as_fast_as_it_may(
    beta1: float, beta2: float, growth: float, start: int, seed: int
) -> None:
    """In torch itself, 400 steps after a look: rows at rest keep their weights."""
    generator = torch.Generator().manual_seed(seed)
    whole = Whole(Adam, odd_values(generator), betas=(beta1, beta2), lr=1e-8)
    loops = AdamLoops(whole.optimizer.param_groups[0])
    draw, rests = gradients(seed), np.zeros(ROWS, np.bool_)
    weights = whole.rows()["weights"]
    for step in range(600):
        lr = whole.optimizer.param_groups[0]["lr"]
        faster = lr * (min(beta2**0.5 / max(beta1, 1e-9), 1e3) * growth)
        state = whole.optimizer.state.get(whole.param, {"step": torch.tensor(0.0)})
        loops.add(LoggedStep(whole.optimizer.param_groups[0] | {"lr": min(faster, 1.0)}, dict(state), ()))
        calm = not loops.unrest or loops.unrest[-1] != step
        whole.step(draw() if step == 0 else torch.zeros(ROWS, DIM), lr=min(faster, 1.0))
        rows = whole.rows()
        if calm:
            moved = (rows["weights"] != weights).any(1).numpy()
            assert not (moved & rests).any()
        else:
            rests[:] = False
        weights = rows["weights"]
        if step >= start and step % 10 == 0:
            rests |= looked(rows, loops, step)


def looked(rows: dict[str, Tensor], loops: AdamLoops, step: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    found, at = np.zeros(ROWS, np.bool_), np.full(ROWS, step + 1)
    weights, average, root = (
        each.reshape(-1).numpy() for each in (rows["weights"], rows["exp_avg"], rows["exp_avg_sq"].sqrt())
    )
    missed_steps.look_for_rest(weights, average, root, loops.numbers.table, at, DIM, found)
    return found


def test_loops_with_other_bits_than_torch_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = after_training()
    rows = whole.rows()
    absent(whole, 5)
    original = AdamLoops.add
    said: list[str] = []

    def add(self: AdamLoops, step: LoggedStep) -> None:
        original(self, step)
        self.numbers.table[self.numbers.count - 1, RATE] *= np.float32(1 + 2**-20)

    monkeypatch.setattr(AdamLoops, "add", add)
    monkeypatch.setattr(module, "say_once", said.append)
    assert differing(caught_up(rows, torch.full((ROWS,), 3), whole.log), whole.rows()) == {}
    assert said == ["Adam"]
    assert list(whole.log.loops.values()) == [None]


@pytest.mark.parametrize("rule", [Adam, AdamW, SGD])
def test_the_loops_are_used_here(rule: type[Optimizer]) -> None:
    """Otherwise the tests above would compare torch with itself."""
    whole = after_training(rule, steps=4)
    caught_up(whole.rows(), torch.full((ROWS,), 2), whole.log)
    assert all(loops is not None for loops in whole.log.loops.values())


def test_no_rows_and_rows_that_missed_nothing_stay_as_they_are() -> None:
    whole = after_training()
    for rows in (torch.zeros(0, dtype=torch.int64), torch.tensor([4, 4, 2])):
        before = {name: each[rows] for name, each in whole.rows().items()}
        after = caught_up({name: each.clone() for name, each in before.items()}, torch.full((len(rows),), 3), whole.log)
        assert differing(after, before) == {}


def test_rows_in_any_order_and_of_one_last_step_catch_up() -> None:
    whole = after_training()
    taken = [whole.rows()]
    for _ in range(4):
        absent(whole, 30)
        taken.append(whole.rows())
    chosen = [4, 0, 2, 2, 0, 3, 1, 1] * 3
    mine = {k: torch.stack([taken[at][k][row] for row, at in enumerate(chosen)]) for k in taken[0]}
    lasts = torch.tensor([3 + 30 * at for at in chosen])
    assert differing(caught_up(mine, lasts, whole.log), whole.rows()) == {}


def test_more_rows_than_a_block_catch_up() -> None:
    values = torch.randn(6000, 8)
    whole = Whole(Adam, values)
    whole.step(torch.randn(6000, 8))
    rows = whole.rows()
    whole.step(torch.zeros(6000, 8))
    whole.step(torch.zeros(6000, 8))
    assert differing(caught_up(rows, torch.full((6000,), 1), whole.log), whole.rows()) == {}


def test_hooks_of_the_script_do_not_see_the_steps_of_rows_that_catch_up() -> None:
    whole, seen = after_training(Adagrad), []
    rows = whole.rows()
    absent(whole, 2)
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        caught_up(rows, torch.full((ROWS,), 3), whole.log)
    finally:
        handle.remove()
    assert not seen


class Lion(Optimizer):
    """A rule of a script's own, which makes its state in its first step."""

    def __init__(self, params: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].get("average", torch.zeros_like(param))
                param.add_(average.lerp(param.grad, 0.1).sign_(), alpha=-group["lr"]).mul_(1 - group["lr"])
                self.state[param]["average"] = average.lerp(param.grad, 1 - group["beta"])


def test_a_rule_that_torch_does_not_have_catches_up() -> None:
    whole = Whole(Lion, odd_values(torch.Generator().manual_seed(0)), lr=0.1)
    rows = whole.rows() | {"average": torch.full((ROWS, DIM), float("nan"))}
    whole.step(torch.zeros(ROWS, DIM))
    absent(whole, 20)
    assert differing(caught_up(rows, torch.zeros(ROWS, dtype=torch.int64), whole.log), whole.rows()) == {}


class Secret(Lion):
    """Keeps a number elsewhere than its group."""

    def __init__(self, params: Iterable[Tensor], power: int) -> None:
        super().__init__(params, 0.1**power)


def test_a_rule_that_cannot_be_made_from_its_group_is_refused() -> None:
    whole = Whole(Secret, torch.ones(ROWS, DIM), power=2)
    whole.step(torch.ones(ROWS, DIM))
    absent(whole, 1)
    with pytest.raises(ConfigError, match=r"Secret cannot be made from its group's settings .*power.*__init__"):
        caught_up(whole.rows(), torch.full((ROWS,), 1), whole.log)


def test_the_log_gives_back_what_it_was_given() -> None:
    log = StepLog(Adam)
    steps = []
    for step in range(50):
        group = adam_settings() | {
            "lr": 0.1 if step < 20 else torch.tensor(0.1 / step),
            "betas": (0.9, 0.99 + step / 1e4),
        }
        state = {"step": torch.tensor(float(step)), "exp_avg": torch.zeros(2, 3)} if step else {}
        steps.append((group, state))
        log.append(group, state)
    for step, (group, state) in enumerate(steps):
        given = log.at(step)
        assert given.hyper == {name: value for name, value in group.items() if name != "params"}
        assert isinstance(given.hyper["lr"], Tensor) == (step >= 20)
        assert given.state == {name: value for name, value in state.items() if name == "step"}
        assert given.row_states == (("exp_avg",) if step else ())


def test_a_step_of_a_schedule_takes_sixteen_bytes_of_the_log() -> None:
    log = StepLog(Adam)
    for step in range(5000):
        log.append(adam_settings_at(step), {"step": torch.tensor(step + 1.0), "exp_avg": torch.zeros(1, 1)})
    assert len(log.segments) <= 3
    assert sum(segment.values.itemsize * len(segment.values) for segment in log.segments) <= 16 * 5000


def adam_settings_at(step: int) -> dict[str, Any]:
    return {"lr": 0.1 / (step + 1), "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
