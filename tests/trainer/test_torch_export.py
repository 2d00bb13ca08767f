"""torch.export of every built-in model, with a free batch size: the exported program has the model's bits."""

from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from rowcast.job.models import BUILT_IN_MODELS
from rowcast.trainer.models import Embedded, Sequences, build_model
from tests.support.full_capacity import NUM_DENSE, make_job

WIDTH = 4
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom_mlp": [6, WIDTH], "top_mlp": [8, 1]},
    "dcnv2": {"bottom_mlp": [6, 5], "top_mlp": [8, 1], "cross_rank": 3},
    "din": {"top_mlp": [8, 1], "attention_mlp": [4], "history": 3, "targets": {"f0": "f1"}},
    "wide-deep": {"top_mlp": [8, 1]},
    "deepfm": {"top_mlp": [8, 1]},
    "two-tower": {"user_mlp": [8, 5], "item_mlp": [5], "item_features": ["f1"]},
    "tbsm": {"bottom_mlp": [6, WIDTH], "top_mlp": [5], "attention_mlp": [4], "final_mlp": [8, 1], "history": 3},
}
LINEAR = ("wide-deep", "deepfm")
SEQUENCES = {"tbsm": 2, "din": 2}  # the other features are pooled
BATCH = Dim("batch")


def feature(kind: str, position: int, batch_size: int, generator: torch.Generator) -> Embedded:
    if position >= SEQUENCES.get(kind, 0):
        return torch.randn(batch_size, WIDTH, generator=generator)
    ends = torch.randint(0, 6, (batch_size,), generator=generator).cumsum(0)
    return Sequences(
        values=torch.randn(int(ends[-1]), WIDTH, generator=generator), offsets=torch.cat([torch.zeros(1), ends]).int()
    )


def inputs(kind: str, batch_size: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(batch_size)
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    embeddings = [feature(kind, position, batch_size, generator) for position in range(3)]
    linear = [torch.randn(batch_size, 1, generator=generator) for _ in range(3)]
    return (dense, embeddings, linear) if kind in LINEAR else (dense, embeddings)


def free_sizes(embeddings: list[Embedded]) -> list[Any]:
    """The free sizes: the batch's, and for each sequence its look-ups', values then offsets."""
    return [
        [{0: Dim(f"lookups_{i}")}, {0: BATCH + 1}] if isinstance(own, Sequences) else {0: BATCH}
        for i, own in enumerate(embeddings)
    ]


@pytest.mark.parametrize("kind", sorted(BUILT_IN_MODELS.keys() - {"sasrec", "hstu"}))  # these take named arrays too
def test_an_exported_model_has_the_bits_of_the_model_at_any_batch_size(kind: str) -> None:
    tables = [
        {"name": f"t{i}", "num_embeddings": 9, "embedding_dim": WIDTH, "features": [f"f{i}"], "linear": kind in LINEAR}
        for i in range(SEQUENCES.get(kind, 0), 3)
    ]
    if kind in SEQUENCES:
        features = [f"f{i}" for i in range(SEQUENCES[kind])]
        apart = {"name": "apart", "num_embeddings": 9, "embedding_dim": WIDTH, "pooling": "none", "features": features}
        tables.insert(0, apart)
    model = build_model(make_job(tables, model={"kind": kind, **MODELS[kind]}), NUM_DENSE).eval()
    dense, *lists = inputs(kind, 7)
    exported = torch.export.export(
        model, (dense, *lists), dynamic_shapes=({0: BATCH}, *(free_sizes(own) for own in lists))
    ).module()
    for batch_size in (2, 7, 64, 1000):
        found, known = tree_leaves(exported(*inputs(kind, batch_size))), tree_leaves(model(*inputs(kind, batch_size)))
        assert {len(own) for own in known} == {batch_size}
        assert len(known) == (4 if kind == "two-tower" else 1)
        assert all(torch.equal(own, known_own) for own, known_own in zip(found, known, strict=True))
