"""Raw ids become rows as in training, and bags are pooled with its bits."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
from tests.serving.served_run import ServedRun, Tables, publish, serving_job
from tests.support import jobs
from tests.support.facts import facts

BAGS: Tables = (
    ("user", 3000, 4, {}),
    ("item", 700, 8, {"dtype": "bf16", "pooling": "mean"}),
    ("weighed", 50, 4, {}),
    ("kept", 50, 4, {"pooling": "none"}),
)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    columns = {"weights": {"weighed": "w"}}
    run = ServedRun(serving_job(tmp_path / "run", BAGS, format="parquet", path="x", columns=columns, synthetic=None))
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
        *(
            (
                job_of(form, columns={"hash": True, "hash_by_value": True}),
                ids,
                [hashed(b"\7" + b"\0" * 7), hashed(b"a"), 0],
            )
            for form in ("csv", "parquet")
            for ids in (["7", "a", None], ["7.0", "a", None])
        ),
        (job_of("csv", columns={"hash": True, "hash_by_value": True}), [7.0, np.nan], [hashed(b"\7" + b"\0" * 7), 0]),
        (
            job_of("csv", columns={"prepare": {"cat_0": {"map": {"x": 5, "y": -1}, "buckets": [0, 5, 9]}}}),
            ["x", None, "y"],
            [3, 0, 1],
        ),
        (
            job_of("parquet", columns={"prepare": {"cat_0": {"buckets": [0, 5]}}}),
            [-1, 0, 4.5, 5, None],
            [1, 2, 2, 3, 0],
        ),
        (
            job_of("parquet", columns={"prepare": {"cat_0": {"of": "time", "clock": "weekday"}}}),
            ["2024-03-01", None, "2024-03-03T23:30:00-01:00", "1709251200"],
            [5, 0, 1, 5],
        ),
        (job_of("synthetic"), [], []),
    ],
)
def test_raw_ids_become_rows_by_the_rule_of_training(job: Job, ids: Any, rows: list[int]) -> None:
    [rule] = id_rules(job, {})
    assert rows_of(rule, 10, ids, job.data.columns.prepare).tolist() == rows


@pytest.mark.parametrize(
    ("job", "ids", "named"),
    [
        (job_of("criteo-tsv"), [2**32], 2**32),
        (job_of("criteo-tsv"), ["0a"], "string"),
        (job_of("parquet"), [10], 10),
        (job_of("parquet"), [None], "missing"),
        (job_of("parquet"), [1.5], "double"),
        (job_of("csv", columns={"hash": True}), [1], "int64"),
        (job_of("csv", columns={"prepare": {"cat_0": {"map": {"x": 5}, "buckets": [0]}}}), ["x", "z"], "z"),
        *((job_of("parquet", columns={"hash": True}), one, type(one).__name__) for one in ("u17", b"u17", {"u17": 1})),
        (job_of("parquet", columns={"hash": True}), 17, "int"),
    ],
)
def test_ids_that_training_would_have_refused_are_refused(job: Job, ids: Any, named: Any) -> None:
    [rule] = id_rules(job, {})
    with pytest.raises(ValueError, match=facts("cat_0", named)):
        rows_of(rule, 10, ids, job.data.columns.prepare)


def test_dense_features_are_prepared_as_in_training(tmp_path: Path) -> None:
    prepare = {"price": {"fill": 1, "log1p": True}, "side": {"map": {"left": -1}}, "year": {"standardize": [1990, 10]}}
    prepare["age"] = {"of": "time", "clock": "days", "since": "2024-03-01"}
    columns = {"dense": ["price", "side", "year", "age"], "prepare": prepare}
    run = ServedRun(serving_job(tmp_path / "run", format="parquet", path="x", columns=columns, synthetic=None))
    run.checkpoint()
    publish(run, tmp_path / "served")
    model, given = Model(tmp_path / "served"), {"year": [2000, 1985], "price": [None, 0.5], "side": ["left", "left"]}
    given["time"] = ["2024-03-01T23:00:00Z", "2024-03-01T23:00:00-02:00"]
    expected = np.array([[np.log1p(1), -1, 1, 0], [np.log1p(0.5), -1, -0.5, 1]], np.float32)
    assert model.dense_features(given).tobytes() == expected.tobytes()
    for changed, named in (({"side": ["up", "left"]}, "up"), ({"price": [-2, 0]}, "-2"), ({"year": [None, 1]}, "nan")):
        with pytest.raises(ValueError, match=facts(*changed, named)):
            model.dense_features(given | changed)
    with pytest.raises(KeyError, match="year"):
        model.dense_features({"price": [1], "side": ["left"]})


@pytest.mark.parametrize("feature", ["user", "item", "weighed"])
def test_bags_have_the_bits_of_a_sum_from_zero(feature: str, model: Model) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 6, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 50, int(offsets[-1]))
    weights = rng.normal(size=len(ids)).astype(np.float32) if feature == "weighed" else None
    rows = torch.tensor(model.rows(feature, ids))
    rows = rows if weights is None else rows * torch.tensor(weights)[:, None]
    bags = torch.arange(40).repeat_interleave(torch.tensor(lengths))
    expected = torch.zeros(40, rows.shape[1]).index_add(0, bags, rows)
    if feature == "item":
        expected /= torch.tensor(lengths).clamp(min=1)[:, None]
    assert model.bags(feature, ids, offsets, weights).tobytes() == expected.numpy().tobytes()
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


# the door: the table in docs/serving.md, over shapes, dtypes and edges

N = 4  # ids of each request below
IDS = [3, 0, 49, 3]
GOOD_IDS: list[Any] = [
    IDS,
    tuple(IDS),
    pa.array(IDS),
    pa.chunked_array([IDS[:1], IDS[1:]]),
    pd.Series(IDS),
    np.array([IDS, IDS]).T[:, 0],
    np.ma.masked_array(np.array(IDS), False),
    *(np.array(IDS, dtype) for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
]
BAD_IDS: list[Any] = [
    *(5, None, True, "3049", b"3049", 1.5, np.int64(5), pa.scalar(5), {"a": 1}, object(), np.array(5), np.array([IDS])),
    *(
        [0.0],
        [True],
        ["3"],
        [b"3"],
        [None],
        [[3]],
        [1j],
        [50],
        [-1],
        [2**63],
        [2**64],
        [-(2**63)],
        [object()],
        [1, "a"],
    ),
    *(np.array(IDS, dtype) for dtype in ("f2", "f4", "f8", "?", "c8", "M8[s]", "m8[s]", "S3", "U3", ">i8")),
    np.ma.masked_equal(IDS, 0),
    pa.array(["3"]).dictionary_encode(),
    pa.table({"a": IDS}),
]
GOOD_OFFSETS: list[Any] = [
    *([0, N], [0, 0, N, N], (0, 2, N), pa.array([0, 1, N]), torch.tensor([0, N]), pd.Series([0, N])),
    *(np.array([0, 3, N], dtype) for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8")),
]
BAD_OFFSETS: list[Any] = [
    *(
        None,
        N,
        "04",
        [],
        [0],
        [N],
        [0.5, N],
        [0.0, N],
        [0, 1.5, N],
        [0, None, N],
        [0, "4"],
        [False, True],
        [[0, N]],
        {0: N},
    ),
    *([1, N], [0, N + 1], [0, N - 1], [0, 3, 2, N], [0, -1, N], [0, 2**63], [0, 2**64], [0, 2**63, N], [-(2**63), N]),
    *([0, 2**63 - 1, -2, N], [0, float("nan"), N], np.empty(0, np.int64), np.array(N), np.array([0, N], "?")),
    *(np.array([0, N], dtype) for dtype in ("f4", "c8", "U1", "M8[s]", "O")),
    np.ma.masked_equal([0, 1, N], 1),
]
GOOD_WEIGHTS: list[Any] = [
    *([1.0, 0.0, -2.5, 1e-45], [1, 2, 3, 4], pa.array([0.5] * N), torch.ones(N), pd.Series([0.5] * N)),
    *(np.array([1, 0, 2, 3], dtype) for dtype in ("f2", "f4", "f8", "i1", "i8", "u8", "?", ">f4")),
]
BAD_WEIGHTS: list[Any] = [
    *(
        1.0,
        [],
        [1.0],
        [1.0] * (N + 1),
        "1111",
        ["1"] * N,
        [None] * N,
        [1.0, None, 1, 1],
        [1j] * N,
        [[1.0] * N],
    ),
    *([1, 1, 1, bad] for bad in (float("nan"), float("inf"), -float("inf"), 1e39, 2**400, 2**24 + 1)),
    *(np.ones(N, dtype) for dtype in ("c8", "U3", "M8[s]", "O")),
    np.ma.masked_equal([1, 2, 3, 4], 2),
]


def test_the_door_gives_the_rows_of_every_id_that_it_takes(model: Model) -> None:
    for feature in ("user", "item", "weighed", "kept"):
        expected = model.rows(feature, np.array(IDS)).tobytes()
        for ids in GOOD_IDS:
            assert model.rows(feature, ids).tobytes() == expected, repr(ids)
            assert model.look_up({feature: ids})[feature].tobytes() == expected, repr(ids)
        assert model.rows(feature, []).shape == (0, model.rows(feature, IDS).shape[1])


def test_the_door_pools_with_all_offsets_and_weights_that_it_takes(model: Model) -> None:
    rows = model.rows("weighed", IDS)
    for offsets in GOOD_OFFSETS:
        for weights in GOOD_WEIGHTS:
            bounds, factors = np.asarray(offsets).astype(int), np.asarray(weights).astype(np.float32)
            found = model.bags("weighed", IDS, offsets, weights)
            for bag, (start, stop) in enumerate(itertools.pairwise(bounds)):
                total = np.zeros(rows.shape[1], np.float32)
                for at in range(start, stop):
                    total += rows[at] * factors[at]
                assert found[bag].tobytes() == total.tobytes(), (offsets, weights)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_door_refuses_everything_else_with_the_name_of_the_feature(model: Model) -> None:
    requests: list[tuple[str, Any, Any, Any]] = [
        *(("weighed", ids, [0, N], [1.0] * N) for ids in BAD_IDS),
        *(("weighed", IDS, offsets, [1.0] * N) for offsets in BAD_OFFSETS),
        *(("weighed", IDS, [0, N], weights) for weights in [None, *BAD_WEIGHTS]),  # trained with weights
        *((feature, IDS, [0, N], [1.0] * N) for feature in ("user", "item")),  # trained without; a weighted mean
        *(("kept", IDS, [0, N], weights) for weights in (None, [1.0] * N)),  # trained without pooling
    ]
    for feature, ids, offsets, weights in requests:
        with pytest.raises(ValueError, match=f"feature {feature}"):
            pytest.fail(f"{(ids, offsets, weights)} gave {model.bags(feature, ids, offsets, weights)}")
    for feature, ids in itertools.product(("user", "item", "weighed", "kept"), BAD_IDS):
        for call in (model.rows, lambda feature, ids: model.look_up({feature: ids})):
            if feature in ("user", "item") and isinstance(ids, list) and ids == [50]:
                continue  # a row of these
            with pytest.raises(ValueError, match=f"feature {feature}"):
                pytest.fail(f"{ids!r} gave {call(feature, ids)}")
    assert len(requests) > 80
