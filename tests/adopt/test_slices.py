"""Gradient accumulation: a batch yielded as micro-batches trains its rows once, on the gradients of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.batch import slices_of
from tests.adopt import clicks
from tests.adopt.scripts import Launches, Model, copied, make, same
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"
bce = nn.functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize(("size", "number"), [(8, 1), (8, 3), (8, 4), (5, 4), (2, 4), (1, 1), (0, 1)])
def test_a_batch_is_cut_as_torch_chunk_cuts(size: int, number: int) -> None:
    cut = [list(range(size))[own.start : own.stop] for own in slices_of(size, number)]
    assert cut == [chunk.tolist() for chunk in torch.arange(size).chunk(number)]
    assert [own.is_last for own in slices_of(size, number)] == [False] * (len(cut) - 1) + [True]


def train_in_slices(model: Model, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """The losses of micro-batches."""
    losses = []
    for batch in loader:
        loss = bce(model(batch.dense_features, batch.sparse_features), batch.labels) * batch.share
        torch.autograd.backward(loss)
        losses.append(loss.item())
        if batch.is_last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("number", [2, 3, 8])
def test_micro_batches_train_rows_as_one_batch_does(number: int, tmp_path: Path, launches: Launches) -> None:
    """A script that looks up the whole batch and calls backward once for each slice's loss has the same bits."""
    model, optimizer = make(tmp_path / "slices", optimizer="adam")
    found = train_in_slices(model, optimizer, rowcast.connect(model.ebc, DATASET, accumulate=number))
    end = copied(model.state_dict())

    model, optimizer = make(tmp_path / "whole", optimizer="adam")
    losses = []
    for dense, sparse, labels in rowcast.connect(model.ebc, DATASET):
        values = model.ebc(sparse).values()
        leaf = values.detach().requires_grad_()
        for own in slices_of(len(labels), number):
            part = slice(own.start, own.stop)
            logits = model.layer(torch.cat([dense[part], leaf[part]], dim=1)).squeeze(1)
            loss = bce(logits, labels[part]) * (own.size / len(labels))
            torch.autograd.backward(loss)
            losses.append(loss.item())
        assert leaf.grad is not None
        torch.autograd.backward(values, leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert found == losses
    assert same(dict(model.state_dict()), end)
    assert len(found) == 8 * number


def test_mistakes_with_micro_batches_are_named(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with pytest.raises(ConfigError, match=facts("accumulate = 0", "at least 1")):
        rowcast.connect(model.ebc, DATASET, accumulate=0)
    with rowcast.connect(model.ebc, DATASET, accumulate=4) as loader:
        batches = iter(loader)
        first = next(batches)
        assert (len(first.labels), first.share, first.is_last, first.sparse_features.stride()) == (2, 0.25, False, 2)
        logits = model(first.dense_features, first.sparse_features)
        with pytest.raises(RuntimeError, match="micro-batch 0 of train step 0"):
            model(first.dense_features, first.sparse_features)
        with pytest.raises(RuntimeError, match=r"train step 0 .* backward"):
            next(batches)
        torch.autograd.backward(logits.sum())
        batches = iter(loader)  # goes on within the batch
        second = next(batches)
        assert torch.equal(second.labels, torch.as_tensor(clicks.batch(0)[2][2:4]).float())
        with pytest.raises(RuntimeError, match=facts("micro-batch 0", "micro-batch 1", "step 0")):
            model(second.dense_features, first.sparse_features)
        optimizer.step()
        with pytest.raises(
            RuntimeError, match=facts("between two micro-batches", "train step 0", "accumulate=4", "batch.is_last")
        ):
            model(second.dense_features, second.sparse_features)


def test_a_micro_batch_that_is_passed_over_has_no_gradient(tmp_path: Path, launches: Launches) -> None:
    """Here the last one, so that the rows are updated as the step is left."""
    ends: list[dict[str, Tensor]] = []
    for number, passed in ((2, 1), (4, 2)):
        model, optimizer = make(tmp_path / str(number))
        for at, batch in enumerate(rowcast.connect(model.ebc, DATASET, accumulate=number, max_steps=2)):
            if at % number < passed:
                train_on_part(model, batch)
            if batch.is_last:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(copied(model.state_dict()))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name])


def train_on_part(model: Model, batch: Any) -> None:
    logits = model(batch.dense_features, batch.sparse_features)
    torch.autograd.backward(bce(logits, batch.labels, reduction="sum"))
