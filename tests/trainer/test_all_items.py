"""examples/all_items.py: ranks among all items of an export, block by block, against all scores at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from examples.all_items import ItemRows, load_model, ranks_of, vectors_of
from rowcast.trainer.models import build_model
from rowcast.trainer.models.next_item import rounding_of
from tests.support.next_item import ITEMS, KINDS, LENGTH, WIDTH, job_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [1, 1000, 2**20])
def test_ranks_are_those_of_all_scores_at_once(kind: str, memory: int, tmp_path: Path) -> None:
    job, rng = job_of(kind), np.random.default_rng(1)
    table = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(4))
    table[7] = table[3]  # a tie
    path = tmp_path / "export.safetensors"
    save_file({"embedding_bags.item.weight": table, **build_model(job, num_dense=0).state_dict()}, path)
    lengths = [3, 1, LENGTH, LENGTH + 4, *rng.integers(1, LENGTH, 80)]
    histories = [rng.integers(0, ITEMS, length).tolist() for length in lengths]
    times = [np.cumsum(rng.integers(0, 1000, length)).tolist() for length in lengths]
    positives = rng.integers(0, ITEMS, len(lengths))
    positives[:2] = 3, 7
    with torch.no_grad(), path.open("rb") as file:
        rows = ItemRows(file, "item")
        vectors = vectors_of(load_model(job, path), rows, histories, times)
        ranks = ranks_of(vectors, positives, rows, memory)
        scores = vectors @ table.T
    own = scores.gather(1, torch.tensor(positives)[:, None]) - rounding_of(vectors, table[positives])[:, None]
    assert torch.equal(ranks, (scores >= own).sum(1) - 1)
    assert (ranks[:2] > 0).all(), "a tie counts against both"
