"""Optimizers and habits of scripts, adopted: the bits of the script as it was, or a sentence.

Each script runs twice with the same seeds, un-adopted and adopted, and gives what it saw: losses, evaluations, and at
its end the whole state of model and optimizers.
"""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import rowcast
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.twins import CAPACITY, DIM, ROWS, Items, Seen, same_as_unadopted

STEPS = 24

pytestmark = [
    pytest.mark.usefixtures("no_engine", "let_go"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of torch's own sparse Adagrad
]

Optimizers = Callable[[Any], list[Optimizer]]


def state_of(model: Any, optimizers: list[Optimizer]) -> Seen:
    weights = [own.clone() for own in model.state_dict().values()]
    states = [own.state_dict()["state"] for own in optimizers]
    return weights + [
        torch.as_tensor(own).clone() for state in states for of_one in state.values() for own in of_one.values()
    ]


def one(kind: type[Optimizer], **settings: Any) -> Optimizers:
    return lambda model: [kind(model.parameters(), lr=0.05, **settings)]  # type: ignore[call-arg]


def two(kind: type[Optimizer]) -> Optimizers:
    """Tables have an optimizer of their own."""
    return lambda model: [
        kind([model.item.weight, model.bag.weight], lr=0.05),  # type: ignore[call-arg]
        optim.Adam(model.top.parameters(), lr=0.01),
    ]


class Bags(nn.Module):
    def __init__(self, *, sparse: bool = False, **settings: Any) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0, sparse=sparse, **settings)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse, **settings)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, x: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
        items, bag = self.item(x * 7 % ROWS).mean(1), self.bag(bags % ROWS, offsets)
        scores: Tensor = self.top(torch.cat([items, bag], 1))
        return scores.squeeze(1)


def bags() -> Iterator[tuple[Tensor, ...]]:
    own = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        sizes = torch.randint(0, 5, (12,), generator=own)
        items, ids = (torch.rand(num, generator=own) ** 2 * ROWS for num in (12 * 2, int(sizes.sum())))
        yield items.long().view(12, 2), sizes.cumsum(0) - sizes, ids.long(), torch.rand(12, generator=own)


@dataclass(frozen=True, kw_only=True)
class Habits:
    optimizers: Optimizers
    sparse: bool = False
    clip: Callable[[Any], Any] = lambda parameters: None
    accumulate: int = 1
    scales: bool = False
    schedules: bool = False
    resumes: bool = False
    max_norm: float | None = None

    def script(self, adopted: Callable[[Any], Any]) -> Seen:
        def made() -> tuple[Any, list[Optimizer]]:
            model = adopted(Bags(sparse=self.sparse, max_norm=self.max_norm))
            return model, self.optimizers(model)

        model, optimizers = made()
        schedules = [optim.lr_scheduler.StepLR(own, 7, 0.8) for own in optimizers if self.schedules]
        scaler = torch.amp.GradScaler("cpu", enabled=self.scales, init_scale=2.0**10, growth_interval=5)
        seen: Seen = []
        for at, (x, offsets, ids, y) in enumerate(rowcast.ahead(bags())):
            loss = F.mse_loss(model(x, offsets, ids), y) / self.accumulate
            if at % 9 == 4:
                model.eval()
                with torch.no_grad():
                    seen.append(model(x.flip(0) * 3 % ROWS, offsets, ids))
                seen.append(model(x * 5 % ROWS, offsets, ids).detach())  # forgets no_grad
                model.train()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            seen.append(loss.detach())
            if (at + 1) % self.accumulate == 0:
                for own in optimizers:
                    scaler.unscale_(own)
                self.clip(model.parameters())
                for own in optimizers:
                    scaler.step(own)
                    own.zero_grad()
                for schedule in schedules:
                    schedule.step()
                scaler.update()
            if self.resumes and at == STEPS // 2:
                file = io.BytesIO()
                torch.save([model.state_dict(), [own.state_dict() for own in optimizers]], file)
                file.seek(0)
                states = torch.load(file)
                model, optimizers = made()
                model.load_state_dict(states[0])
                for own, state in zip(optimizers, states[1], strict=True):
                    own.load_state_dict(state)
        return seen + state_of(model, optimizers)


OPTIMIZERS = {
    "SGD": Habits(optimizers=one(optim.SGD)),
    "SGD, momentum and decay": Habits(optimizers=one(optim.SGD, momentum=0.9, weight_decay=0.01)),
    "SGD, nesterov": Habits(optimizers=one(optim.SGD, momentum=0.9, nesterov=True)),
    "Adam": Habits(optimizers=one(optim.Adam)),
    "Adam, decay, schedule": Habits(optimizers=one(optim.Adam, weight_decay=0.01), schedules=True),
    "Adam, amsgrad": Habits(optimizers=one(optim.Adam, amsgrad=True)),
    "AdamW, schedule": Habits(optimizers=one(optim.AdamW, weight_decay=0.1), schedules=True),
    "Adagrad": Habits(optimizers=one(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1)),
    "RMSprop": Habits(optimizers=one(optim.RMSprop, centered=True, momentum=0.5)),
    "SGD, sparse": Habits(optimizers=one(optim.SGD), sparse=True),
    "SparseAdam, schedule": Habits(optimizers=two(optim.SparseAdam), sparse=True, schedules=True),
    "Adagrad, sparse": Habits(optimizers=two(optim.Adagrad), sparse=True),
    "Adam, accumulation": Habits(optimizers=one(optim.Adam), accumulate=3),
    "SparseAdam, accumulation": Habits(optimizers=two(optim.SparseAdam), sparse=True, accumulate=3),
    "Adam, scaler": Habits(optimizers=one(optim.Adam), scales=True),
    "Adam, clipping by value": Habits(
        optimizers=one(optim.Adam), clip=lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3)
    ),
    "Adam, resumed": Habits(optimizers=one(optim.Adam, weight_decay=0.01), resumes=True),
    "SparseAdam, resumed": Habits(optimizers=two(optim.SparseAdam), sparse=True, resumes=True),
    "SGD with momentum, resumed": Habits(optimizers=one(optim.SGD, momentum=0.9), resumes=True),
    "SGD, max_norm": Habits(optimizers=one(optim.SGD), max_norm=1.0),
}


@pytest.mark.parametrize("habits", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_trains_the_rows_as_it_trains_the_whole_table(habits: Habits) -> None:
    same_as_unadopted(habits.script)


def items() -> Iterator[tuple[Tensor, ...]]:
    own = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = (torch.rand(12, num, generator=own) ** 2 * (ROWS - 1) for num in (3, 2))
        yield x.long(), y.long(), torch.rand(12, generator=own)


def loop(model: Any, optimizer: Optimizer, habit: str) -> Seen:
    average = optim.swa_utils.AveragedModel(model)
    seen: Seen = []
    for at, (x, y, target) in enumerate(rowcast.ahead(items())):
        if habit == "another optimizer" and at in (7, 15):
            optimizer = type(optimizer)(model.parameters(), lr=0.02)  # type: ignore[call-arg]
        loss = F.mse_loss(model(x, y), target)
        other = F.l1_loss(model(y, x), target) if habit == "two losses" else loss
        if habit == "no backward" and at % 3 == 1:
            continue
        loss.backward(retain_graph=habit == "backward twice")  # type: ignore[no-untyped-call]
        if habit in ("two losses", "backward twice"):
            other.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        match habit:
            case "gradients zeroed in place":
                optimizer.zero_grad(set_to_none=False)
            case "gradients never zeroed":
                pass
            case "gradients zeroed by the model":
                model.zero_grad()
            case _:
                optimizer.zero_grad()
        if habit == "average" and at % 5 == 0:
            average.update_parameters(model)
        if habit == "state cleared" and at == 10:
            optimizer.state.clear()
        if habit == "state loaded" and at == 12:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if habit == "weights clamped" and at % 6 == 0:
            with torch.no_grad():
                model.item.weight.clamp_(-0.5, 0.5)
        if habit == "data assigned" and at % 6 == 0:
            model.item.weight.data = model.item.weight.data * 0.5
        if habit == "frozen late" and at == 10:
            model.item.weight.requires_grad_(False)
        seen.append(loss.detach())
    return seen + [own.detach() for own in average.parameters()] + state_of(model, [optimizer])


LOOPS = (
    *("plain", "another optimizer", "two losses", "no backward", "backward twice", "gradients zeroed in place"),
    *("gradients never zeroed", "gradients zeroed by the model", "average", "state cleared", "state loaded"),
    *("weights clamped", "data assigned", "frozen late"),
)


def in_groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model.item.weight, "lr": 0.1}, {"params": [model.other.weight, *model.top.parameters()]}]


def adam(model: Any) -> Optimizer:
    return optim.Adam(model.parameters(), lr=0.02)


def sgd(model: Any) -> Optimizer:
    return optim.SGD(model.parameters(), lr=0.02)


# of a model, its optimizer and its loop
SCRIPTS: dict[str, tuple[dict[str, bool], Callable[[Any], Optimizer], str]] = {
    **{habit: ({}, adam, habit) for habit in LOOPS},
    **{
        f"sparse gradients, {habit}": ({"sparse": True}, sgd, habit)
        for habit in ("plain", "gradients never zeroed", "two losses", "backward twice")
    },
    "foreach": ({}, lambda model: optim.Adam(model.parameters(), lr=0.02, foreach=True), "plain"),
    "maximize": ({}, lambda model: optim.Adam(model.parameters(), lr=0.02, maximize=True), "plain"),
    "rate in a tensor": ({}, lambda model: optim.Adam(model.parameters(), lr=torch.tensor(0.02)), "plain"),
    "groups": ({}, lambda model: optim.Adam(in_groups(model), lr=0.02), "plain"),
    "tied": ({"tied": True}, sgd, "plain"),
    "frozen": ({"frozen": True}, sgd, "plain"),
    "by frequency": ({"by_freq": True}, sgd, "plain"),
    "tied, sparse gradients": ({"sparse": True, "tied": True}, sgd, "plain"),
    "frozen, and not the optimizer's": (
        {"frozen": True},
        lambda model: optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=0.02),
        "plain",
    ),
}


@pytest.mark.parametrize(("kind", "make", "habit"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_loop_keeps_its_bits(kind: dict[str, bool], make: Callable[[Any], Optimizer], habit: str) -> None:
    def script(adopted: Callable[[Any], Any]) -> Seen:
        model = adopted(Items(**kind))
        return loop(model, make(model), habit)

    same_as_unadopted(script)


def with_closures(model: Any, optimizer: Any, habit: str) -> Seen:
    """habit: when the closure zeroes its gradients, and how it reaches the step."""
    seen: Seen = []
    replaced: list[Callable[[], Any]] = []
    if habit == "given by a hook":
        optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, replaced.pop()), kwargs))
    for x, y, target in rowcast.ahead(items()):

        def closure(x: Tensor = x, y: Tensor = y, target: Tensor = target) -> Tensor:
            if habit != "zeroed at its end":
                optimizer.zero_grad()
            loss = F.mse_loss(model(x, y), target)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_value_(model.parameters(), 1e-2)
            if habit == "zeroed at its end":
                optimizer.zero_grad(set_to_none=False)
            return loss

        if habit == "given by a hook":
            replaced.append(closure)
            loss = optimizer.step(lambda: pytest.fail("the hook has given another closure"))
        else:
            loss = optimizer.step(closure=closure) if habit == "named" else optimizer.step(closure)
        assert isinstance(loss, Tensor)
        seen.append(loss.detach())
    return seen + state_of(model, [optimizer])


@pytest.mark.parametrize("habit", ["plain", "named", "zeroed at its end", "given by a hook"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_a_step_with_a_closure(kind: type[Optimizer], habit: str) -> None:
    def script(adopted: Callable[[Any], Any]) -> Seen:
        model = adopted(Items())
        return with_closures(model, kind(model.parameters(), lr=0.05), habit)  # type: ignore[call-arg]

    same_as_unadopted(script)


class Derived(optim.Adam):
    """Its step calls the one of its base class, which has hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("habit", ["plain", "no closure"])
def test_a_step_within_a_step(habit: str) -> None:
    def script(adopted: Callable[[Any], Any]) -> Seen:
        model = adopted(Items())
        optim.Adam(model.parameters())  # Adam.step has its hooks from the first one that is made
        optimizer = Derived(model.parameters(), lr=0.02)
        return loop(model, optimizer, "plain") if habit == "no closure" else with_closures(model, optimizer, habit)

    same_as_unadopted(script)


class Around(Optimizer):
    """Steps another optimizer over the same parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inner: Optimizer | None = None

    def step(self, closure: Any = None) -> Any:
        return None if self.inner is None else self.inner.step()


def test_an_optimizer_that_steps_within_another_is_refused_with_both_names() -> None:
    model = rowcast.adopt(Items(), CAPACITY)
    optimizer = Around(model.parameters())
    optimizer.inner = optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(ConfigError, match=facts("SGD", "Around", "keep=['item.weight']")):
        loop(model, optimizer, "plain")


class Restless(optim.SGD):
    """Calls its closure another number of times than once."""

    calls = 1

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            for _ in range(self.calls):
                closure()
        return super().step()


@pytest.mark.parametrize("calls", [0, 2])
def test_a_closure_that_is_not_called_once_is_refused_by_its_optimizer(calls: int) -> None:
    model = rowcast.adopt(Items(), CAPACITY)
    optimizer = Restless(model.parameters(), lr=0.05)
    optimizer.calls = calls
    x, y, target = next(items())

    def closure() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x, y), target).backward()  # type: ignore[no-untyped-call]

    closure()  # a gradient that a step without its closure would use
    with pytest.raises(ConfigError, match=facts("Restless", "closure", "keep=['item.weight']")):
        optimizer.step(closure)
