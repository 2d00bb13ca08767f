"""Adopted scripts on several ranks, under torchrun: the bits of the script un-adopted on as many."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.gradient_sum import refuse_wrappers
from tests.adopt import saved_ranks
from tests.support.facts import facts
from tests.support.processes import Process, Session

STEPS = 16
VIEWS = {"gradient_as_bucket_view": True}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as own:
        yield own


def start(session: Session, ranks: int, *cases: dict[str, Any], timeout: int = 60) -> Process:
    wishes = {
        "folder": str(session.folder),
        "timeout": timeout,
        "cases": [{"optimizer": "adam", "steps": STEPS, **own} for own in cases],
    }
    # torchrun looks seldom for one that has ended, so that the others find out and can say it before it ends them
    arguments = [f"--nproc-per-node={ranks}", "--monitor-interval=1", "-m", "tests.adopt.summed_script"]
    arguments.append(json.dumps(wishes))
    return session.start_module("rowcast.deploy.torchrun", *arguments, PYTHONPATH=".")


def assert_same(session: Session, ranks: int, *cases: dict[str, Any]) -> list[float]:
    """Returns the share of each case's rows that ranks fetched on demand, of the rank with the most."""
    ended = start(session, ranks, *cases).ended(300)
    assert ended.code == 0, ended.stderr
    shares = []
    for rank in range(ranks):
        found = json.loads((session.folder / f"{rank}.found").read_text())
        assert [differ for differ, *_ in found] == [0] * len(cases), f"rank {rank}: {found}"
        assert all(compared > 43_000 for _, compared, *_ in found)
        shares.append([demanded for *_, demanded in found])
        for own, (_, _, starts, exchanges, _) in zip(cases, found, strict=True):
            assert bool(starts) == own.get("engine", False)
            synchronised = own.get("steps", STEPS) * own.get("epochs", 1) // own.get("accumulate", 1)
            assert exchanges == (synchronised if ranks > 1 else 0)
    assert session.remains(killed=True) == []
    return [max(of_case) for of_case in zip(*shares, strict=True)]


@pytest.mark.timeout(320)
def test_rows_of_other_ranks_are_foreseen_and_no_bit_depends_on_it(session: Session) -> None:
    far = {"engine": True, "steps": 40}
    near, apart, *disturbed = assert_same(
        session,
        2,
        far,
        {**far, "sum": True, "holds": {"1": 4}},  # rank 1 asks for batches four steps before it trains them
        {**far, "lists": {"late": 0.9}, "alone": True},
        {**far, "lists": {"lost": 0.5}, "optimizer": "sparse"},
        {**far, "lists": {"wrong": 0.5}},
    )
    assert max(near, apart) <= 0.01
    assert min(disturbed) > 0.05  # lists that are missing or wrong cost fetches


@pytest.mark.timeout(320)
def test_two_ranks_of_ddp_have_the_bits_of_stock_ddp(session: Session) -> None:
    assert_same(
        session,
        2,
        {"optimizer": "sparse"},
        # the users' table is looked up by one rank a step, or by none; rank 1 begins with other values
        {"in_turn": True, "epochs": 2, "engine": True, "seeds": True},
        {"optimizer": "momentum", "in_turn": True, "accumulate": 3, "clip": 0.01},
        {"optimizer": "adamw", "in_turn": True, "clip": 0.01, "set_to_none": False, "alone": True, "ddp": VIEWS},
        {"ddp": {"static_graph": True}},
    )


@pytest.mark.timeout(320)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_with_sum_gradients_have_the_bits_of_the_script_with_it_on_as_many(ranks: int, session: Session) -> None:
    assert_same(
        session,
        ranks,
        {"sum": True, "in_turn": True, "engine": True, "epochs": 2},
        {"sum": True, "optimizer": "momentum", "in_turn": True, "clip": 0.01},
        {"sum": True, "optimizer": "adamw", "accumulate": 3, "set_to_none": False, "alone": True},
    )


@pytest.mark.parametrize("sums", [False, True])
def test_a_rank_that_is_away_is_named_after_the_time_out_of_the_group(sums: bool, session: Session) -> None:
    away = {"sum": sums, "adopted_only": True, "leaves": "60", "leaves_at": {"1": 4}}
    ended = start(session, 3, away, timeout=5).ended(200)
    assert ended.code == 3
    what = f"{'the dense' if sums else 'sizes of the table'} gradients of train step 5"
    assert f"rank 0 of 3 waited 5 s for rank 1 to exchange {what}; look for one with a batch fewer" in ended.stderr


def test_a_rank_that_is_killed_ends_the_others(session: Session) -> None:
    killed = {"adopted_only": True, "engine": True, "leaves": "SIGKILL", "leaves_at": {"1": 3}}
    ended = start(session, 2, killed).ended(200)
    assert ended.code
    assert "rank 0 of 2 lost another rank while they exchanged" in ended.stderr
    session.until_alone(30)


def test_ranks_that_begin_with_other_tables_are_refused_without_ddp(session: Session) -> None:
    ended = start(session, 2, {"sum": True, "adopted_only": True, "seeds": True}).ended(200)
    assert ended.code
    assert "rank 1 begins with other values of the adopted table bias than rank 0; make the model from" in ended.stderr


# refused by name


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.top(self.item(ids))
        return logits


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank", "no_engine", "let_go")
def test_ddp_that_was_made_before_adopt_is_refused_with_the_right_order() -> None:
    sentence = (
        "DistributedDataParallel was made before the table {} was adopted, and has a gradient of all its rows; "
        "write model = rowcast.adopt(model, ...) first, then net = DistributedDataParallel(model)"
    )
    model = Tables()
    net = DistributedDataParallel(model)
    with pytest.raises(ConfigError) as refused:
        rowcast.adopt(net, "10 rows")
    assert str(refused.value) == sentence.format("module.item.weight")
    rowcast.adopt(model, "10 rows")
    with pytest.raises(ConfigError) as refused:
        net(torch.tensor([1]))
    assert str(refused.value) == sentence.format("item.weight")
    DistributedDataParallel(model)(torch.tensor([1])).sum().backward()
    assert model.item.weight.grad is not None


@pytest.mark.parametrize("package", ["torch.distributed.fsdp.fully_sharded_data_parallel", "deepspeed.runtime.engine"])
def test_wrappers_that_cut_parameters_are_refused_by_name(package: str) -> None:
    wrapper = type("Wrapper", (nn.Sequential,), {"__module__": package})
    with pytest.raises(ConfigError, match=r"^Wrapper was made before the table 0\.item\.weight was adopted, and has"):
        rowcast.adopt(wrapper(Tables()), "10 rows")
    refuse_wrappers(Tables(), "item.weight")


@pytest.mark.usefixtures("no_engine", "let_go")
def test_a_step_of_a_rank_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rowcast.adopt(Tables(), "10 rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"table item\.weight is of this rank alone, and there are 2; use"):
        optimizer.step()


@pytest.mark.timeout(320)
@pytest.mark.usefixtures("no_engine", "let_go")
def test_ranks_that_were_killed_go_on_from_their_save_with_the_bits_of_stock_ddp(session: Session) -> None:
    found = []
    for capacity, end, code in (("", 99, 0), ("100 rows", 8, 1), ("100 rows", 99, 0)):
        arguments = ["--nproc-per-node=2", "-m", "tests.adopt.saved_ranks", str(session.folder), capacity, str(end)]
        ended = session.start_module("rowcast.deploy.torchrun", *arguments, PYTHONPATH=".").ended(120)
        assert bool(ended.code) == bool(code), ended.stderr
        session.until_alone(60)
        if not code:
            found.append([torch.load(session.folder / f"{rank}.pt") for rank in (0, 1)])
    for plain, adopted in zip(*found, strict=True):
        assert [torch.equal(*pair) for pair in zip(plain, adopted, strict=True)] == [True] * 12
    alone = rowcast.adopt(saved_ranks.Model(), "100 rows")
    with pytest.raises(ConfigError, match=facts("2 ranks", "1")):
        rowcast.restore(session.folder / "run", alone)
