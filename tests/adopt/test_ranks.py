"""torch.distributed around an adopted model: one rank trains as without it, several are refused before the start."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import rowcast
from rowcast.runtime.errors import ConfigError
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
        "torch.distributed has 2 ranks, but a training script runs on one rank; start the script once, "
        "without torchrun, torch.multiprocessing.spawn or accelerate's --num_processes"
    )
    assert launches.children == []
