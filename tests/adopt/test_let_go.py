"""However a loader ends, the cache leaves the device with it, whatever the script keeps."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowcast
from rowcast.job.tables import GroupSpec
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.memory import make_records
from tests.adopt.scripts import Launches, Model, make, train_all
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"


class Held:
    """What sessions of this test have made and still hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: dict[str, weakref.ref[object]] = {}
        monkeypatch.setattr("rowcast.trainer.step.memory.make_records", self._records)
        monkeypatch.setattr("rowcast.trainer.run.connection.TrainerEngine", self._engine)

    def _records(self, slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[Tensor]:
        records = make_records(slots, groups, device)
        self._made |= {f"records {n}": weakref.ref(own) for n, own in enumerate(records)}
        return records

    def _engine(self, *parts: Any) -> TrainerEngine:
        engine = TrainerEngine(*parts)
        self._made |= {"engine": weakref.ref(engine), "cache": weakref.ref(engine.cache)}
        return engine

    @property
    def names(self) -> list[str]:
        assert len(self._made) == 3, "records of one group, engine and cache were made"
        return [name for name, held in self._made.items() if held() is not None]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Python frees cycles when it sees fit; here nothing does but the product."""
    gc.collect()
    gc.disable()
    yield Held(monkeypatch)
    gc.enable()


def loss_of(model: Model, batch: Any) -> Tensor:
    dense, sparse, labels = batch
    loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
    return loss


def train(model: Model, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Returns the loss with its graph."""
    loss: Tensor = loss_of(model, batch)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def test_the_cache_is_gone_when_the_data_has_ended_and_the_script_goes_on(
    tmp_path: Path, launches: Launches, held: Held
) -> None:
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, DATASET, dense=(model, optimizer))
    for batch in loader:
        loss = train(model, optimizer, batch)
        assert held.names == ["records 0", "engine", "cache"]
    assert loss.grad_fn is not None, "the script keeps the last graph and the last batch"
    assert held.names == []
    assert model.ebc.has_run
    assert set(model.state_dict()) == {
        "ebc.embedding_bags.wide.weight",
        "ebc.embedding_bags.small.weight",
        "layer.weight",
        "layer.bias",
    }
    assert (loader.stopped, loader.evaluation, list(loader.epochs)) == (None, None, [])
    with pytest.raises(RuntimeError, match="no batch to look up"):
        loss_of(model, batch)
    with pytest.raises(RuntimeError, match="the loader has ended after 8 train steps"):
        next(iter(loader))


def test_the_cache_is_gone_after_a_stop(tmp_path: Path, launches: Launches, held: Held) -> None:
    model, optimizer = make(tmp_path)
    loader = rowcast.connect(model.ebc, DATASET, dense=(model, optimizer))
    batches = iter(loader)  # kept, in the middle of its loop
    loss = train(model, optimizer, next(batches))
    loader.stop()
    assert loss.grad_fn is not None
    assert held.names == []
    assert "ebc.embedding_bags.wide.weight" in model.state_dict()
    assert list(batches) == []


def test_the_cache_is_gone_when_the_loader_is_closed_before_a_backward_pass(
    tmp_path: Path, launches: Launches, held: Held
) -> None:
    model, _ = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET) as loader:
        batches = iter(loader)
        loss = loss_of(model, next(batches))
    assert held.names == []
    with pytest.raises(RuntimeError, match=facts("backward", "train step 0", "loader")):
        torch.autograd.backward(loss)
    with pytest.raises(RuntimeError, match="the loader was closed; connect again"):
        loader.stop()


def test_the_cache_of_one_run_is_gone_before_the_next_one_in_a_process(
    tmp_path: Path, launches: Launches, held: Held
) -> None:
    for name in ("first", "second"):
        model, optimizer = make(tmp_path / name)
        train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, max_steps=2))
        assert held.names == []
