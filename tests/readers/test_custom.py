"""data.format = "package.module:factory": what a factory may return, and the sentence for what it may not."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.prefetcher.readers.formats import custom
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError, DataError
from tests.readers.factories import BROKEN, batch
from tests.support.data_files import make_job, same_batch
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
