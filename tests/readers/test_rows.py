"""Cutting, permuting and joining blocks of samples changes nothing in the samples."""

import numpy as np
import pytest

from prefetcher.readers.rows import Column, block_of, compact, cut, join_rows, take_rows
from protocol.batch import Batch
from tests.readers.samples import all_samples, same_batch, samples_of

NUM_FEATURES = 3


def block(num_samples: int, *, ragged: bool, weighted: bool, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    columns = []
    for feature in range(NUM_FEATURES):
        lengths = rng.integers(0, 4, num_samples) if ragged and feature != 1 else None
        num_ids = num_samples if lengths is None else int(lengths.sum())
        weights = rng.random(num_ids).astype(np.float32) if feature == 2 else None
        columns.append(Column(ids=rng.integers(0, 100, num_ids), lengths=lengths, weights=weights))
    dense = rng.random((num_samples, 2)).astype(np.float32)
    return block_of(dense, rng.integers(0, 2, num_samples).astype(np.float32), columns, weighted)


LAYOUTS = pytest.mark.parametrize(("ragged", "weighted"), [(False, False), (False, True), (True, False), (True, True)])


@LAYOUTS
def test_rows_are_taken_in_any_order(ragged: bool, weighted: bool) -> None:
    whole = block(20, ragged=ragged, weighted=weighted)
    order = np.random.default_rng(1).permutation(20)[:13]
    samples = samples_of(whole)
    assert samples_of(take_rows(whole, order)) == [samples[i] for i in order]
    assert samples_of(take_rows(whole, slice(4, 9))) == samples[4:9]


@LAYOUTS
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_cutting_keeps_every_sample_in_order(ragged: bool, weighted: bool, size: int) -> None:
    blocks = [block(n, ragged=ragged, weighted=weighted, seed=n) for n in (1, 5, 2, 9)]
    pieces = list(cut(blocks, size))
    assert all_samples(pieces) == all_samples(blocks)
    assert [piece.size for piece in pieces[:-1]] == [size] * (len(pieces) - 1)


@LAYOUTS
def test_cutting_does_not_depend_on_how_the_samples_came(ragged: bool, weighted: bool) -> None:
    whole = block(30, ragged=ragged, weighted=weighted)
    pairs = zip(cut([whole], 8), cut(cut([whole], 5), 8), strict=True)
    assert all(same_batch(compact(a), compact(b)) for a, b in pairs)


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_with_and_without_offsets_join(weighted: bool) -> None:
    blocks = [block(4, ragged=True, weighted=weighted), block(3, ragged=False, weighted=weighted)]
    assert samples_of(join_rows(blocks)) == all_samples(blocks)
    assert samples_of(join_rows(blocks[::-1])) == all_samples(blocks[::-1])


def test_offsets_that_say_one_id_a_bag_are_left_away_and_others_stay() -> None:
    single = block(4, ragged=False, weighted=True)
    spelled = Batch(
        dense=single.dense, labels=single.labels, ids=single.ids, weights=single.weights, offsets=np.arange(NUM_FEATURES * 4 + 1)
    )
    assert same_batch(compact(spelled), single)
    ragged = block(4, ragged=True, weighted=False)
    assert same_batch(compact(ragged), ragged)


def test_as_many_ids_as_bags_are_not_yet_one_a_bag() -> None:
    batch = Batch(dense=np.zeros((2, 0), np.float32), labels=np.zeros(2, np.float32), ids=np.array([1, 2]), offsets=np.array([0, 2, 2]))
    assert compact(batch).offsets is not None
