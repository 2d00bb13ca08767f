"""Batches of polars and of Hugging Face datasets; both packages are optional."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.prefetcher.readers.formats.custom import BatchCheck
from tests.support import jobs
from tests.support.data_files import table

NUM_ROWS = 330  # 297 to train on in three batches, 33 to evaluate


@pytest.mark.parametrize(("package", "module"), [("polars", "polars_batches"), ("datasets", "datasets_batches")])
def test_each_epoch_has_the_rows_of_the_file_in_an_order_of_its_own(
    package: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(1)
    rows = {"a": 500, "b": 500, "c": 6}
    columns: dict[str, Any] = {name: random.integers(0, most, NUM_ROWS) for name, most in rows.items()}
    columns |= {"row": np.arange(NUM_ROWS, dtype=np.float32), "price": random.random(NUM_ROWS)}
    columns["clicked"] = columns["a"] % 2
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    batches = importlib.import_module(f"examples.{module}").open_clicks(
        str(tmp_path / "clicks.parquet"), dense=["row", "price"], features=[*rows]
    )
    check = BatchCheck(jobs.job(tables=[table(f"t_{name}", most, name) for name, most in rows.items()]))

    def order(split: str, epoch: int) -> list[int]:
        read = [check.check(batch, "here") for batch in batches(split, epoch)]
        found = np.concatenate([batch.dense[:, 0] for batch in read]).astype(int)
        ids = np.concatenate([batch.ids.reshape(len(rows), -1) for batch in read], axis=1)
        np.testing.assert_array_equal(ids, [columns[name][found] for name in rows])
        np.testing.assert_array_equal(np.concatenate([batch.labels for batch in read]), columns["clicked"][found])
        return [*map(int, found)]

    first, second = order("train", 0), order("train", 1)
    assert sorted(first) == sorted(second) == [*range(297)]
    assert first != second
    assert first == order("train", 0)
    assert order("eval", 0) == [*range(297, NUM_ROWS)]
