"""Tables by a rule: `rowcast.tables(folder, init=...)`. The twin is the script un-adopted: its tables are in files."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn, optim

import rowcast
from rowcast.job.tables import table_specs
from rowcast.prefetcher.checkpoints.export import export_run
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.protocol.first_values import initial_rows
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.serving.model import Model as Served
from rowcast.serving.publisher import Publisher
from rowcast.trainer.adopt import records
from rowcast.trainer.adopt.adopt import say_left_out
from rowcast.trainer.adopt.mapped_tables import TableOnDemand
from tests.adopt.engines import Engines, drop, manifests
from tests.support.jobs import job, table

ROWS, DIM, PADDING = 300, 4, 3
HUGE = 10**12
RULES = ["normal:0.02", "uniform", "uniform:-0.5,1", "constant:0.25", "constant:0"]

pytestmark = [pytest.mark.usefixtures("let_go"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


class Model(nn.Module):
    def __init__(self, rows: int = ROWS, *, sparse: bool = False) -> None:
        super().__init__()
        self.item = nn.Embedding(rows, DIM, padding_idx=PADDING, sparse=sparse)
        self.bag = nn.EmbeddingBag(rows + 1, DIM, sparse=sparse)
        nn.init.xavier_uniform_(self.item.weight)
        self.bag.weight.data.uniform_(-1, 1)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.item(ids).sum(1) + self.bag(ids))
        return logits


def made(folder: Path, init: str = "normal:0.02", seed: int = 7, **options: Any) -> Model:
    torch.manual_seed(5)
    with rowcast.tables(folder, init=init, seed=seed):
        return Model(**options)


def adam(parameters: Any) -> list[optim.Optimizer]:
    return [optim.AdamW(parameters, lr=0.02, weight_decay=0.1)]


def calm(parameters: Any) -> list[optim.Optimizer]:
    """Two of them, one after the other."""
    kept = [*parameters]
    return [optim.AdamW(kept, lr=0.02, weight_decay=0), optim.SGD(kept, lr=0.1, momentum=0.9)]


def sgd(parameters: Any) -> list[optim.Optimizer]:
    return [optim.SGD(parameters, lr=0.1)]


def adagrad(parameters: Any) -> list[optim.Optimizer]:
    """It makes its sums, of whole tables, before the first step."""
    return [optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.25)]


def sparse(parameters: Any) -> list[optim.Optimizer]:
    return [optim.SparseAdam([*parameters][:2], lr=0.02)]


def trained(model: Model, optimizers: Callable[[Any], list[optim.Optimizer]]) -> list[Tensor]:
    """Returns the losses, and all rows at the end."""
    seen = []
    for optimizer in optimizers(model.parameters()):
        chosen = torch.Generator().manual_seed(1)
        for ids in rowcast.ahead([torch.randint(ROWS, (8, 3), generator=chosen) for _ in range(12)]):
            optimizer.zero_grad()
            loss = F.mse_loss(model(ids), ids.float().mean(1, keepdim=True) / ROWS)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(loss.detach())
    with torch.no_grad():
        return [
            *seen,
            model.item(torch.arange(ROWS)),
            model.bag.weight[torch.arange(ROWS + 1)].clone(),
            model.top.weight,
        ]


def check_bits(folder: Path, init: str, optimizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"sparse": optimizers is sparse}
    expected = trained(made(folder / "twin", init, **options), optimizers)
    monkeypatch.setattr(records, "MOST_WHOLE", ROWS - 1)
    model = rowcast.adopt(made(folder / "none", init, **options), "60 rows")
    assert [*(folder / "none").iterdir()] == []
    found = trained(model, optimizers)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("optimizers", [adam, calm, sgd, adagrad, sparse])
def test_rows_by_a_rule_have_the_bits_of_the_twin(
    optimizers: Any, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits(tmp_path, "normal:0.02", optimizers, monkeypatch)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("init", RULES)
def test_each_rule_has_the_bits_of_the_twin_with_rows_in_this_process(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits(tmp_path, init, adam, monkeypatch)


@pytest.mark.parametrize("init", RULES)
def test_first_values_are_those_of_a_job_file(init: str, tmp_path: Path) -> None:
    model = made(tmp_path, init)
    for number, weight in enumerate([model.item.weight.detach().numpy(), model.bag.weight.detach().numpy()]):
        spec = table_specs(job(tables=[table(f"table{number}", len(weight), DIM, init=init)]))[0]
        expected = initial_rows(7, spec, np.arange(len(weight)))
        if number == 0:
            expected[PADDING] = 0
        assert np.array_equal(weight.view(np.int32), expected.view(np.int32))


def test_a_script_that_is_started_again_takes_the_file_of_its_rule(tmp_path: Path) -> None:
    first, again = made(tmp_path), made(tmp_path)
    assert torch.equal(first.item.weight, again.item.weight)
    with torch.no_grad():
        again.item.weight[5] += 1.0
    assert "is there already" in refused(lambda: made(tmp_path))


@pytest.mark.usefixtures("no_engine")
def test_a_module_that_has_no_rows_yet_is_printed(tmp_path: Path) -> None:
    model = made(tmp_path, rows=HUGE)
    assert f"EmbeddingBag({HUGE + 1}, 4, mode='mean')" in repr(model)
    assert f"EmbeddingBag({HUGE + 1}, 4, mode='mean', adopted)" in repr(rowcast.adopt(model, "60 rows"))


def test_nothing_is_drawn_and_another_seed_gives_other_rows(tmp_path: Path) -> None:
    first, other = made(tmp_path / "a"), made(tmp_path / "b", seed=8)
    torch.manual_seed(5)
    assert torch.equal(first.top.weight, nn.Linear(DIM, 1).weight)
    assert not torch.equal(first.item.weight, other.item.weight)
    assert not torch.equal(first.item.weight[:10], first.bag.weight[:10])


# saves

LAST = 20  # step


def batch(step: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    ids = (15 * step + torch.randint(0, 40, (8, 3), generator=own)) % ROWS
    return ids.where(ids != PADDING, PADDING + 1)  # whoever serves the rule makes a row that was never trained


class Saving:
    """A script that saves itself every third step."""

    def __init__(self, folder: Path, optimizer: Any, *, is_adopted: bool, **first: Any) -> None:
        torch.manual_seed(5)
        with rowcast.tables(folder, **first):
            self.model = Model(sparse=optimizer is sparse)
        if is_adopted:
            rowcast.adopt(self.model, "60 rows")
        [self.optimizer] = optimizer(self.model.parameters())

    def train(self, first: int, end: int, run: Path | None = None) -> "Saving":
        for step in range(first, end):
            self.optimizer.zero_grad()
            ids = batch(step)
            F.mse_loss(self.model(ids), ids.float().mean(1, keepdim=True) / ROWS).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if run is not None and step % 3 == 2:
                rowcast.save(run, self.model, self.optimizer, step=step + 1)
        return self

    def rows(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {
                "item.weight": self.model.item.weight[torch.arange(ROWS)].clone(),
                "bag.weight": self.model.bag.weight[torch.arange(ROWS + 1)].clone(),
                "top.weight": self.model.top.weight.clone(),
            }


def adam_without_decay(parameters: Any) -> list[optim.Optimizer]:
    return [optim.Adam(parameters, lr=0.02)]


NAMED: dict[str, dict[str, Any]] = {"by a rule": {"init": "normal:0.02", "seed": 7}, "in files": {}}


@pytest.mark.parametrize("optimizer", [adam_without_decay, sgd, adagrad, sparse])
@pytest.mark.parametrize("first", NAMED)
def test_a_save_names_first_values_and_holds_the_rows_with_others(
    first: str, optimizer: Any, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, versions = tmp_path / "run", tmp_path / "versions"
    expected = Saving(tmp_path / "twin", optimizer, is_adopted=False, **NAMED[first]).train(0, LAST).rows()
    monkeypatch.setattr(records, "MOST_WHOLE", ROWS - 1)
    publisher = Publisher(run, versions, "fp32", 3)
    Saving(tmp_path / "first", optimizer, is_adopted=True, **NAMED[first]).train(0, 5, run)
    looked_up = torch.cat([batch(step) for step in range(3)])
    assert manifest_of(run).num_rows <= 2 * len(torch.unique(looked_up)) + 1, "the row of the padding has no rule"
    for begun, end in ((3, 11), (9, LAST)):
        with publisher.lock():
            assert publisher.publish() is not None
        drop()
        script = Saving(tmp_path / "again", optimizer, is_adopted=True, init="constant:0")
        assert rowcast.restore(run, script.model, script.optimizer) == begun
        script.train(begun, end, run)
    found, manifest = script.rows(), manifest_of(run)
    assert all(torch.equal(found[name], own) for name, own in expected.items())
    assert [len(shard.layers) for shard in manifest.shards] > [1], "changed rows alone"
    script.train(LAST, 21, run)
    found = script.rows()
    with publisher.lock():
        assert publisher.publish() is not None
    export_run(run, tmp_path / "all")
    exported, served = load_file(tmp_path / "all"), Served(versions)
    for name, count in (("item.weight", ROWS), ("bag.weight", ROWS + 1)):
        assert torch.equal(exported[f"embedding_bags.{name}.weight"], found[name])
        assert torch.equal(torch.from_numpy(served.rows(name, range(count))), found[name])


def manifest_of(run: Path) -> Manifest:
    manifest = manifests(run)[0]
    Checkpoints(run, Disk()).verify(manifest)
    return manifest


# what is refused


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        act()
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"init": "gaussian:1"}, "init = 'gaussian:1' is not one of uniform, uniform:lo,hi, normal:std, constant:x"),
        ({"init": "normal:1e38"}, "init = 'normal:1e38' reaches 6.66044e\\+38, which is no float32; choose less"),
        ({"init": "uniform", "seed": -1}, "init='uniform', seed=-1.*: a seed is a whole number from 0 to"),
        ({"seed": 3}, "init='', seed=3.*: a seed is .* one of a rule; give both, or neither"),
    ],
)
def test_a_rule_that_is_none_is_refused(options: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence), rowcast.tables(tmp_path / "t", **options):
        raise AssertionError
    assert not (tmp_path / "t").exists()


def test_more_rows_than_a_table_can_have_are_refused(tmp_path: Path) -> None:
    said = refused(lambda: made(tmp_path, rows=2**48 + 1))
    assert said.endswith(f"a table has up to {2**48:,} rows, not {2**48 + 1:,}")


def test_a_table_of_any_size_has_no_values_before_it_is_adopted(tmp_path: Path) -> None:
    model = made(tmp_path, rows=HUGE)
    weight = model.item.weight
    assert isinstance(weight, TableOnDemand)
    assert isinstance(weight, nn.Parameter)
    assert [len(weight), weight.requires_grad, weight.grad, [*tmp_path.iterdir()]] == [HUGE, True, None, []]
    for act in (
        lambda: model(torch.tensor([[1, 2]])),
        lambda: weight[5],
        lambda: weight.data[5:8].fill_(1),
        lambda: nn.init.zeros_(weight),
        lambda: weight.data.copy_(torch.zeros(1, DIM)),
        lambda: model.to(torch.float64),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model.state_dict()),
    ):
        assert f"of a table of {HUGE:,} rows, which a rule makes once rowcast.adopt has the model" in refused(act)
    assert "so it cannot be on the device as a whole" in refused(
        lambda: rowcast.adopt(model, "1 GiB", keep=["item.weight"])
    )


@pytest.mark.usefixtures("no_engine")
def test_a_state_leaves_such_a_table_out_and_is_loaded_without_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = rowcast.adopt(made(tmp_path, rows=HUGE), f"{3 * HUGE} rows")
    say_left_out.cache_clear()
    names = [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    assert sorted(state) == ["top.bias", "top.weight"]
    assert [name for name, _ in model.named_parameters()] == names
    assert capfd.readouterr().err.count("state_dict() leaves item.weight out") == 1
    state["top.bias"] = torch.tensor([7.0])
    pickle.dumps(state)
    model.load_state_dict(state)
    assert model.top.bias.item() == 7
    said = refused(lambda: model.load_state_dict(state | {"item.weight": torch.zeros(1, DIM)}))
    assert said.endswith("take it out of the state, and load changed rows by rowcast.restore")


@pytest.mark.usefixtures("no_engine")
def test_a_table_of_any_size_is_adopted_and_refused_as_a_whole(tmp_path: Path) -> None:
    model = rowcast.adopt(made(tmp_path, rows=HUGE), f"{3 * HUGE} rows")
    (optimizer,) = adam(model.parameters())
    model(torch.tensor([[1, HUGE - 1]])).sum().backward()
    optimizer.step()
    for act in (
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(optimizer.state_dict()),
        lambda: setattr(model.item.weight, "data", torch.zeros(1, DIM).expand(HUGE, DIM)),
    ):
        assert "rows that a rule makes when they are needed, and what uses it whole would write all of" in refused(act)
    said = refused(lambda: rowcast.save(tmp_path / "run", model, optimizer, step=1))
    assert f"item.weight has {HUGE:,} rows, and the optimizer moves all of them at every step" in said
    assert said.endswith('a group of its own without decay, {"params": [weight], "weight_decay": 0}')
    model(torch.tensor([[1, HUGE - 1]])).sum().backward()
    said = refused(optim.SGD(model.parameters(), lr=0.1).step)
    assert said.endswith(f"all of its {HUGE:,} rows, which would be written; give it a group with weight_decay=0")
