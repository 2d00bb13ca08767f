"""data.format = "package.module:factory": what a factory may return, and the sentence for what it may not."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.formats import custom
from rowcast.prefetcher.readers.formats.custom import BatchCheck, CustomReader
from rowcast.prefetcher.readers.formats.user_arrays import as_batch
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError, DataError
from tests.readers.factories import BROKEN, batch
from tests.support import jobs
from tests.support.data_files import make_job, same_batch, table
from tests.support.facts import facts


def open_factory(
    name: str, epochs: int = 1, on_invalid_id: str = "error", columns: Any = None, **options: Any
) -> Reader:
    format_name = f"tests.readers.factories:{name}"
    return open_reader(
        make_job(format_name, epochs=epochs, on_invalid_id=on_invalid_id, columns=columns or {}, options=options)
    )


def first_ids(batches: Any) -> list[int]:
    return [int(batch.ids[0]) for batch in batches]


def test_a_function_is_called_for_each_split_and_epoch() -> None:
    reader = open_factory("function")
    assert first_ids(reader.batches("train", 0)) == [0, 1, 2]
    assert first_ids(reader.batches("train", 1)) == [0, 1, 2]
    assert first_ids(reader.batches("eval", 0)) == [3]


@pytest.mark.parametrize("name", ["function", "iterable", "iterator"])
@pytest.mark.parametrize("start", [0, 1, 3, 9])
def test_reading_goes_on_at_any_batch(name: str, start: int) -> None:
    assert first_ids(open_factory(name).batches("train", 0, start)) == [0, 1, 2][start:]


def test_an_iterable_is_gone_through_each_epoch_and_has_no_evaluation() -> None:
    reader = open_factory("iterable", epochs=2)
    assert [first_ids(reader.batches("train", epoch)) for epoch in (0, 1)] == [[0, 1, 2]] * 2
    assert list(reader.batches("eval", 0)) == []


def test_an_iterator_cannot_be_gone_through_twice() -> None:
    with pytest.raises(ConfigError, match=facts("iterator", "data.epochs = 2")):
        open_factory("iterator", epochs=2)


def test_options_reach_the_factory_and_dense_features_are_counted() -> None:
    reader = open_factory("function", num_batches=5)
    assert (len(reader.dense_names), reader.num_samples("train"), reader.paths) == (4, None, [])
    assert len(list(reader.batches("train", 0))) == 5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "cannot import it (module 'tests.readers.factories' has no attribute 'missing')"),
        ("not_callable", "is not callable; name a function"),
        ("number", "the factory returned int; return an object with batches, a function or an iterable"),
        ("changed", "the factory cannot be called with (job, **data.options): missing a required argument: 'case'"),
    ],
)
def test_a_factory_that_cannot_be_used_is_named(name: str, sentence: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"data.format = 'tests.readers.factories:{name}'") + ".*" + re.escape(sentence)
    ):
        open_factory(name)


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ConfigError, match=facts("data.format = 'no_such_module:f'", "No module named 'no_such_module'")
    ):
        open_reader(make_job("no_such_module:f"))


def test_a_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_clicks.py").write_text("from tests.readers.factories import iterable as clicks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert len(open_reader(make_job("my_clicks:clicks")).dense_names) == 4


def test_a_factory_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match=facts("tests.readers.factories:nothing", "batch")):
        open_factory("nothing")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_batch_is_named(case: str) -> None:
    batches = open_factory("changed", case=case).batches("train", 0)
    assert same_batch(next(batches), batch())
    where = r"tests\.readers\.factories:changed, train batch 1 of epoch 0"
    with pytest.raises(DataError, match=where + ".*" + re.escape(BROKEN[case][1])):
        next(batches)


def test_missing_weights_are_named() -> None:
    with pytest.raises(DataError, match=facts("weights", "data.columns.weights", "f32[N]")):
        open_factory("iterable", columns={"weights": {"cat_0": "unused"}})


def test_arrays_are_made_contiguous_and_needless_offsets_left_away() -> None:
    dense = np.ones((4, 2), np.float32).T
    offered = batch(dense=dense, ids=np.arange(12)[::2] % 7, offsets=np.arange(7), inputs={"time": np.arange(2)})
    reader = custom.CustomReader(make_job("tests.readers.factories:iterable"), [offered])
    [found] = reader.batches("train", 0)
    assert found.dense.flags.c_contiguous
    assert found.ids.flags.c_contiguous
    assert found.offsets is None
    assert found.inputs["time"].tolist() == [0, 1]
    assert isinstance(found, Batch)


FEATURES = ["cat_3", "cat_0", "cat_25"]  # of `make_job`
IDS = np.array([[1, 2, 3], [4, 5, 6]])  # [B, F]
DENSE, LABELS = np.ones((2, 4), np.float32), np.array([0, 1], np.float32)
EXPECTED = Batch(dense=DENSE, labels=LABELS, ids=IDS.T.reshape(-1))


def keyed(lengths: bool = True, weights: Any = None, **changed: Any) -> SimpleNamespace:
    """As a KeyedJaggedTensor, with a feature that no table has, in an order of its own."""
    content = {
        "keys": ["cat_25", "other", "cat_0", "cat_3"],
        "values": torch.tensor([3, 6, 9, 9, 2, 5, 1, 4]),
    } | changed
    face = {name: partial(lambda value: value, value) for name, value in content.items()}
    own = {"lengths": lambda: torch.ones(8, dtype=torch.int32)} if lengths else {"offsets": lambda: torch.arange(9)}
    return SimpleNamespace(**face, **own, weights_or_none=lambda: weights)


SHAPES: dict[str, Any] = {
    "a tuple of arrays": (DENSE, IDS, LABELS),
    "a tuple of tensors": (torch.from_numpy(DENSE).double(), torch.from_numpy(IDS), torch.tensor([0, 1])),
    "a list with lists": [DENSE.tolist(), [[1, 4], [2, 5], [3, 6]], [False, True]],
    "lists of bags": (DENSE, [[[1], [4]], [[2], [5]], [[3], [6]]], LABELS),
    "ids and offsets": (DENSE, {name: (IDS[:, f], np.arange(2)) for f, name in enumerate(FEATURES)}, LABELS),
    "ids and offsets with the last": (
        DENSE,
        [(torch.from_numpy(IDS[:, f]), torch.arange(3, dtype=torch.int32)) for f in range(3)],
        LABELS,
    ),
    "columns by name": {
        "dense": DENSE,
        "sparse": {"cat_0": IDS[:, 1], "cat_25": IDS[:, 2:], "cat_3": IDS[:, 0], "x": None},
        "label": LABELS,
    },
    "an object": SimpleNamespace(dense_features=DENSE, sparse_features=keyed(), labels=LABELS),
    "offsets": {"dense_features": DENSE, "sparse_features": keyed(lengths=False), "labels": LABELS},
    "a batch": EXPECTED,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_the_same_batch(shape: str) -> None:
    assert same_batch(as_batch(SHAPES[shape], FEATURES, "here", (), frozenset()), EXPECTED)


def test_bags_of_several_ids_and_of_none() -> None:
    found = as_batch(
        (None, [[[1, 2], []], [[3], [4]], np.array([[5, 6], [0, 1]])], LABELS), FEATURES, "here", (), frozenset()
    )
    assert found.dense.shape == (2, 0)
    assert found.offsets is not None
    assert (found.ids.tolist(), found.offsets.tolist()) == ([1, 2, 3, 4, 5, 6, 0, 1], [0, 2, 2, 3, 4, 6, 8])


@pytest.mark.parametrize("offsets", [[0, 0, 2], [0, 0, 2, 3]])
def test_offsets_of_an_embedding_bag_are_where_bags_start(offsets: list[int]) -> None:
    sparse = {"one": (torch.tensor([7, 8, 9]), torch.tensor(offsets))}
    found = as_batch((None, sparse, np.zeros(3, np.float32)), ["one"], "here", (), frozenset())
    assert found.offsets is not None
    assert (found.ids.tolist(), found.offsets.tolist()) == ([7, 8, 9], [0, 0, 2, 3])


@pytest.mark.parametrize(
    ("bags", "sentence"),
    [
        (
            (IDS[:, 0], IDS[:, 1], IDS[:, 2]),
            "is a tuple of 3 arrays; give (ids [N], offsets [2]) as to nn.EmbeddingBag",
        ),
        ((IDS[:, 0], [0]), "has ids [2] and offsets [1]; give (ids [N], offsets [2])"),
        ((IDS, [0, 1]), "has ids [2, 3] and offsets [2]; give (ids [N], offsets [2])"),
        ((IDS[:, 0], [0, 1, 2, 3]), "has ids [2] and offsets [4]; give (ids [N], offsets [2])"),
        ((IDS[:, 0], [1, 2]), "rising from 0, and an offset [2] the number of ids, 2; they are from 1 to 2"),
        ((IDS[:, 0], [0, 3]), "they are from 0 to 3"),
        ((IDS[:, 0], [0, -1]), "they are from -1 to 2"),
        ((IDS[:, 0], [0, 1, 1]), "they are from 0 to 1"),
        ((IDS[:, 0], [0, 3, 2]), "they are from 0 to 3"),
        ((IDS[:, 0], [0.0, 1.0]), "offsets of type list cannot be read as an array"),
        ([IDS[:, 0], IDS[:, 0], IDS[:, 0]], "has 3 bags for 2 samples; give ids and offsets as a tuple"),
    ],
)
def test_ids_and_offsets_that_do_not_fit_are_told_what_to_be(bags: Any, sentence: str) -> None:
    with pytest.raises(DataError, match="^here: sparse, feature one.*" + re.escape(sentence)):
        as_batch((DENSE, {"one": bags}, LABELS), ["one"], "here", (), frozenset())


def test_weights_of_a_keyed_tensor_are_taken_in_the_jobs_order() -> None:
    found = as_batch((DENSE, keyed(weights=torch.arange(8) / 2), LABELS), FEATURES, "here", (), frozenset())
    assert found.weights is not None
    assert found.weights.tolist() == [3.0, 3.5, 2.0, 2.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("offered", "sentence"),
    [
        ((DENSE, IDS), "is tuple; yield rowcast.protocol.batch.Batch, or dense features, sparse features and labels"),
        ({"dense": DENSE, "labels": LABELS}, "is dict; yield rowcast.protocol.batch.Batch"),
        ((DENSE, IDS[:, :2], LABELS), "sparse has shape [2, 2]; give one id per sample and feature: [2, 3]"),
        ((DENSE, [IDS[:, 0]], LABELS), "sparse lists 1 features, but the tables have 3: cat_3, cat_0, cat_25"),
        ((DENSE, (IDS[:, 0], [0, 1]), LABELS), "cat_25; give them by name, as a mapping from feature to bags"),
        ((DENSE, {"cat_3": IDS[:, 0]}, LABELS), "sparse has no feature cat_0, only cat_3"),
        ((DENSE, IDS / 2, LABELS), "ids must be integers, these are float64"),
        ((DENSE, [IDS[:1, 0], IDS[:, 1], IDS[:, 2]], LABELS), "feature cat_3 has 1 bags for 2 samples"),
        ((DENSE, keyed(values=torch.arange(5)), LABELS), "sparse has 5 ids in 8 bags for 4 features of 2 samples"),
        ((DENSE, keyed(keys=["cat_0"]), LABELS), "sparse has no feature cat_3, only cat_0"),
        ((object(), IDS, LABELS), "dense of object are no numbers"),
    ],
)
def test_what_is_no_batch_is_named(offered: Any, sentence: str) -> None:
    with pytest.raises(DataError, match="^here.*" + re.escape(sentence)):
        as_batch(offered, FEATURES, "here", (), frozenset())


class Shuffled:
    """Another order each time it is gone through, as a DataLoader with a generator has it."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([(DENSE, np.full((2, 3), self.passes), LABELS)] * 2)


def test_looking_at_the_first_batch_takes_no_pass_of_its_own() -> None:
    reader = CustomReader(make_job("tests.readers.factories:iterable"), Shuffled())
    assert [[int(batch.ids[0]) for batch in reader.batches("train", epoch)] for epoch in (0, 1)] == [[1, 1], [2, 2]]


def named(job: Job, rows: int) -> list[Any]:
    assert isinstance(job, Job)
    return [(DENSE, np.full((2, 3), rows), LABELS)]


def positional(anything: Any) -> list[Any]:
    assert isinstance(anything, Job)
    return [(DENSE, IDS, LABELS)]


def without_job(rows: int = 4) -> list[Any]:
    return [(DENSE, np.full((2, 3), rows), LABELS)]


@pytest.mark.parametrize(
    ("name", "options"), [("named", {"rows": 5}), ("positional", {}), ("without_job", {}), ("without_job", {"rows": 5})]
)
def test_a_factory_is_called_with_what_it_takes(name: str, options: dict[str, Any]) -> None:
    [found] = open_reader(make_job(f"tests.readers.test_user_batches:{name}", options=options)).batches("train", 0)
    expected = 1 if name == "positional" else options.get("rows", 4)
    assert int(found.ids[0]) == expected


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
