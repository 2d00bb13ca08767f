"""Rules of optimizers: an adopted script has its bits, or ends by name before it hands out a table.

the trial          what a small table shows, before a row is trained
the spot check     what only training shows, at steps 2, 4, 8, ...
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.catch_up import Kept, SpotCheck
from tests.support.facts import facts
from tests.support.repeats import count
from tests.support.twins import CAPACITY, Items, same_as_unadopted

pytestmark = [
    pytest.mark.usefixtures("no_engine", "let_go"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of torch's own sparse Adagrad
]

STEPS = 24
Make = Callable[[Any], Optimizer]


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    own = torch.Generator().manual_seed(3)
    ids = [[(torch.rand(12, num, generator=own) ** 2 * 299).long() for num in (3, 2)] for _ in range(steps)]
    return [(x, y, torch.rand(12, generator=own)) for x, y in ids]


def trained(make: Make, steps: int, *, sparse: bool = False) -> Callable[[Callable[[Any], Any]], list[Tensor]]:
    """A script: `make` gets the tables, which alone are the optimizer's. Gives losses, weights and all numbers of the
    optimizer's state."""

    def script(adopted: Callable[[Any], Any]) -> list[Tensor]:
        random.seed(0)
        model = adopted(Items(sparse=sparse))
        optimizers = [make([model.item.weight, model.other.weight]), optim.SGD(model.top.parameters(), lr=0.02)]
        seen = []
        for x, y, target in rowcast.ahead(batches(steps)):
            loss = F.mse_loss(model(x, y), target)
            loss.backward()  # type: ignore[no-untyped-call]
            for own in optimizers:
                own.step()
                own.zero_grad()
            seen.append(loss.detach())
        leaves = tree_leaves([own.state_dict() for own in optimizers])
        numbers = [torch.as_tensor(own).clone() for own in leaves if isinstance(own, Tensor | int | float)]
        return [own.nan_to_num() for own in [*seen, *(own.clone() for own in model.state_dict().values()), *numbers]]

    return script


def rules_of(package: Any) -> dict[str, type[Optimizer]]:
    found = {name: own for name, own in vars(package).items() if inspect.isclass(own) and issubclass(own, Optimizer)}
    return {name: own for name, own in found.items() if own is not Optimizer}


def made(rule: type[Optimizer]) -> Make:
    rate: dict[str, Any] = {"lr": 0.02} if "lr" in inspect.signature(rule.__init__).parameters else {}
    return lambda parameters: rule(parameters, **rate)


def outcome(rule: type[Optimizer], steps: int, *, sparse: bool) -> str:
    script = trained(made(rule), steps, sparse=sparse)
    torch.manual_seed(0)
    try:
        script(lambda model: model)
    except Exception:  # noqa: BLE001 - the rule wants more than a rate, or another kind of gradient
        return "not usable"
    try:
        same_as_unadopted(script)
    except ConfigError as error:
        return "refused" if rule.__name__ in str(error) else str(error)
    return "same bits"


@pytest.mark.filterwarnings("ignore")  # of rules
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("package", ["torch.optim", "pytorch_optimizer"])
def test_each_rule_of_a_package_keeps_its_bits_or_is_refused_by_name(package: str, sparse: bool) -> None:
    module = pytest.importorskip(package)
    steps = count(test=6, soak=64)
    outcomes = {name: outcome(rule, steps, sparse=sparse) for name, rule in rules_of(module).items()}
    print(package, "sparse" if sparse else "dense", Counter(outcomes.values()))  # noqa: T201 - for the log
    assert not {name: own for name, own in outcomes.items() if own not in ("same bits", "refused", "not usable")}
    plain = {"SGD", "SparseAdam", "Adagrad"} if sparse else {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Rprop"}
    assert not {name for name in plain & outcomes.keys() if outcomes[name] != "same bits"}  # no false alarm


class Rule(Optimizer):
    """A rule that a test gives: `update` gets a parameter, its state and its group."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is not None:
                    self.update(own, self.state[own], group)

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class NoisySGD(Rule):
    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own.sub_(own.grad + torch.randn_like(own), alpha=group["lr"])


class DropoutSGD(Rule):
    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own.sub_(own.grad, alpha=group["lr"] * random.choice([0.0, 2.0]))


class RowWiseAdagrad(Rule):
    keepdim = False

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("sum", torch.zeros(len(own), 1) if self.keepdim else torch.zeros(len(own)))
        state["sum"] += own.grad.square().mean(1, keepdim=self.keepdim)
        own.addcdiv_(own.grad, state["sum"].view(-1, 1).sqrt() + 1e-8, value=-group["lr"])


class RowWiseAdagrad1(RowWiseAdagrad):
    keepdim = True


class Momenta(Rule):
    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        for beta, momentum in zip((0.5, 0.9), state.setdefault("momenta", [torch.zeros_like(own)] * 2), strict=True):
            own.sub_(momentum.mul_(beta).add_(own.grad), alpha=group["lr"])


class Flags(Rule):
    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("seen", torch.zeros_like(own, dtype=torch.bool)).logical_or_(own.grad != 0)
        own.sub_(own.grad, alpha=group["lr"])


class Trust(Rule):
    """As LARS: if gradients were a multiple of the weights, each row would have the table's ratio."""

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own.sub_(own.grad * (own.norm() / (own.grad.norm() + 1e-6)), alpha=group["lr"])


class Estimates(Rule):
    """As Prodigy and D-Adaptation: its rate is an estimate over all rows, and stays what it was for a time."""

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own.sub_(own.grad, alpha=group["lr"] * max(1.0, group.get("distance", 0.0) / 100))
        group["distance"] = group.get("distance", 0.0) + float(own.grad.abs().sum())


class Late(Rule):
    """Keeps momenta from its fifth step on."""

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 4:
            state.setdefault("late", torch.zeros_like(own)).mul_(0.9).add_(own.grad)
        own.sub_(state.get("late", own.grad), alpha=group["lr"])


class Modes(Rule):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class TwoGradients(Rule):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


ANOTHER = "give item.weight another optimizer, or leave it on the device by keep=['item.weight']"
REFUSED: dict[str, tuple[Callable[[Any], Optimizer], tuple[str, ...]]] = {
    "NoisySGD": (NoisySGD, ()),
    "DropoutSGD": (DropoutSGD, ()),
    "RowWiseAdagrad": (RowWiseAdagrad, ("sum", "[3]")),
    "RowWiseAdagrad1": (RowWiseAdagrad1, ("sum", "[3, 1]")),
    "Momenta": (Momenta, ("momenta", "list")),
    "Flags": (Flags, ("seen", "torch.bool")),
    "Trust": (Trust, ("does not train each row for itself: a step of one row depends on others",)),
    "Estimates": (Estimates, ("row",)),
    "Late": (Late, ("late",)),
    "Modes": (Modes, ("eval",)),
    "TwoGradients": (TwoGradients, ("gradients",)),
    "Adafactor": (
        lambda parameters: optim.Adafactor(parameters, lr=0.02),
        (
            "keeps row_var of torch.float32 [3, 1] for a table of [3, 4], and rowcast moves states that have a row of "
            "torch.float32 for each row",
        ),
    ),
    "LBFGS": (optim.LBFGS, ("may take several gradients in a step, and rows of a table are prepared for one",)),
    "Adam": (
        lambda parameters: optim.Adam(parameters, lr=0.02, fused=True),
        (
            "(fused=True) rounds the last values of an array differently, so rows apart would have other bits than the "
            'table; leave fused out (Hugging Face: TrainingArguments(optim="adamw_torch"))',
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_cannot_train_rows_apart_is_refused_by_name_before_it_trains_one(name: str) -> None:
    make, why = REFUSED[name]
    model = rowcast.adopt(Items(), CAPACITY)
    before = [weight.clone() for weight in model.state_dict().values()]
    optimizer = make(model.parameters())
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))  # a warm-up: the first rate is 0
    [(x, y, target)] = batches(1)
    F.mse_loss(model(x, y), target).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=facts(name, *why, ANOTHER)):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before))


class Options(Rule):
    """Keeps what it is given itself, not in its groups, and counts there."""

    def __init__(self, parameters: Any, lr: float = 0.02, rate_of_decay: float = 0.0) -> None:
        super().__init__(parameters, lr)
        self.rate_of_decay = rate_of_decay

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own.mul_(1 - self.rate_of_decay).sub_(own.grad, alpha=group["lr"])


def test_options_that_an_optimizer_keeps_itself_hold_for_rows_that_catch_up() -> None:
    same_as_unadopted(trained(lambda parameters: Options(parameters, rate_of_decay=0.1), STEPS))


class LateMixer(Rule):
    """Trains rows apart until its 40th step."""

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        own.sub_(own.grad / (1 + own.grad.norm() * (state["step"] >= 40)), alpha=group["lr"])


class LateNoise(Rule):
    """Draws random numbers from its 40th step on."""

    def update(self, own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        own.sub_(own.grad, alpha=group["lr"])
        if state["step"] >= 40:
            own.add_(torch.randn_like(own))


@pytest.mark.parametrize(("rule", "sparse"), [(LateMixer, False), (LateNoise, False), (LateNoise, True)])
def test_the_spot_check_ends_a_script_whose_rule_the_trial_did_not_see_through(rule: type[Rule], sparse: bool) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=facts(rule.__name__, 64, "steps before", "item.weight")) as refused:
        trained(lambda parameters: rule(parameters), 64, sparse=sparse)(lambda model: rowcast.adopt(model, CAPACITY))
    refused.value.__traceback__ = None  # its frames hold the model


def test_where_a_device_has_not_shown_its_bits_no_step_is_checked() -> None:
    own = nn.Parameter(torch.ones(4, 2))
    optimizer = Trust([own])
    for is_shown in (False, True):
        check = SpotCheck(Trust, Kept({}, moves=False, is_shown=is_shown), own.device)
        for _ in range(2):
            own.grad = torch.arange(8.0).view(4, 2)
            check.before_step(own, optimizer.param_groups[0], {"lr": 0.02}, optimizer.state[own])
            optimizer.step()
        assert bool(check.fault(own, optimizer.state[own])) == is_shown


# several optimizers of one table


def in_turn(makes: list[Make], order: str) -> Callable[[Callable[[Any], Any]], list[Tensor]]:
    """`order`: the optimizer of each step; a capital letter makes it anew before."""

    def script(adopted: Callable[[Any], Any]) -> list[Tensor]:
        model = adopted(Items())
        optimizers = [make(model.parameters()) for make in makes]
        for letter, (x, y, target) in zip(order, rowcast.ahead(batches(len(order))), strict=True):
            at = "ab".index(letter.lower())
            if letter.isupper():
                optimizers[at] = makes[at](model.parameters())
            model.zero_grad()
            F.mse_loss(model(x, y), target).backward()  # type: ignore[no-untyped-call]
            optimizers[at].step()
        states = [own for own in tree_leaves([own.state_dict() for own in optimizers]) if isinstance(own, Tensor)]
        return [own.clone() for own in [*model.state_dict().values(), *states]]

    return script


def adam(parameters: Any) -> Optimizer:
    return optim.Adam(parameters, lr=0.02)


def sgd(parameters: Any) -> Optimizer:
    return optim.SGD(parameters, lr=0.1)


def decaying(parameters: Any) -> Optimizer:
    return optim.SGD(parameters, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("order", ["aaabbb", "aBbbA", "ababab", "aabbaab"])
@pytest.mark.parametrize(("first", "second"), [(adam, adam), (adam, sgd), (optim.RMSprop, decaying), (sgd, decaying)])
def test_optimizers_that_step_a_table_in_turn_keep_their_states(first: Make, second: Make, order: str) -> None:
    same_as_unadopted(in_turn([first, second], order))


def test_a_step_in_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rowcast.adopt(Items(), CAPACITY)
    optimizer = sgd(model.parameters())
    [(x, y, target)] = batches(1)
    F.mse_loss(model(x, y), target).backward()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("rowcast.trainer.adopt.script_optimizer.os.getpid", lambda: 7)
    with pytest.raises(ConfigError, match=facts("item.weight", 7, "forked", "keep=['item.weight']")):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()
