"""Features whose look-ups stay apart (pooling = "none"): what a model gets of them, and where its gradients go."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Batch
from rowcast.trainer.models import Embedded, Sequences, build_model
from rowcast.trainer.models.embedding import Embeddings
from tests.support.full_capacity import (
    NUM_DENSE,
    FullGroup,
    assert_equal_to_plain_loop,
    bits,
    make_job,
    random_batch,
    random_start,
    table,
)

pytestmark = pytest.mark.usefixtures("threads")
MODEL = {"kind": "tests.support.batches:small_model"}
TBSM: dict[str, Any] = {
    **{"kind": "tbsm", "bottom_mlp": [6, 5], "top_mlp": [7, 3], "history": 2},
    **{"attention_mlp": [4], "final_mlp": [6, 1]},
}
TABLES = [
    table("item", 30, 5, ["item", "bought"], "none"),
    table("user", 40, 5, ["user"]),
    table("tags", 9, 5, ["tags"], "mean"),
]
LENGTHS = [0, 3, 1, 0, 2]  # look-ups of five samples


def sequences_of(lengths: list[int], width: int = 2) -> Sequences:
    values = torch.arange(1.0, sum(lengths) * width + 1).view(-1, width)
    return Sequences(values=values, offsets=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))


class Layer:
    """An embedding layer over full groups, trained by sgd with a learning rate of 0.05."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self.job = make_job(tables, "sgd", MODEL)
        self.start = random_start(self.job)
        self.groups = [FullGroup(group, len(self.job.features), self.start) for group in group_specs(self.job)]
        self.embeddings = Embeddings(group_specs(self.job), [full.records for full in self.groups])

    def forward(self, batch: Batch) -> list[Embedded]:
        return self.embeddings([full.lookup(batch) for full in self.groups], 0)

    def weight(self, name: str) -> Tensor:
        return {key: value for full in self.groups for key, value in full.tensors().items()}[
            f"embedding_bags.{name}.weight"
        ]


def batch_of(bags: list[list[int]], size: int, weights: list[float] | None = None) -> Batch:
    return Batch(
        dense=np.zeros((size, NUM_DENSE), np.float32),
        labels=np.zeros(size, np.float32),
        ids=np.array([row for bag in bags for row in bag], np.int64),
        offsets=np.cumsum([0, *(len(bag) for bag in bags)]),
        weights=None if weights is None else np.array(weights, np.float32),
    )


BAGS = [[7, 2, 7], [], [], [4], [1], [2], [5, 6], []]  # item, bought, user, tags of two samples


def sequence(embedding: Embedded) -> Sequences:
    assert isinstance(embedding, Sequences)
    return embedding


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 6))
def test_padded_holds_the_last_look_ups_of_each_sample_at_the_right(lengths: list[int], length: int) -> None:
    sequences = sequences_of(lengths)
    padded, mask = sequences.padded(length)
    assert (padded.shape, padded.dtype, mask.dtype) == ((len(lengths), length, 2), torch.float32, torch.bool)
    start = 0
    for sample, own in enumerate(lengths):
        kept = min(own, length)
        assert mask[sample].tolist() == [False] * (length - kept) + [True] * kept
        assert torch.equal(padded[sample, length - kept :], sequences.values[start + own - kept : start + own])
        assert not padded[sample, : length - kept].any()
        start += own


def test_gradients_of_padded_go_to_the_look_ups_that_it_holds_and_to_no_other() -> None:
    plain = sequences_of(LENGTHS)
    values = plain.values.clone().requires_grad_()
    padded, mask = Sequences(values=values, offsets=plain.offsets).padded(2)
    seed = torch.randn(padded.shape, generator=torch.Generator().manual_seed(1))
    padded.backward(seed)  # type: ignore[no-untyped-call]
    assert values.grad is not None
    kept = [1, 2, 3, 4, 5]  # of samples 1, 2 and 4; look-up 0 is the first of three
    assert torch.equal(values.grad[kept], seed[mask])
    assert not values.grad[0].any()


def test_a_feature_without_pooling_gives_a_row_for_each_look_up_beside_pooled_ones() -> None:
    layer = Layer(TABLES)
    with torch.no_grad():
        item, bought, user, tags = layer.forward(batch_of(BAGS, size=2))
    rows = layer.weight("item")
    assert torch.equal(sequence(item).values, rows[[7, 2, 7]])
    assert torch.equal(sequence(bought).values, rows[[4]])
    assert (sequence(item).offsets.tolist(), sequence(bought).offsets.tolist()) == ([0, 3, 3], [0, 0, 1])
    assert isinstance(user, Tensor)
    assert isinstance(tags, Tensor)
    assert torch.equal(user, layer.weight("user")[[1, 2]])
    assert torch.equal(tags[0], (layer.weight("tags")[5] + layer.weight("tags")[6]) / 2)
    assert not tags[1].any()


def test_single_hot_features_without_pooling_have_one_row_a_sample() -> None:
    layer = Layer(TABLES)
    batch = random_batch(layer.job, np.random.default_rng(0), 4, None)
    with torch.no_grad():
        item = sequence(layer.forward(batch)[0])
    assert torch.equal(item.values, layer.weight("item")[batch.ids[:4]])
    assert item.offsets.tolist() == [0, 1, 2, 3, 4]


def test_rows_are_multiplied_by_the_weights_of_their_look_ups() -> None:
    tables = [table("item", 30, 5, ["item"], "none"), table("user", 40, 5, ["user"])]
    layer = Layer(tables)
    with torch.no_grad():
        item = sequence(layer.forward(batch_of([[7, 2], [7], [1], []], 2, [2.0, 0.5, -1.0, 3.0]))[0])
    assert torch.equal(item.values, layer.weight("item")[[7, 2, 7]] * torch.tensor([2.0, 0.5, -1.0])[:, None])


def test_a_negative_zero_is_looked_up_as_zero() -> None:
    for tables in (TABLES, [table("item", 30, 5, ["item", "bought"], "none")]):
        layer = Layer(tables)
        layer.groups[0].records.fill_(-0.0)
        with torch.no_grad():
            found = layer.forward(batch_of(BAGS[: 2 * len(layer.job.features)], size=2))
        assert not sequence(found[0]).values.signbit().any()


def test_the_gradients_of_all_look_ups_of_a_row_are_added_to_it() -> None:
    layer = Layer(TABLES)
    before = layer.weight("item").clone()
    item = sequence(layer.forward(batch_of(BAGS, size=2))[0])
    seed = torch.randn(item.values.shape, generator=torch.Generator().manual_seed(1))
    item.values.backward(seed)  # type: ignore[no-untyped-call]
    expected = before.clone()
    expected[7] += -0.05 * (seed[0] + seed[2])
    expected[2] += -0.05 * seed[1]
    torch.testing.assert_close(layer.weight("item"), expected)
    assert torch.equal(layer.weight("item")[3], before[3])


def test_the_bits_of_a_model_do_not_depend_on_where_the_rows_of_a_sequence_lie() -> None:
    model = build_model(make_job([TABLES[0]], "sgd", TBSM), NUM_DENSE)
    lengths = [3, 0, 2]
    values = torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    dense = torch.ones(3, NUM_DENSE)
    expected = model(dense, [Sequences(values=values, offsets=offsets)] * 2)
    for shift in range(1, 17):
        moved = torch.empty(values.numel() + shift)[shift:].view(values.shape).copy_(values)
        assert torch.equal(bits(model(dense, [Sequences(values=moved, offsets=offsets)] * 2)), bits(expected))


CASES: dict[str, tuple[int, dict[str, Any]]] = {  # how many of the tables
    "any lengths and empty ones": (3, {"lengths": (0, 5)}),
    "one look-up each": (3, {}),
    "weighted look-ups in a group without pooled features": (1, {"lengths": (0, 3), "weighted": True}),
    "weighted look-ups beside pooled features": (2, {"lengths": (0, 3), "weighted": True}),
    "no look-ups at all": (1, {"lengths": (0, 0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_sequences_equal_the_plain_loop(case: str) -> None:
    number, look_ups = CASES[case]
    assert_equal_to_plain_loop(make_job(TABLES[:number], "adagrad", TBSM), **look_ups)
