"""Batches of polars and of Hugging Face datasets train a script; both packages are optional."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rowcast
from tests.adopt.scripts import Launches, make, train_on

NUM_ROWS = 330  # 297 to train on in three batches, 33 to evaluate


@pytest.mark.parametrize(("package", "module"), [("polars", "polars_batches"), ("datasets", "datasets_batches")])
def test_each_epoch_trains_the_rows_of_the_file_in_an_order_of_its_own(
    package: str, module: str, tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {
        name: random.integers(0, rows, NUM_ROWS) for name, rows in (("a", 500), ("b", 500), ("c", 6))
    }
    columns |= {"row": np.arange(NUM_ROWS, dtype=np.float32), "price": random.random(NUM_ROWS)}
    columns["clicked"] = columns["a"] % 2
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    options = {"path": str(tmp_path / "clicks.parquet"), "dense": ["row", "price"], "features": ["a", "b", "c"]}

    model, optimizer = make(tmp_path / "run", **{"cache.capacity": "400 rows"})
    found: list[list[Any]] = []
    loader = rowcast.connect(
        model.ebc, f"examples.adopt.{module}:open_clicks", epochs=2, options=options, dense=(model, optimizer)
    )
    for _ in loader.epochs:
        found.append([])
        for batch in loader:
            train_on(model, optimizer, batch)
            found[-1].append((batch[0].clone(), batch[2].clone()))

    batches = importlib.import_module(f"examples.adopt.{module}").open_clicks(**options)
    orders = []
    for epoch, own in enumerate(found):
        expected = list(batches("train", epoch))
        assert len(own) == len(expected) == 3
        for (dense, labels), (their_dense, _, their_labels) in zip(own, expected, strict=True):
            torch.testing.assert_close(dense, their_dense, rtol=0, atol=0)
            assert torch.equal(labels, their_labels)
        orders.append(torch.cat([dense[:, 0] for dense, _ in own]).tolist())
        assert sorted(orders[-1]) == list(range(297))
    assert orders[0] != orders[1]
    assert sum(len(dense) for dense, _, _ in batches("eval", 0)) == 33
