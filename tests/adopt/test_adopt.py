"""`rowcast.adopt`: what it adopts, what it says, what it refuses, and what a script does with an adopted model."""

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import rowcast
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt import adopt, row_gradient, script_optimizer
from rowcast.trainer.adopt.adoption import Adoption
from rowcast.trainer.adopt.read_ahead import ReadAhead
from rowcast.trainer.adopt.records import Records, positions
from rowcast.trainer.adopt.row_gradient import say_of_sums
from rowcast.trainer.adopt.table_parameter import TableParameter
from tests.support.facts import facts

pytestmark = pytest.mark.usefixtures("no_engine", "let_go")
ROWS, DIM = 200, 4


class Model(nn.Module):
    """Two tables in modules, of which one is small, and one that is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.kind = nn.EmbeddingBag(10, DIM)
        self.user = nn.Parameter(torch.rand(ROWS, DIM))
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        items, users = self.item(x).sum(1), torch.index_select(self.user, 0, x[:, 0]) + self.user[x[:, 1]]
        scores: Tensor = self.top(torch.cat([items, self.kind(x % 10), users], 1))
        return scores.squeeze(1)


class Clicks(torch.utils.data.Dataset[Any]):
    def __init__(self, draws: bool = False) -> None:
        self.x = torch.randint(0, ROWS, (80, 3), generator=torch.Generator().manual_seed(1))
        self.draws = draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.x[at], torch.rand(()) if self.draws else self.x[at].float().mean() / ROWS


def trained(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    """Returns the losses of an epoch, and all values at its end."""
    losses = []
    for x, y in DataLoader(Clicks(), 8, shuffle=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses + [own.clone() for own in model.state_dict().values()]


def seeded() -> Model:
    torch.manual_seed(5)
    return Model()


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.02)


def plain() -> list[Tensor]:
    """The script un-adopted."""
    model = seeded()
    return trained(model, adam(model))


def are_equal(own: list[Tensor], expected: list[Tensor]) -> bool:
    return len(own) == len(expected) and all(map(torch.equal, own, expected))


def adopted_in(model: nn.Module) -> list[str]:
    return [name for name, own in model.named_parameters() if isinstance(own, TableParameter)]


def reading() -> ReadAhead:
    return adopt._doors[0].reading


# what is adopted


def test_tables_that_fit_together_stay_ordinary(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    read = DataLoader.__iter__
    assert rowcast.adopt(model, "210 rows") is model
    assert adopted_in(model) == []
    assert DataLoader.__iter__ is read
    assert capsys.readouterr().err == (
        "rowcast: all 2 tables fit into 210 rows, none is adopted: item.weight, kind.weight\n"
    )


@pytest.mark.parametrize(
    ("capacity", "names"),
    [
        ("9 KiB", ["user", "item.weight"]),  # all three take 410 rows x 3 x 16 bytes
        ("20000B", []),
        ("20 rows", ["user", "item.weight"]),
        ("19 rows", ["user", "item.weight", "kind.weight"]),
        ("409 rows", ["user", "item.weight"]),
        ("410 rows", []),
    ],
)
def test_the_smallest_tables_stay_while_they_take_half_of_the_capacity(capacity: str, names: list[str]) -> None:
    assert adopted_in(rowcast.adopt(Model(), capacity, tables=["user"])) == names


def test_a_table_that_is_kept_stays_and_counts_for_nothing() -> None:
    assert adopted_in(rowcast.adopt(Model(), "100 rows", tables=["user"], keep=["item.weight"])) == ["user"]


def test_a_parameter_that_two_modules_share_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM))
    model[1].weight = model[0].weight
    rowcast.adopt(model, "100 rows")
    assert adopted_in(model) == ["0.weight"]
    assert model[1].weight is model[0].weight
    assert capsys.readouterr().err == (
        "rowcast: adopted 0.weight (200 rows of 4): about 100 of 200 rows stay on the device; ordinary: none\n"
    )


def test_the_start_and_print_say_what_was_adopted(capsys: pytest.CaptureFixture[str]) -> None:
    model = rowcast.adopt(Model(), "60 rows", tables=["user"])
    assert capsys.readouterr().err == (
        "rowcast: adopted user (200 rows of 4), item.weight (200 rows of 4): about 50 of 400 rows stay on the device; "
        "ordinary: kind.weight\n"
    )
    assert "Embedding(200, 4, adopted)" in str(model)
    assert "EmbeddingBag(10, 4, mode='mean')" in str(model)


def test_adopting_again_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = rowcast.adopt(seeded(), "60 rows")
    table = model.item.weight.table  # type: ignore[attr-defined]
    rowcast.adopt(model, "60 rows")
    assert adopted_in(model) == ["item.weight"]
    assert model.item.weight.table is table  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["before the optimizer", "after the optimizer", "in the middle of training"])
def test_a_model_is_adopted_at_any_time(order: str) -> None:
    model = seeded()
    if order == "before the optimizer":
        rowcast.adopt(model, "60 rows", tables=["user"])
    optimizer = adam(model)
    if order == "after the optimizer":
        rowcast.adopt(model, "60 rows", tables=["user"])
    seen = trained(model, optimizer)
    assert are_equal(seen, plain())
    if order == "in the middle of training":
        rowcast.adopt(model, "60 rows", tables=["user"])
    seen = trained(model, optimizer)
    expected = seeded()
    of_it = adam(expected)
    trained(expected, of_it)
    assert adopted_in(model) == ["user", "item.weight"]
    assert are_equal(seen[10:], trained(expected, of_it)[10:])


# reading ahead


def test_a_loader_is_read_ahead_by_itself() -> None:
    model = rowcast.adopt(seeded(), "60 rows", tables=["user"])
    assert are_equal(trained(model, adam(model)), plain())
    assert reading().counts.look_ups == {"foreseen": 27, "unknown": 3}  # of ten steps the first one is recorded


def test_batches_and_calls_are_read_ahead_and_without_a_table_are_themselves() -> None:
    batches = [Clicks().x[at : at + 8] for at in range(0, 80, 8)]
    assert rowcast.ahead(batches) is batches
    calls = iter(batches).__next__
    assert rowcast.ahead_calls(calls) is calls
    model = rowcast.adopt(seeded(), "60 rows")
    call = rowcast.ahead_calls(calls)
    for x in rowcast.ahead(batches):
        model(x)
        model(call())
    assert reading().counts.look_ups["foreseen"] >= 16


# what a script does with it


def test_exports_see_the_whole_table() -> None:
    model = seeded()
    before = model.item.weight.detach().clone()
    rowcast.adopt(model, "60 rows")
    weight = model.item.weight
    assert weight.shape == before.shape
    assert (weight.cpu().data.numpy() == before.numpy()).all()
    assert torch.equal(weight.to("cpu").detach(), before)
    with torch.no_grad():
        assert torch.equal(weight.to(torch.float64), before.double())
        assert torch.equal(weight.half(), before.half())


def test_a_model_is_saved_whole_and_copied_whole() -> None:
    model = seeded()
    model.tied = model.item
    rowcast.adopt(model, "60 rows", tables=["user"])
    trained(model, adam(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert adopted_in(other) == []
        assert other.tied.weight is other.item.weight  # type: ignore[union-attr]
        assert are_equal([*other.state_dict().values()], [*model.state_dict().values()])
        assert "adopted" not in str(other)


def test_a_shared_table_under_wrappers() -> None:
    def script(adopted: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model = seeded()
        model.kind = model.item  # type: ignore[assignment]
        model.forward = lambda x: model.top(  # type: ignore[method-assign]
            torch.cat([model.item(x).sum(1), model.kind(x).mean(1), model.user[x[:, 0]]], 1)
        ).squeeze(1)
        wrapped = nn.DataParallel(adopted(model))
        return trained(wrapped, adam(wrapped))

    seen = script(lambda model: rowcast.adopt(model, "60 rows", tables=["user"]))
    assert are_equal(seen, script(lambda model: model))


def test_moving_where_it_is_and_to_its_own_type_changes_nothing() -> None:
    model = rowcast.adopt(seeded(), "60 rows", tables=["user"])
    assert model.to("cpu").float().cpu() is model
    assert adopted_in(model) == ["user", "item.weight"]
    assert are_equal(trained(model, adam(model)), plain())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
@pytest.mark.parametrize("is_moved_first", [True, False])
def test_a_model_is_adopted_before_and_after_it_is_moved(is_moved_first: bool) -> None:
    def script(adopted: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model: nn.Module = seeded()
        model = adopted(model.cuda()) if is_moved_first else adopted(model).cuda()
        optimizer = adam(model)
        for x, y in DataLoader(Clicks(), 8):
            F.mse_loss(model(x.cuda()), y.cuda()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return [own.cpu() for own in model.state_dict().values()]

    seen = script(lambda model: rowcast.adopt(model, "60 rows", tables=["user"]))
    assert are_equal(seen, script(lambda model: model))


class ZerosAnywhere:
    """Implements `rows.Engine` on a device that has no values."""

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        ids = torch.empty(0, dtype=torch.long, device=device)
        return ids, self.read(ids)

    def read(self, ids: Tensor) -> Records:
        return Records(torch.zeros(len(ids), DIM, device=ids.device), {}, torch.zeros_like(ids))

    def write(self, ids: Tensor, rows: Records) -> None: ...


def test_each_step_begins_where_the_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts where the table is, and a step's rows are there before the step has any."""
    asked: list[str] = []
    monkeypatch.setattr(Adoption, "look_up", lambda self, device: asked.append(device.type))
    model: Any = rowcast.adopt(seeded(), "60 rows")
    table = model.item.weight.table
    table.home.rows = ZerosAnywhere()
    for device in ("cpu", "meta"):
        table.move(torch.device(device))
        table.begin_step()
        table.note(torch.zeros(1, dtype=torch.long))
        planned = table.home.planned()
        own = (table.ids, table.step_rows.weights, planned[0], planned[1].weights)
        assert {each.device.type for each in own} == {device}
    assert asked == ["cpu", "meta"]


# what is refused


def refused(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"keep": ["itm.weight"]},
            "adopt(keep=['itm.weight']): the model has no such table, the nearest is item.weight; name some of "
            "item.weight, kind.weight",
        ),
        (
            {"keep": ["user"]},
            "adopt(keep=['user']): the model has no such table; name some of item.weight, kind.weight",
        ),
        (
            {"tables": ["users"]},
            "adopt(tables=['users']): the model has no such table, the nearest is user; name some of user, "
            "item.weight, kind.weight, top.weight",
        ),
        *(
            (
                {"capacity": "60 rows", "memory": own},
                f"adopt(memory={own!r}): {own!r} is not a size; write bytes with a ",
            )
            for own in (None, 1.5, True, [1])
        ),
        (
            {"capacity": "8 GiBs"},
            "adopt(capacity='8 GiBs'): '8 GiBs' is not a size; write bytes with a unit, such as \"64MiB\" "
            '(cache.capacity also takes "20000 rows")',
        ),
    ],
)
def test_what_the_model_lacks_is_refused(settings: dict[str, Any], sentence: str) -> None:
    said = refused(ConfigError, lambda: rowcast.adopt(Model(), **{"capacity": "60 rows", **settings}))
    assert said.startswith(sentence)


def test_torch_distributed_changes_no_adopted_table_unseen_and_join_is_refused() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = rowcast.adopt(Model(), "60 rows")
        table = model.item.weight
        for given in (table, table.data, table.detach()[3:], model.state_dict()["item.weight"]):
            with torch.no_grad(), pytest.raises(ConfigError, match=facts("item.weight", "weight.data.copy_(own)")):
                dist.all_reduce(given)
        dist.all_gather_object([None], "and other exchanges work")
        dist.all_reduce(own := table.detach().clone())
        table.data.copy_(own * 2)
        assert torch.equal(model.item(torch.arange(3)), own[:3] * 2)
        with pytest.raises(ConfigError, match=facts("join()", "DistributedSampler")):
            DistributedDataParallel(model).join()
    finally:
        dist.destroy_process_group()


def test_a_table_of_another_type_is_refused() -> None:
    model = Model()
    model.item.half()
    keep = "make it float32, or leave it on the device by keep=['item.weight']"
    assert refused(ConfigError, lambda: rowcast.adopt(model, "60 rows")) == (
        f"table item.weight is torch.float16, and rowcast keeps rows of torch.float32; {keep}"
    )
    assert adopted_in(model) == []
    rowcast.adopt(model, "60 rows", keep=["item.weight"])
    other = rowcast.adopt(seeded(), "60 rows")
    with pytest.raises(
        ConfigError, match=facts("item.weight", "torch.float64", "torch.float32", "keep=['item.weight']")
    ):
        other.double()


def test_two_models_have_one_capacity() -> None:
    first = rowcast.adopt(Model(), "60 rows")
    assert refused(ConfigError, lambda: rowcast.adopt(Model(), "70 rows")) == (
        "this process has adopted item.weight with capacity='60 rows', and all models share it: give this one the same "
        "instead of '70 rows', or drop the other and call gc.collect()"
    )
    second = rowcast.adopt(Model(), "60 rows")
    assert adopted_in(first) == adopted_in(second) == ["item.weight"]
    del first, second
    rowcast.adopt(Model(), "70 rows")


@pytest.mark.parametrize(
    ("operation", "compute"),
    [
        ("pow", lambda model: (model.item.weight**2).sum()),
        ("square", lambda model: torch.square(model.item.weight).sum()),
        ("T", lambda model: (model.user[:3] @ model.item.weight.T).sum()),
        ("linear", lambda model: F.linear(model.user[:3], model.item.weight).sum()),
        ("norm", lambda model: model.item.weight.norm()),
    ],
)
def test_a_loss_of_the_whole_table_is_refused(operation: str, compute: Callable[[Any], Tensor]) -> None:
    model = rowcast.adopt(Model(), "60 rows")
    line = compute.__code__.co_firstlineno
    remedies = ("keep=['item.weight']", "torch.no_grad()")
    with pytest.raises(RowcastError, match=facts(f"test_adopt.py:{line}", operation, "item.weight", "200", *remedies)):
        compute(model)


def clipped(model: Model) -> Tensor:
    optimizer = adam(model)
    for x, y in DataLoader(Clicks(), 8):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return model.item.weight.detach().clone()


def test_the_norm_of_a_table_with_many_values_is_rounded_and_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_gradient, "MOST_COPIED", 4 * ROWS - 1)
    say_of_sums.cache_clear()
    assert torch.allclose(clipped(rowcast.adopt(seeded(), "60 rows")), clipped(seeded()), rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().err.count("more than 799 values") == 1


COMPILED = (
    "torch.compile joins the look-ups of the adopted table {name} with the operations around them, which then round "
    "differently; compile the modules behind the look-ups instead of the model, or leave the table on the device by "
    "keep=['{name}']"
)


def test_a_compiled_model_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rowcast.adopt(seeded(), "60 rows"), backend="eager")
    assert refused(ConfigError, lambda: compiled(Clicks().x)) == COMPILED.format(name="item.weight")


def test_a_compiled_model_with_a_bare_table_is_refused() -> None:
    torch._dynamo.reset()
    model = rowcast.adopt(seeded(), "60 rows", tables=["user"], keep=["item.weight"])
    compiled = torch.compile(model, backend="eager")
    assert COMPILED.format(name="user") in refused(Exception, lambda: compiled(Clicks().x))


def test_compiled_modules_behind_the_look_ups_have_the_scripts_bits() -> None:
    def script(adopted: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch._dynamo.reset()
        model = seeded()
        model.top = nn.Sequential(model.top, nn.Tanh())  # type: ignore[assignment]
        model.top.compile(backend="aot_eager")
        adopted(model)
        return trained(model, adam(model))

    seen = script(lambda model: rowcast.adopt(model, "60 rows", tables=["user"]))
    assert are_equal(seen, script(lambda model: model))


# tables in files


def test_tables_made_in_files_have_the_scripts_first_values_and_bits(tmp_path: Path) -> None:
    torch.manual_seed(5)
    with rowcast.tables(tmp_path / "tables"):
        model = Model()
        other = torch.empty(3)
    assert other.untyped_storage().filename is None
    files = sorted(own.name for own in (tmp_path / "tables").iterdir())
    assert files == ["table0.200x4.f32", "table1.10x4.f32"]
    first = (tmp_path / "tables" / files[0]).read_bytes()
    assert first == seeded().item.weight.detach().numpy().tobytes()
    rowcast.adopt(model, "60 rows", tables=["user"])
    assert are_equal(trained(model, adam(model)), plain())
    assert (tmp_path / "tables" / files[0]).read_bytes() == first


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "table0.200x4.f32"
    path.write_text("mine")

    def make() -> None:
        with rowcast.tables(tmp_path):
            Model()

    assert refused(ConfigError, make) == (
        f"{path} is there already, and rowcast.tables overwrites no file: it may hold the first values of a model that "
        "still trains, or of a rowcast.save; name another folder, or init='constant:0' before rowcast.restore"
    )
    assert path.read_text() == "mine"


def test_a_disk_without_space_is_refused_before_a_value_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3199))

    def make() -> None:
        with rowcast.tables(tmp_path):
            nn.Embedding(ROWS, DIM)

    assert refused(ConfigError, make) == (
        f"{tmp_path}/table0.200x4.f32 would take 3,200 bytes, but its disk has 3,199 free; free space there, or name a "
        "folder on another disk"
    )
    assert [*tmp_path.iterdir()] == []


def test_a_table_of_another_type_in_a_file_is_refused(tmp_path: Path) -> None:
    def make() -> None:
        with rowcast.tables(tmp_path):
            nn.EmbeddingBag(ROWS, DIM, dtype=torch.bfloat16)

    assert refused(ConfigError, make) == (
        f"{tmp_path}/table0.200x4.f32: the table is made as torch.bfloat16 on cpu, and a file holds torch.float32 of "
        "the host; make the model on the host, and move it once it is adopted"
    )


def test_a_dense_rule_says_that_rows_catch_up(capsys: pytest.CaptureFixture[str]) -> None:
    script_optimizer.say_once.cache_clear()
    model = rowcast.adopt(Model(), "60 rows")
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "moves all rows" not in capsys.readouterr().err
    trained(model, adam(model))
    told = capsys.readouterr().err
    assert told.count("Adam moves all rows at each step: those that no batch looks up catch up when they are next") == 1
    assert "SparseAdam" in told
    for rule in (torch.optim.Adam, torch.optim.AdamW):
        trained(model, rule(model.parameters(), weight_decay=0.1))
        told = f"{rule.__name__} moves all rows at each step: those that no batch looks up catch up step by step"
        assert told in capsys.readouterr().err


def test_rows_of_graphs_that_died_without_a_backward_pass_are_freed() -> None:
    model = rowcast.adopt(Model(), "60 rows")
    weight: Any = model.item.weight

    def scores(first: int) -> Any:
        return model(torch.arange(first, first + 10)[:, None].expand(-1, 3)).sum()

    for first in range(0, ROWS, 10):
        scores(first).item()
        assert len(weight.table.ids) == 10
    alive = scores(first), scores(0)
    assert len(weight.table.ids) == 20
    del alive


def test_tables_are_read_and_looked_up_in_inference_mode() -> None:
    def script(model: Model) -> list[Tensor]:
        optimizer = adam(model)
        ended = trained(model, optimizer)
        with torch.inference_mode():
            model.load_state_dict({name: 0.5 * own for name, own in model.state_dict().items()})
            ended.append(model(torch.arange(30).view(10, 3)))
        return ended + trained(model, optimizer)

    assert are_equal(script(seeded()), script(rowcast.adopt(seeded(), "60 rows")))


@pytest.mark.parametrize("num_wanted", [3, 700, 5000])
def test_positions_of_ids_are_those_of_a_search_whatever_the_calls_before_have_left(num_wanted: int) -> None:
    drawn = torch.Generator().manual_seed(num_wanted)
    for size in (40, 3000, 900, 200_000):
        ids = torch.unique(torch.randint(0, size, (800,), generator=drawn))
        wanted = torch.randint(-5, size + 5, (num_wanted,), generator=drawn)
        at, known = positions(ids, wanted)
        assert torch.equal(known, torch.isin(wanted, ids))
        assert torch.equal(ids[at[known]], wanted[known])
        assert 0 <= int(at.min()) <= int(at.max()) < len(ids)
