"""Raw ids become rows as in training, and bags are pooled with its bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.id_check import MISSING
from rowcast.serving.index_loops import FOUND, PAGES_MISSING, look_up
from rowcast.serving.model import Model
from rowcast.serving.raw_ids import id_rules, rows_of
from rowcast.serving.snapshot import TableView
from tests.serving.served_run import ServedRun, publish, serving_job
from tests.support import jobs
from tests.support.facts import facts


@pytest.fixture
def model(tmp_path: Path) -> Model:
    run = ServedRun(serving_job(tmp_path / "run"))
    run.train_some(0.5)
    run.checkpoint()
    publish(run, tmp_path / "served")
    return Model(tmp_path / "served")


def job_of(form: str, **data: Any) -> Job:
    return jobs.job(data={"format": form, "path": "x", **data}, tables=[jobs.table("t", 10, 4, "cat_0")])


def hashed(text: bytes) -> int:
    return 1 + xxhash.xxh3_64_intdigest(text) % 9


@pytest.mark.parametrize(
    ("job", "ids", "rows"),
    [
        (job_of("criteo-tsv"), [0, 11, 2**32 - 1, None, MISSING], [0, 1, 5, 0, 0]),
        (job_of("criteo-npy", hash=True), np.array([-1, 12], np.int32), [5, 2]),
        (job_of("criteo-npy", hash=True), np.array([-1, 12]), [5, 2]),
        (job_of("parquet", on_invalid_id="zero"), [3, 10, -1, None], [3, 0, 0, 0]),
        (job_of("parquet", on_invalid_id="modulo"), [3, 12, -1, None], [3, 2, 9, 0]),
        (job_of("parquet", columns={"hash": True}), ["", "a", None], [hashed(b""), hashed(b"a"), 0]),
        (job_of("csv", columns={"hash": True}), np.array(["", "a"]), [hashed(b""), hashed(b"a")]),
        (
            job_of("parquet", columns={"hash": True}),
            pa.array([2**64 - 1, 7], pa.uint64()),
            [hashed(b"\xff" * 8), hashed(b"\7" + b"\0" * 7)],
        ),
        (job_of("synthetic"), [], []),
    ],
)
def test_raw_ids_become_rows_by_the_rule_of_training(job: Job, ids: Any, rows: list[int]) -> None:
    [rule] = id_rules(job)
    assert rows_of(rule, 10, ids).tolist() == rows


@pytest.mark.parametrize(
    ("job", "ids", "named"),
    [
        (job_of("criteo-tsv"), [2**32], 2**32),
        (job_of("criteo-tsv"), ["0a"], "string"),
        (job_of("parquet"), [10], 10),
        (job_of("parquet"), [None], "missing"),
        (job_of("parquet"), [1.5], "double"),
        (job_of("csv", columns={"hash": True}), [1], "int64"),
    ],
)
def test_ids_that_training_would_have_refused_are_refused(job: Job, ids: Any, named: Any) -> None:
    [rule] = id_rules(job)
    with pytest.raises(ValueError, match=facts("cat_0", named)):
        rows_of(rule, 10, ids)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_have_the_bits_of_a_sum_from_zero(weighted: bool, model: Model) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 6, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 3000, int(offsets[-1]))
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    rows = torch.tensor(model.rows("user", ids))
    rows = rows if weights is None else rows * torch.tensor(weights)[:, None]
    bags = torch.arange(40).repeat_interleave(torch.tensor(lengths))
    expected = torch.zeros(40, rows.shape[1]).index_add(0, bags, rows)
    assert model.bags("user", ids, offsets, weights).tobytes() == expected.numpy().tobytes()
    with pytest.raises(ValueError, match=facts("user", len(ids))):
        model.bags("user", ids, offsets[:-1])
    with pytest.raises(ValueError, match="weights"):
        model.bags("user", ids, offsets, np.ones(3, np.float32))
    with pytest.raises(KeyError, match="nobody"):
        model.rows("nobody", [1])


def test_rows_out_of_memory_are_asked_for_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for_one = TableView.ask_for
    monkeypatch.setattr("rowcast.serving.snapshot.look_up", _without_pages)

    def note(self: TableView, places: Any) -> Any:
        asked.append(len(places))
        return for_one(self, places)

    monkeypatch.setattr(TableView, "ask_for", note)
    ids = {"user": np.arange(3000), "item": np.arange(5)}
    found = model.look_up(ids)
    assert asked == [3000, 5]
    assert model.counts()["waits"] == 1
    monkeypatch.undo()
    for name, own in ids.items():
        assert found[name].tobytes() == model.rows(name, own).tobytes()


def _without_pages(*given: Any) -> int:
    assert look_up(*given) in (FOUND, PAGES_MISSING)
    return PAGES_MISSING
