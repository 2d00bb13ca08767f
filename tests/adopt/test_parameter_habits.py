"""What scripts do between backward and step, and with what they hold of a table: the bits of the script un-adopted."""

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowcast
from rowcast.trainer.adopt import records
from rowcast.trainer.adopt.table_parameter import TableParameter

ROWS, DIM, STEPS, CAPACITY = 300, 4, 12, "90 rows"

pytestmark = [
    pytest.mark.usefixtures("let_go"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


class Script:
    """A loop with a place for each habit; `seen` is what it logs."""

    rule: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    sparse = False
    model: Any
    tables: list[Any]

    def __init__(self, *, adopts: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "item": nn.Embedding(ROWS, DIM, sparse=self.sparse),
                "other": nn.Embedding(ROWS, DIM, sparse=self.sparse),
                "top": nn.Linear(DIM, 1),
            }
        )
        self.seen: list[Any] = []
        self.before_adopt()
        if adopts:
            rowcast.adopt(self.model, CAPACITY)
            assert isinstance(self.weight, TableParameter)
        self.tables = [self.model.item.weight, self.model.other.weight]
        self.optimizer = self.rule(self.tables, lr=0.05)
        self.top = torch.optim.SGD(self.model.top.parameters(), lr=0.05)
        self.begin()

    @property
    def weight(self) -> Any:
        return self.model.item.weight

    @property
    def state(self) -> Any:
        return self.optimizer.state[self.weight]

    def run(self) -> list[Any]:
        numbers = torch.Generator().manual_seed(3)
        batches = [
            ((torch.rand(16, generator=numbers) ** 2 * ROWS).long(), torch.rand(16, generator=numbers))
            for _ in range(STEPS)
        ]
        for at, (ids, target) in enumerate(rowcast.ahead(batches)):
            loss = F.mse_loss(self.scores(ids, at), target)
            self.backward(loss)
            self.seen.append(loss.detach())
            self.between(at)
            self.step()
            self.after(at, ids)
        self.end()
        weights = [table.detach().clone() for table in self.tables]
        return (
            self.seen
            + weights
            + [
                state.clone()
                for table in self.tables
                for state in self.optimizer.state[table].values()
                if torch.is_tensor(state)
            ]
        )

    def scores(self, ids: Tensor, at: int) -> Tensor:
        return self.model.top(self.model.item(ids) + self.model.other(ids * 7 % ROWS)).squeeze(1)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        self.top.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.top.step()

    def before_adopt(self) -> None: ...
    def begin(self) -> None: ...
    def between(self, at: int) -> None: ...
    def after(self, at: int, ids: Tensor) -> None: ...
    def end(self) -> None: ...


HABITS: dict[str, type[Script]] = {}


def habit(name: str, **places: Any) -> None:
    HABITS[name] = type("Habit", (Script,), places)


def assigns(name: str, made: Callable[[Script], Any]) -> Callable[..., None]:
    return lambda script, *at: setattr(script, name, made(script))


# gradients


def masked(script: Any) -> None:
    script.weight.register_hook(lambda grad: grad.masked_fill((torch.arange(ROWS) < 50)[:, None], 0))


def counted(script: Any, *_: Any) -> None:
    handle = script.weight.register_hook(lambda grad: script.seen.append(grad.abs().max()))
    script.weight.register_hook(lambda grad: 0.5 * grad)
    if len(script.seen) > 3:
        handle.remove()


def steps_in_backward(script: Any) -> None:
    rules = {table: torch.optim.SGD([table], lr=0.1, momentum=0.9) for table in script.tables}

    def take(table: Any) -> None:
        rules[table].step()
        rules[table].zero_grad()

    script.handles = [table.register_post_accumulate_grad_hook(take) for table in script.tables]


def ends_hooks(script: Any) -> None:
    for handle in script.handles:
        handle.remove()  # torch cannot free a parameter whose hook holds it


def by_rows(script: Any, at: int) -> None:
    grad = script.weight.grad
    grad[:15] = 0
    grad[20] *= 3
    grad[torch.tensor([30, 31, 299])] = 0.25
    grad[[40, -2]] += 0.5
    grad[torch.arange(ROWS) % 17 == 3] = 0
    grad[60:70].mul_(2)
    grad[:, 1] = grad[:, 1] * 0.5 if at % 2 else 0
    script.seen += [grad[5], grad[:20].sum(), grad[torch.tensor([1, 2])]]


def arithmetic(script: Any, at: int) -> None:
    grad = script.weight.grad
    script.seen += [torch.isfinite(grad).all(), grad.mean(), grad.abs().mean(), (grad == 0).float().mean(), grad.norm()]
    script.seen += [grad.view(-1)[:8].clone(), torch.cat([each.grad.flatten() for each in script.tables]).std()]
    script.seen += [F.cosine_similarity(grad.flatten(), script.tables[1].grad.flatten(), dim=0), grad.norm(dim=1).max()]
    grad.mul_(0.9).clamp_(-0.01, 0.01)
    grad *= torch.linspace(0, 1, ROWS)[:, None]
    grad.div_(grad.norm(dim=1, keepdim=True).clamp(min=1))
    grad -= grad.mean(dim=1, keepdim=True)
    grad.data.add_(torch.zeros(ROWS, 1))
    script.seen += [
        torch.isfinite(script.weight).all(),
        (script.weight == 0).sum(),
        torch.zeros(ROWS * DIM).view_as(script.weight),
    ]
    torch._foreach_mul_([each.grad for each in script.tables], 0.5)
    script.weight.grad = torch.where(grad.abs() > 1e-5, grad, 0.0)


def clips(script: Any, at: int) -> None:
    script.seen.append(nn.utils.clip_grad_norm_(script.model.parameters(), 0.05).clone())
    nn.utils.clip_grad_value_(script.model.parameters(), 1e-3)


def adds_kept(script: Any, at: int) -> None:
    kept = vars(script).setdefault("kept", [])
    if kept:
        for table, before in zip(script.tables, kept, strict=True):
            table.grad += 0.5 * before
    script.kept = [table.grad.clone() for table in script.tables]


def averages(script: Any, at: int) -> None:
    mean = vars(script).get("mean", torch.zeros_like(script.weight.grad))
    script.mean = 0.9 * mean + 0.1 * script.weight.grad
    script.weight.grad.copy_(script.mean)


def drops(script: Any, at: int) -> None:
    if at % 3 == 1:
        script.weight.grad = None
    elif at % 3 == 2:
        del script.model.other.weight.grad


habit("a hook before adopt", before_adopt=masked)
habit("a hook after adopt", begin=masked)
habit("hooks that come and go", after=counted)
habit(
    "hooks of sparse gradients",
    begin=lambda script: script.weight.register_hook(lambda grad: grad * 0.5),
    sparse=True,
    rule=torch.optim.SparseAdam,
)
habit("optimizers in backward", begin=steps_in_backward, step=lambda script: None, end=ends_hooks)
habit("gradients by row", between=by_rows)
habit("arithmetic of gradients", between=arithmetic)
habit("clipping", between=clips)
habit("kept gradients", between=adds_kept)
habit("an average of gradients", between=averages)
habit("gradients dropped", between=drops)
habit(
    "sparse gradients by row number",
    sparse=True,
    rule=torch.optim.SparseAdam,
    between=lambda script, at: script.seen.append(script.weight.grad.coalesce().indices()),
)
habit("sparse gradients kept", sparse=True, rule=torch.optim.SGD, between=adds_kept)


# steps


def by_hand(script: Any) -> None:
    with torch.no_grad():
        script.model.item.weight -= 0.1 * script.weight.grad
        script.model.other.weight.data.add_(script.model.other.weight.grad, alpha=-0.1)
        for dense in script.model.top.parameters():
            dense -= 0.1 * dense.grad


def momentum_by_hand(script: Any) -> None:
    buffers = vars(script).setdefault("buffers", [torch.zeros(ROWS, DIM) for _ in script.tables])
    with torch.no_grad():
        for table, buffer in zip(script.tables, buffers, strict=True):
            buffer.mul_(0.9).add_(table.grad)
            table.sub_(0.1 * buffer)


def twice(script: Any) -> None:
    script.optimizer.step()
    script.optimizer.step()


def unused(script: Any, ids: Tensor, at: int) -> Tensor:
    scores: Tensor = script.model.top(script.model.item(ids) + (script.model.other(ids) if at % 2 else 0)).squeeze(1)
    return scores


def kept_zeros(script: Any, loss: Tensor) -> None:
    script.optimizer.zero_grad(set_to_none=False)
    loss.backward()  # type: ignore[no-untyped-call]


def evaluates_elsewhere(script: Any, at: int, ids: Tensor) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            script.seen.append(script.scores(ids * 3 % ROWS, at))
        script.seen.append(script.scores(ids * 5 % ROWS, at).detach())

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()


def in_turn(script: Any) -> None:
    rules = vars(script).setdefault("rules", [script.optimizer, torch.optim.Adam(script.tables, lr=0.01)])
    rules[len(script.seen) % 2].step()


def adversarial(script: Any, at: int) -> None:
    weight, before = script.weight, script.weight.data.clone()
    norm = torch.norm(weight.grad)
    weight.data.add_(0.5 * weight.grad / norm)
    F.mse_loss(script.scores(torch.arange(at, at + 16), at), torch.ones(16)).backward()  # type: ignore[no-untyped-call]
    weight.data = before


habit("steps by hand", step=by_hand)
habit("an adversarial step", between=adversarial)
habit("momentum by hand", step=momentum_by_hand)
habit("two steps of one gradient", step=twice)
habit("zeros of a table that is not looked up", scores=unused, backward=kept_zeros)
habit("the same of sparse gradients", scores=unused, backward=kept_zeros, sparse=True, rule=torch.optim.SparseAdam)
habit("an evaluation in another thread", after=evaluates_elsewhere)


# the optimizer's state


def resets_rows(script: Any, at: int, ids: Tensor) -> None:
    if at % 5 == 4:
        with torch.no_grad():
            script.weight[:10] = 0.0
        for name in ("exp_avg", "exp_avg_sq"):
            script.state[name][:10] = 0
            script.seen.append(script.state[name].mean())


def replaces(script: Any, at: int, ids: Tensor) -> None:
    if at == 6:
        script.state["exp_avg"] = torch.ones(ROWS, DIM) * 0.01
    if at == 8:
        script.state["exp_avg_sq"].data = torch.full((ROWS, DIM), 0.02)
        for name, value in script.state.items():
            script.state[name] = value.to("cpu")


def holds_state(script: Any, at: int, ids: Tensor) -> None:
    held = vars(script).setdefault("held", script.state["exp_avg"])
    script.seen.append(held.sum())


def loads_pickled(script: Any, at: int, ids: Tensor) -> None:
    if at == 5:
        file = io.BytesIO()
        torch.save([script.model, script.optimizer, script.top], file)
        file.seek(0)
        script.model, script.optimizer, script.top = torch.load(file, weights_only=False)
        script.tables = [script.model.item.weight, script.model.other.weight]


def loads_copied(script: Any, at: int, ids: Tensor) -> None:
    if at == 5:
        script.model, script.optimizer, script.top = copy.deepcopy((script.model, script.optimizer, script.top))
        script.tables = [script.model.item.weight, script.model.other.weight]


def keeps_states(script: Any, at: int, ids: Tensor) -> None:
    if at == 3:
        script.best = script.model.state_dict(), script.optimizer.state_dict()
    if at == 8:
        script.model.load_state_dict(script.best[0])
        script.optimizer.load_state_dict(script.best[1])


def keeps_a_copy(script: Any, at: int, ids: Tensor) -> None:
    if at == 3:
        script.best = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    if at == 8:
        script.model.load_state_dict(script.best[0])
        script.optimizer.load_state_dict(script.best[1])


habit("state of rows reset", after=resets_rows)
habit("state replaced", after=replaces)
habit("state held", after=holds_state)
habit("pickled", after=loads_pickled)
habit("deep copies", after=loads_copied)
habit("state_dict kept without a copy", after=keeps_states)
habit("state_dict kept as a copy", after=keeps_a_copy)


# data


def swaps_average(script: Any, at: int, ids: Tensor) -> None:
    shadow = vars(script).setdefault("shadow", [table.data.clone() for table in script.tables])
    for number, table in enumerate(script.tables):
        shadow[number] = 0.9 * shadow[number] + 0.1 * table.data
    if at % 4 == 3:
        backup = [table.data for table in script.tables]
        for table, average in zip(script.tables, shadow, strict=True):
            table.data = average
        with torch.no_grad():
            script.seen.append(script.scores(ids, at))
        for table, before in zip(script.tables, backup, strict=True):
            table.data = before


def trains_another(script: Any, at: int, ids: Tensor) -> None:
    if at == 4:
        script.held = script.weight.data, torch.full((ROWS, DIM), 0.1)
        script.weight.data = script.held[1]
    if at > 4:
        script.seen += [each.sum() for each in script.held]


def holds_data(script: Any) -> None:
    weight = script.weight
    script.held = [
        weight.data,
        weight.detach(),
        weight.data[3:9],
        weight.data[2],
        weight.data.T,
        weight.detach().view(-1),
    ]


def reads_held(script: Any, at: int, ids: Tensor) -> None:
    script.seen += [each.sum() for each in script.held]
    script.seen += [script.held[0][5].clone(), script.held[0].mean(0), script.held[2].tolist()]


def writes_held(script: Any, at: int, ids: Tensor) -> None:
    if at % 4 == 2:
        script.held[2].mul_(0.5)
        script.held[3][1] = 0.25
        with torch.no_grad():
            script.weight[torch.tensor(5)].zero_()
            script.weight[7] = 1
            script.weight[torch.tensor([8, -1])] = 0.5
            script.weight.data[20].copy_(script.weight.data[21])


def writes_numpy(script: Any) -> None:
    script.weight.data.numpy()[:100] = 0.25
    script.model.other.weight.detach().numpy()[...] *= 0.5
    np.from_dlpack(script.weight.data)[100] = 0.5


def holds_numpy(script: Any) -> None:
    script.array = script.weight.detach().numpy()


def reads_numpy(script: Any, at: int, ids: Tensor) -> None:
    script.seen += [script.array.sum(), script.array[3].copy(), script.weight.detach().numpy().mean()]


def inits(script: Any) -> None:
    nn.init.normal_(script.weight, std=0.01)
    script.model.other.reset_parameters()
    nn.init.xavier_uniform_(script.weight)
    script.seen.append(script.weight.detach().clone())


def looks_up(script: Any, ids: Tensor, at: int) -> Tensor:
    weight, mask = script.weight, torch.zeros(ROWS, dtype=torch.bool)
    mask[ids] = True
    rows = weight[ids.tolist()] + weight[ids.numpy()] + weight[ids, :] + weight[-ids - 1] + weight.index_select(0, ids)
    rows = rows + torch.embedding(weight, ids) + torch.gather(weight, 0, ids[:, None].expand(-1, DIM))
    rows = rows + weight[mask].mean(0) + weight[3] + weight[4:6].sum(0) + weight[torch.tensor(5)] + weight[ids, 1:2]
    script.seen.append(weight.clone().mean().detach())
    return script.model.top(rows).squeeze(1)  # type: ignore[no-any-return]


habit("an average swapped in", after=swaps_average)
habit("data of another tensor", after=trains_another)
habit("data held", begin=holds_data, after=reads_held)
habit("data held and written", begin=holds_data, after=writes_held)
habit("written through NumPy before training", begin=writes_numpy)
habit("a NumPy array held", begin=holds_numpy, after=reads_numpy)
habit("initialised after adopt", begin=inits)
habit("look-ups by other indices", scores=looks_up)


def assert_same_as_un_adopted(script: type[Script]) -> None:
    expected, seen = script(adopts=False).run(), script(adopts=True).run()
    assert len(seen) == len(expected)
    for at, (one, other) in enumerate(zip(seen, expected, strict=True)):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True), at


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("script", HABITS.values(), ids=HABITS.keys())
def test_a_habit_has_the_bits_that_it_has_un_adopted(script: type[Script]) -> None:
    assert_same_as_un_adopted(script)


class Together(Script):
    """Habits that meet the engine."""

    def begin(self) -> None:
        masked(self)
        holds_data(self)

    def between(self, at: int) -> None:
        by_rows(self, at)
        clips(self, at)

    def step(self) -> None:
        if len(self.seen) % 2:
            twice(self)
            self.top.step()
        else:
            by_hand(self)
            self.optimizer.step()

    def after(self, at: int, ids: Tensor) -> None:
        reads_held(self, at, ids)
        if at == 5:
            self.state["exp_avg"][:10] = 0
        if at == 7:
            swaps_average(self, at, ids)
        if at == 8:
            writes_held(self, 2, ids)


@pytest.mark.parametrize("most_whole", [0, ROWS], ids=["large", "small"])
def test_habits_have_the_same_bits_with_rows_in_the_engine(most_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_WHOLE", most_whole)
    assert_same_as_un_adopted(Together)


def test_the_page_lists_the_habits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adopt.md").read_text()
    block = text.split("<!-- habits -->")[1].split("<!-- /habits -->")[0]
    assert block.split("\n- ")[1:] == [*list(HABITS)[:-1], f"{list(HABITS)[-1]}\n"]
