"""Joining the rows of several files changes nothing in the samples."""

import numpy as np
import pytest

from rowcast.prefetcher.readers.columns import (
    Column,
    Ids,
    as_slice,
    join_columns,
    join_dense,
    join_ids,
    needed_offsets,
    rows_by_file,
    take_samples,
)
from rowcast.protocol.batch import Batch, Lookups, Samples
from tests.support.data_files import Row, all_samples, samples_of

NUM_FEATURES = 3
LAYOUTS = pytest.mark.parametrize(("ragged", "weighted"), [(False, False), (False, True), (True, False), (True, True)])


def ids_of(num_samples: int, *, ragged: bool, weighted: bool, seed: int = 0) -> Lookups:
    rng = np.random.default_rng(seed)
    columns = []
    for feature in range(NUM_FEATURES):
        lengths = rng.integers(0, 4, num_samples) if ragged and feature != 1 else None
        num_ids = num_samples if lengths is None else int(lengths.sum())
        weights = rng.random(num_ids).astype(np.float32) if feature == 2 else None
        columns.append(Column(ids=rng.integers(0, 100, num_ids), lengths=lengths, weights=weights))
    return join_columns(columns, num_samples, weighted)


def rest_of(num_samples: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(
        dense=rng.random((num_samples, 2)).astype(np.float32), labels=rng.integers(0, 2, num_samples).astype(np.float32)
    )


def rows_of(ids: Lookups, rest: Samples | None = None) -> list[Row]:
    return samples_of(Batch.of(ids, rest or rest_of(ids.size)))


@LAYOUTS
def test_samples_are_taken_in_any_order(ragged: bool, weighted: bool) -> None:
    whole = ids_of(20, ragged=ragged, weighted=weighted)
    order = np.random.default_rng(1).permutation(20)[:13]
    taken = rows_of(take_samples(whole, order))
    expected = rows_of(whole)
    assert [(row.ids, row.weights) for row in taken] == [(expected[i].ids, expected[i].weights) for i in order]


@LAYOUTS
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_batch_over_several_files_has_its_samples_in_order(ragged: bool, weighted: bool, shuffled: bool) -> None:
    sizes = (1, 5, 2, 9)
    ids = [ids_of(size, ragged=ragged and size != 2, weighted=weighted, seed=size) for size in sizes]
    rest = [rest_of(size, seed=size) for size in sizes]
    samples = all_samples(Batch.of(a, b) for a, b in zip(ids, rest, strict=True))
    rows = np.random.default_rng(2).permutation(17)[:12] if shuffled else np.arange(3, 12)
    files = rows_by_file(np.array([0, 1, 6, 8, 17]), rows)
    own = [whole_file.rows for whole_file in files]
    joined_ids = join_ids(files, [take_samples(ids[file.file], taken) for file, taken in zip(files, own, strict=True)])
    joined_rest = join_dense(
        files,
        [taken_dense(rest[file.file], taken) for file, taken in zip(files, own, strict=True)],
        [{} for _ in files],
    )
    assert rows_of(joined_ids, joined_rest) == [samples[row] for row in rows]


def taken_dense(rest: Samples, rows: Ids) -> Samples:
    return Samples(dense=rest.dense[rows], labels=rest.labels[rows])


def test_rows_are_looked_for_in_the_files_that_hold_them() -> None:
    found = rows_by_file(np.array([0, 3, 3, 7]), np.array([6, 0, 3, 2]))
    assert [(file.file, file.positions.tolist(), file.rows.tolist()) for file in found] == [
        (0, [1, 3], [0, 2]),
        (2, [0, 2], [3, 0]),
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([4], slice(4, 5)), ([4, 5, 6], slice(4, 7)), ([4, 6, 5], None), ([4, 6], None), ([4, 6, 5, 7], None)],
)
def test_a_run_of_rows_is_a_slice(rows: list[int], expected: slice | None) -> None:
    found = as_slice(np.array(rows))
    assert found == expected if expected is not None else isinstance(found, np.ndarray)


def test_offsets_that_say_one_id_a_bag_are_left_away_and_others_stay() -> None:
    assert needed_offsets(np.arange(12), np.arange(13)) is None
    assert needed_offsets(np.arange(12), None) is None
    ragged = ids_of(4, ragged=True, weighted=False)
    assert ragged.offsets is not None
    assert needed_offsets(ragged.ids, ragged.offsets) is ragged.offsets


def test_as_many_ids_as_bags_are_not_yet_one_a_bag() -> None:
    assert needed_offsets(np.array([1, 2]), np.array([0, 2, 2])) is not None


def test_bags_of_one_id_each_need_no_offsets_after_samples_were_taken() -> None:
    ragged = join_columns([Column(ids=np.arange(4), lengths=np.array([2, 1, 1]))], 3, weighted=False)
    assert ragged.offsets is not None
    assert take_samples(ragged, np.array([2, 1])).offsets is None
