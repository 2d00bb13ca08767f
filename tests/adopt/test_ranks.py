"""torch.distributed around an adopted model: one rank trains as without it, ranks that do not fit are refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import rowcast
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import gradient_sum
from rowcast.trainer.adopt.connect.loader import require_group
from rowcast.trainer.adopt.ranks import ScriptCollectives
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.models.exchanges import Complete, Exchanges, LocalCollectives
from rowcast.trainer.run.launch import read_launch
from tests.adopt.scripts import Launches, make, train_all

DATASET = "tests.adopt.clicks:train"
OTHER_RANK = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=1, world_size=2)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.multiprocessing.spawn sets no variable."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_model_in_one_rank_of_ddp_has_the_losses_of_the_model_alone(
    static_graph: bool, tmp_path: Path, launches: Launches
) -> None:
    model, optimizer = make(tmp_path / "alone")
    alone = train_all(model, optimizer, rowcast.connect(model.ebc, DATASET))
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    model, optimizer = make(tmp_path / "ddp")
    outer = nn.parallel.DistributedDataParallel(model, static_graph=static_graph)
    dense = (outer, optimizer)
    assert train_all(outer, optimizer, rowcast.connect(model.ebc, DATASET, dense=dense)) == alone  # type: ignore[arg-type]
    assert [tuple(weight.shape) for weight in outer.state_dict().values()] == [(500, 4), (6, 4), (1, 14), (1,)]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun sets."""
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ports | numbers).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("job", "options", "sentence"),
    [
        (
            {},
            {},
            "WORLD_SIZE = 2, but this script has no process group, on which its ranks exchange rows",
        ),
        ({"ranks.count": 3}, {}, "WORLD_SIZE = 2, but ranks.count = 3; start as many trainers"),
        ({"ranks.parts": 4}, {}, "ranks.parts = 4, but a training script computes one part on each rank; remove"),
    ],
)
def test_ranks_that_do_not_fit_the_script_are_refused_before_the_start(
    job: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path, launches: Launches
) -> None:
    model, _ = make(tmp_path / "run", **job)
    with pytest.raises(ConfigError) as refused:
        next(iter(rowcast.connect(model.ebc, DATASET, **options)))
    assert sentence in str(refused.value)
    assert launches.children == []


def test_gradients_are_summed_on_one_rank_by_leaving_them_and_on_several_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(2, 1)
    torch.autograd.backward(layer(torch.ones(1, 2)).sum())
    rowcast.sum_gradients(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(
        ConfigError, match=r"no process group to add over; call torch\.distributed\.init_process_group\(\) first"
    ):
        rowcast.sum_gradients(layer)


@pytest.mark.parametrize("when", ["before connect", "after connect"])
def test_one_of_several_ranks_is_told_to_start_alone(when: str, tmp_path: Path, launches: Launches) -> None:
    store = str(tmp_path / "store")
    with subprocess.Popen([sys.executable, "-c", OTHER_RANK, store], stdin=subprocess.PIPE) as other:
        model, _ = make(tmp_path / "run")
        loader = None if when == "before connect" else rowcast.connect(model.ebc, DATASET)
        dist.init_process_group("gloo", store=FileStore(store, 2), rank=0, world_size=2)
        with pytest.raises(ConfigError) as refused:
            next(iter(loader or rowcast.connect(model.ebc, DATASET)))
        assert other.stdin is not None
        other.stdin.close()
    assert str(refused.value) == (
        "torch.distributed has 2 ranks, but WORLD_SIZE is 1; start the script by torchrun, which sets it, and make one "
        "process group of all its ranks"
    )
    assert launches.children == []


@pytest.mark.usefixtures("two_ranks")
def test_a_group_without_a_backend_for_the_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    launch = read_launch(os.environ)
    require_group(launch, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"no backend for its rows on the cpu \(cuda:nccl\)"):
        require_group(launch, torch.device("cpu"))
    monkeypatch.undo()


class OnlyRankSession:
    """What `sum_gradients` needs of a session."""

    def __init__(self) -> None:
        self.rank, self.train_steps = Rank(number=0, count=1, parts=1), 0
        self.streams = adopted_streams(torch.device("cpu"))
        self.exchanges = Exchanges(LocalCollectives(), lambda lap: None)


def test_weights_that_are_unfrozen_later_are_summed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sum, "OPEN", [OnlyRankSession()])
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    for given in (False, True):
        layer.bias.requires_grad_(given)
        layer.zero_grad()
        torch.autograd.backward(layer(torch.ones(1, 2)).sum())
        found = layer.bias.grad
        rowcast.sum_gradients(layer)
        assert (layer.bias.grad is None) != given
        assert not given or layer.bias.grad is not found, "it came back from the exchange"


def test_a_collective_that_has_ended_is_no_work_left() -> None:
    collectives = ScriptCollectives(Rank(number=0, count=1, parts=1), 1.0)
    collectives._begun.append((Complete(), "the counts of an evaluation"))
    assert not collectives.leaves_work
