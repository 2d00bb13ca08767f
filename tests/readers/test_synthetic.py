"""Synthetic data: ids follow Zipf's law over a permuted space, and labels have the rate of Criteo."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.prefetcher.readers.formats.synthetic import Permutation, Zipf, streams
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError
from tests.support.data_files import make_job, same_batch, table

CRITEO = [table(f"t{i}", size, f"cat_{i}") for i, size in enumerate(CRITEO_KAGGLE_CARDINALITIES)]


def synthetic(tables: list[dict[str, Any]] | None = None, seed: int = 5, samples: int = 20_000, **options: Any) -> Job:
    job = make_job(
        "synthetic", tables, synthetic={"samples": samples, **options}, batch_size=samples, eval_fraction=0.0
    )
    return msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, seed=seed))


def only_batch(job: Job) -> Batch:
    [batch] = open_reader(job).batches("train", 0)
    return batch


@pytest.mark.parametrize("num_ids", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_gives_every_id_once(num_ids: int) -> None:
    for key in streams(seed=num_ids, num_streams=3):
        assert sorted(Permutation(num_ids, key)(np.arange(num_ids)).tolist()) == list(range(num_ids))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 3.0])
@pytest.mark.parametrize("num_ids", [1, 2, 50, 1024, 5000, 10**6])
def test_ranks_have_zipfs_probabilities(num_ids: int, exponent: float) -> None:
    num_draws = 200_000
    ranks = Zipf(num_ids, exponent).ranks((np.arange(num_draws) + 0.5) / num_draws)
    exact = np.arange(1, num_ids + 1) ** -exponent
    exact = np.cumsum(exact / exact.sum())
    assert 0 <= ranks.min() <= ranks.max() < num_ids
    for share in (1, 2, 10, 700, 3000, 100_000):
        if share <= num_ids:
            assert np.mean(ranks < share) == pytest.approx(exact[share - 1], abs=2e-5 + 2 / num_draws)


def test_ranks_of_the_largest_table_are_drawn_without_its_memory() -> None:
    ranks = Zipf(2**48, 1.05).ranks(np.linspace(0, 1, 1000, endpoint=False))
    assert (np.diff(ranks) >= 0).all()
    assert 2**40 < ranks[-1] < 2**48


def test_the_label_rate_is_that_of_criteo() -> None:
    for seed in (1, 2):
        assert only_batch(synthetic(CRITEO, seed)).labels.mean() == pytest.approx(0.26, abs=0.02)


def test_labels_of_tables_with_one_row_keep_their_rate() -> None:
    batch = only_batch(synthetic([table("t", 1, "a")]))
    assert set(batch.ids.tolist()) == {0}
    assert batch.labels.mean() == pytest.approx(0.26, abs=0.02)


def test_another_seed_is_another_data_set_and_the_same_seed_the_same() -> None:
    a, b, c = (only_batch(synthetic(seed=seed)) for seed in (1, 1, 2))
    assert same_batch(a, b)
    assert not np.array_equal(a.ids, c.ids)
    assert not np.array_equal(a.dense, c.dense)


def test_a_sample_does_not_depend_on_how_many_there_are() -> None:
    short, long = (only_batch(synthetic(samples=n)) for n in (100, 5000))
    assert np.array_equal(long.dense[:100], short.dense)
    assert np.array_equal(long.ids.reshape(3, -1)[:, :100], short.ids.reshape(3, -1))


def test_features_of_one_table_are_drawn_apart() -> None:
    ids = only_batch(synthetic([table("t", 1000, "a", "b")])).ids.reshape(2, -1)
    top = [np.bincount(column, minlength=1000).argmax() for column in ids]
    assert top[0] != top[1]
    assert np.mean(ids[0] == ids[1]) < 0.1


def test_an_eval_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="synthetic data has no files; remove it"):
        open_reader(make_job("synthetic", eval_path="x", eval_fraction=0.0))
