"""The torchrec layout: what its arrays mean, and the sentence for each way in which they are broken."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import make_job, table, write_day
from tests.support.facts import facts


def job_of(path: Path, **data: Any) -> Job:
    return make_job("criteo-npy", path=str(path), eval_fraction=0.0, batch_size=100, **data)


def only_batch(path: Path, **data: Any) -> Batch:
    [batch] = open_reader(job_of(path, **data)).batches("train", 0)
    return batch


def edit(folder: Path, part: str, change: Callable[[Any], Any]) -> Path:
    """A good day_0 of 20 rows, but for one array."""
    write_day(folder, "day_0", 20)
    path = folder / f"day_0_{part}.npy"
    np.save(path, change(np.load(path)))
    return path


def put(row: int, column: int, value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[row, column] = value
        return array

    return change


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_hashes_are_read_as_unsigned_and_taken_modulo_the_table(dtype: str, tmp_path: Path) -> None:
    path = edit(tmp_path, "sparse", lambda array: put(3, 25, -2)(array.astype(dtype)))
    found = only_batch(tmp_path, hash=True).ids.reshape(3, 20)
    assert found[2, 3] == (2 ** (32 if dtype == "int32" else 64) - 2) % 7
    assert np.array_equal(found[1], np.load(path)[:, 0] % 40)


def test_a_label_that_is_not_binary_is_named(tmp_path: Path) -> None:
    path = edit(tmp_path, "labels", put(7, 0, 2))
    with pytest.raises(DataError, match=facts(path, "row 7", "column label", "label 2.0")):
        only_batch(tmp_path)


def test_labels_may_be_flat_and_of_any_number_type(tmp_path: Path) -> None:
    edit(tmp_path, "labels", lambda array: array.ravel().astype(bool))
    assert set(only_batch(tmp_path).labels.tolist()) == {0, 1}


BROKEN_ARRAYS = {
    "fewer rows": ("sparse", lambda a: a[:-1], "dense, sparse and labels have 20, 19 and 20 rows"),
    "doubles": ("dense", lambda a: a.astype(np.float64), "day_0_dense.npy holds float64; it must hold float32"),
    "short integers": (
        "sparse",
        lambda a: a.astype(np.int16),
        "day_0_sparse.npy holds int16; it must hold int32 or int64",
    ),
    "flat dense": (
        "dense",
        lambda a: a.ravel(),
        "day_0_dense.npy: the array has shape (100,); it must have 2 dimensions",
    ),
    "two labels": (
        "labels",
        lambda a: np.hstack([a, a]),
        "day_0_labels.npy holds int32 (20, 2); it must hold one number per row",
    ),
    "text": ("labels", lambda a: a.astype(str), "it must hold one number per row"),
}


@pytest.mark.parametrize(("part", "change", "sentence"), BROKEN_ARRAYS.values(), ids=BROKEN_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(
    part: str, change: Callable[[Any], Any], sentence: str, tmp_path: Path
) -> None:
    edit(tmp_path, part, change)
    with pytest.raises(DataError, match=re.escape(sentence)):
        open_reader(job_of(tmp_path))


@pytest.mark.parametrize("kept", [0, 50, 1000])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    path = tmp_path / "day_0_sparse.npy"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=re.escape(f"{path}: not a whole .npy file")):
        open_reader(job_of(tmp_path))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = edit(tmp_path, "labels", lambda array: array.astype(object))
    with pytest.raises(DataError, match=facts(path, "Python objects")):
        open_reader(job_of(tmp_path))


def test_days_of_different_widths_are_refused(tmp_path: Path) -> None:
    edit(tmp_path, "dense", lambda array: array[:, :4])
    write_day(tmp_path, "day_1", 20)
    with pytest.raises(DataError, match=facts("day_1_dense.npy", 5, "day_0_dense.npy", 4)):
        open_reader(job_of(tmp_path))


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(ConfigError, match=facts("day_0_labels.npy", "dense, sparse and labels")):
        open_reader(job_of(tmp_path))


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.zeros(3))
    with pytest.raises(ConfigError, match=facts("features.npy", "day_<N>_dense.npy")):
        open_reader(job_of(tmp_path / "features.npy"))


def test_a_feature_that_the_data_has_not_is_named_with_its_table(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    with pytest.raises(ConfigError, match=facts("table t", "feature cat_26", "day_0_sparse.npy", "cat_25")):
        open_reader(make_job("criteo-npy", [table("t", 7, "cat_26")], path=str(tmp_path)))


def test_batches_do_not_change_when_the_files_do(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    batch = only_batch(tmp_path)
    before = deepcopy(batch)
    for part in ("dense", "sparse", "labels"):
        array = np.load(tmp_path / f"day_0_{part}.npy", mmap_mode="r+")
        array[:] = 77
        array.flush()
    assert np.array_equal(batch.dense, before.dense)
    assert np.array_equal(batch.labels, before.labels)
    assert np.array_equal(batch.ids, before.ids)
