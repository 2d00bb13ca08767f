"""The embedding layer: what it returns, what its backward changes, what it refuses. Its bits: test_plain_loop.py."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Batch
from rowcast.trainer.models.embedding import Embeddings, GroupLookup
from tests.support.full_capacity import NUM_DENSE, FullGroup, make_job, random_batch, random_start

MODEL = {"kind": "tests.support.full_capacity:Concatenated"}
TABLES: list[dict[str, Any]] = [
    {"name": "a", "num_embeddings": 9, "embedding_dim": 4, "features": ["a"], "pooling": "sum"},
    {"name": "w", "num_embeddings": 20, "embedding_dim": 6, "features": ["w"], "pooling": "sum"},
    {"name": "b", "num_embeddings": 30, "embedding_dim": 4, "features": ["b", "c"], "pooling": "mean"},
]


class Layer:
    """An embedding layer over full groups."""

    def __init__(self, job: Job) -> None:
        self.start = random_start(job)
        self.groups = [FullGroup(group, len(job.features), self.start) for group in group_specs(job)]
        self.embeddings = Embeddings(group_specs(job), [full.records for full in self.groups])

    def lookups(self, batch: Batch) -> list[GroupLookup]:
        return [full.lookup(batch) for full in self.groups]

    def forward(self, batch: Batch, train_step: int = 0) -> list[Tensor]:
        """Of tables that are all pooled."""
        features = self.embeddings(self.lookups(batch), train_step)
        pooled = [feature for feature in features if isinstance(feature, Tensor)]
        assert len(pooled) == len(features)
        return pooled

    def records(self) -> list[Tensor]:
        return [full.records.clone() for full in self.groups]


@pytest.fixture
def layer() -> Layer:
    return Layer(make_job(TABLES, "adagrad", MODEL))


def batch_of(ids: list[int], offsets: list[int], size: int) -> Batch:
    return Batch(
        dense=np.zeros((size, NUM_DENSE), np.float32),
        labels=np.zeros(size, np.float32),
        ids=np.array(ids, np.int64),
        offsets=np.array(offsets, np.int64),
    )


def sum_of(features: list[Tensor]) -> Tensor:
    return torch.cat([feature.reshape(-1) for feature in features]).sum()


def test_features_of_several_groups_come_in_the_jobs_order(layer: Layer) -> None:
    with torch.no_grad():
        features = layer.forward(batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1))
    rows = [layer.start["embedding_bags.a.weight"][3], layer.start["embedding_bags.w.weight"][4]]
    rows += [layer.start["embedding_bags.b.weight"][5], layer.start["embedding_bags.b.weight"][6]]
    assert [feature.shape for feature in features] == [(1, 4), (1, 6), (1, 4), (1, 4)]
    assert all(torch.equal(feature[0], row) for feature, row in zip(features, rows, strict=True))


def test_bags_are_summed_or_averaged_and_empty_bags_are_zero(layer: Layer) -> None:
    bags = [[1, 2], [], [0], [], [7, 7, 8], [], [], [9]]  # a, w, b, c, two samples each
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])
    with torch.no_grad():
        a, w, b, c = layer.forward(batch_of([row for bag in bags for row in bag], offsets.tolist(), size=2))
    tables = {name: layer.start[f"embedding_bags.{name}.weight"] for name in "awb"}
    assert torch.equal(a[0], tables["a"][1] + tables["a"][2])
    assert torch.equal(w[0], tables["w"][0])
    assert torch.equal(b[0], (tables["b"][7] + tables["b"][7] + tables["b"][8]) / 3)
    assert torch.equal(c[1], tables["b"][9])
    for empty in (a[1], w[1], b[1], c[0]):
        assert torch.equal(empty, torch.zeros_like(empty))


@pytest.mark.parametrize(
    "bags", [[[]] * 8, [[1], [1], [1], [1], [], [], [1], [1]]], ids=["no look-up", "none of a feature"]
)
def test_a_batch_of_empty_bags_looks_up_zeros_and_changes_only_rows_of_the_others(
    layer: Layer, bags: list[list[int]]
) -> None:
    before = layer.records()
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])
    features = layer.forward(batch_of([row for bag in bags for row in bag], offsets.tolist(), size=2))
    assert not features[2].any()
    torch.autograd.backward(sum_of(features))
    for now, then in zip(layer.records(), before, strict=True):
        changed = (now != then).any(1).nonzero().squeeze(1)
        assert now.isfinite().all()
        assert (len(changed) > 0) == any(bags)


def test_a_negative_zero_is_looked_up_as_the_sum_that_started_from_zero(layer: Layer) -> None:
    layer.groups[0].records.fill_(-0.0)
    one_each = batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1)
    with torch.no_grad():
        for batch in (one_each, dataclasses.replace(one_each, offsets=None)):
            assert not layer.forward(batch)[0].signbit().any()


def test_a_look_up_without_gradients_changes_nothing_and_asks_for_no_backward(layer: Layer) -> None:
    before = layer.records()
    batch = random_batch(make_job(TABLES, "adagrad", MODEL), np.random.default_rng(0), 5, (0, 3))
    with torch.no_grad():
        for _ in range(2):
            assert not any(feature.requires_grad for feature in layer.forward(batch))
    assert all(torch.equal(now, then) for now, then in zip(layer.records(), before, strict=True))


def test_backward_changes_the_rows_of_the_batch_and_no_others(layer: Layer) -> None:
    before = layer.records()
    batch = batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1)
    torch.autograd.backward(sum_of(layer.forward(batch)))
    for now, then, lookup in zip(layer.records(), before, layer.lookups(batch), strict=True):
        changed = (now != then).any(1).nonzero().squeeze(1)
        assert changed.tolist() == sorted(lookup.unique_slots.tolist())


def test_an_evaluation_may_come_between_forward_and_backward(layer: Layer) -> None:
    batch = batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1)
    features = layer.forward(batch)
    with torch.no_grad():
        evaluated = layer.forward(batch)
    assert torch.equal(features[0], evaluated[0])
    torch.autograd.backward(sum_of(features))
    with torch.no_grad():
        assert not torch.equal(layer.forward(batch)[0], evaluated[0])


def test_a_second_forward_before_the_backward_is_refused(layer: Layer) -> None:
    batch = batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1)
    features = layer.forward(batch)
    with pytest.raises(RuntimeError, match=r"train step 1 .* before the backward"):
        layer.forward(batch, train_step=1)
    torch.autograd.backward(sum_of(features))
    torch.autograd.backward(sum_of(layer.forward(batch, train_step=1)))


def test_a_second_backward_of_one_forward_is_refused(layer: Layer) -> None:
    total = sum_of(layer.forward(batch_of(ids=[3, 4, 5, 6], offsets=[0, 1, 2, 3, 4], size=1)))
    torch.autograd.backward(total, retain_graph=True)
    after = layer.records()
    with pytest.raises(RuntimeError, match="train step 0 were already updated"):
        torch.autograd.backward(total)
    assert all(torch.equal(now, then) for now, then in zip(layer.records(), after, strict=True))
