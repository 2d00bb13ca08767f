"""Criteo as TSV and as arrays, and synthetic data: what fields, arrays and ids mean. Refusals: `test_refused.py`."""

import gzip
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.prefetcher.readers.formats.synthetic import Permutation, Zipf, streams
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError
from tests.support.data_files import all_samples, click_log, good, make_job, same_batch, table, write_day, write_tsv
from tests.support.facts import facts


def write(path: Path, lines: list[list[str]], newline: str = "\n") -> Path:
    path.write_bytes("".join("\t".join(line) + newline for line in lines).encode("latin-1"))
    return path


def only_batch(path: Path) -> Batch:
    [batch] = open_reader(make_job("criteo-tsv", path=str(path), eval_fraction=0.0)).batches("train", 0)
    return batch


def test_dense_is_the_logarithm_of_one_more_and_missing_or_negative_is_zero(tmp_path: Path) -> None:
    dense = only_batch(
        write(tmp_path / "a", [good(int_0="", int_1="-7", int_2="0", int_3="99", int_4=str(2**63 - 1))])
    ).dense[0]
    assert dense[:3].tolist() == [0, 0, 0]
    assert dense[3] == np.float32(np.log(100.0))
    assert dense[4] == np.float32(63 * np.log(2.0))


def test_ids_are_unsigned_hashes_modulo_the_table_and_missing_is_zero(tmp_path: Path) -> None:
    ids = only_batch(write(tmp_path / "a", [good(cat_3="FFFFFFFF", cat_0="", cat_25="80000aFb")])).ids
    assert ids.tolist() == [(2**32 - 1) % 40, 0, 0x80000AFB % 7]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_may_end_either_way_and_the_last_need_not(newline: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [good(), good(cat_0="")], newline)
    path.write_bytes(path.read_bytes().removesuffix(newline.encode()))
    assert [row.ids for row in all_samples([only_batch(path)])] == [((10,), (10,), (3,)), ((10,), (0,), (3,))]


def test_gzip_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    write_tsv(click_log(), tmp_path / "plain.tsv")
    text = (tmp_path / "plain.tsv").read_bytes()
    (tmp_path / "plain.tsv.gz").write_bytes(text)
    (tmp_path / "gzip.tsv").write_bytes(gzip.compress(text))
    paths = [str(tmp_path / name) for name in ("plain.tsv", "plain.tsv.gz", "gzip.tsv")]
    plain, *others = [all_samples(open_reader(make_job("criteo-tsv", path=path)).batches("train", 0)) for path in paths]
    assert all(other == plain for other in others)


def test_a_folder_without_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(ConfigError, match=facts("data.path", "folder", "(tsv|txt)")):
        open_reader(make_job("criteo-tsv", path=str(tmp_path)))


@pytest.mark.parametrize("columns", [{"cat_0": ""}, {"cat_0": "", "cat_3": "", "cat_25": ""}])
def test_a_column_without_any_hash_is_all_zeros(columns: dict[str, str], tmp_path: Path) -> None:
    ids = only_batch(write(tmp_path / "a", [good(**columns)] * 5)).ids.reshape(3, 5)
    for name, own, present in zip(("cat_3", "cat_0", "cat_25"), ids, (10, 10, 3), strict=True):
        assert own.tolist() == [0 if name in columns else present] * 5


# arrays


def only_day(path: Path, **data: Any) -> Batch:
    job = make_job("criteo-npy", path=str(path), eval_fraction=0.0, batch_size=100, **data)
    [batch] = open_reader(job).batches("train", 0)
    return batch


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_hashes_are_read_as_unsigned_and_taken_modulo_the_table(dtype: str, tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20, dtype=dtype)
    hashes = np.load(tmp_path / "day_0_sparse.npy")
    hashes[3, 25] = -2
    np.save(tmp_path / "day_0_sparse.npy", hashes)
    found = only_day(tmp_path, hash=True).ids.reshape(3, 20)
    assert found[2, 3] == (2 ** (32 if dtype == "int32" else 64) - 2) % 7
    assert np.array_equal(found[1], hashes[:, 0] % 40)


def test_labels_may_be_flat_and_of_any_number_type(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    np.save(tmp_path / "day_0_labels.npy", np.load(tmp_path / "day_0_labels.npy").ravel().astype(bool))
    assert set(only_day(tmp_path).labels.tolist()) == {0, 1}


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.zeros(3))
    with pytest.raises(ConfigError, match=facts("features.npy", "day_<N>_dense.npy")):
        only_day(tmp_path / "features.npy")


def test_batches_do_not_change_when_the_files_do(tmp_path: Path) -> None:
    write_day(tmp_path, "day_0", 20)
    batch = only_day(tmp_path)
    before = deepcopy(batch)
    for part in ("dense", "sparse", "labels"):
        array = np.load(tmp_path / f"day_0_{part}.npy", mmap_mode="r+")
        array[:] = 77
        array.flush()
    assert np.array_equal(batch.dense, before.dense)
    assert np.array_equal(batch.labels, before.labels)
    assert np.array_equal(batch.ids, before.ids)


CRITEO = [table(f"t{i}", size, f"cat_{i}") for i, size in enumerate(CRITEO_KAGGLE_CARDINALITIES)]


def synthetic(tables: list[dict[str, Any]] | None = None, seed: int = 5, samples: int = 20_000, **options: Any) -> Job:
    job = make_job(
        "synthetic", tables, synthetic={"samples": samples, **options}, batch_size=samples, eval_fraction=0.0
    )
    return msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, seed=seed))


def drawn(job: Job) -> Batch:
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
        assert drawn(synthetic(CRITEO, seed)).labels.mean() == pytest.approx(0.26, abs=0.02)


def test_labels_of_tables_with_one_row_keep_their_rate() -> None:
    batch = drawn(synthetic([table("t", 1, "a")]))
    assert set(batch.ids.tolist()) == {0}
    assert batch.labels.mean() == pytest.approx(0.26, abs=0.02)


def test_another_seed_is_another_data_set_and_the_same_seed_the_same() -> None:
    a, b, c = (drawn(synthetic(seed=seed)) for seed in (1, 1, 2))
    assert same_batch(a, b)
    assert not np.array_equal(a.ids, c.ids)
    assert not np.array_equal(a.dense, c.dense)


def test_a_sample_does_not_depend_on_how_many_there_are() -> None:
    short, long = (drawn(synthetic(samples=n)) for n in (100, 5000))
    assert np.array_equal(long.dense[:100], short.dense)
    assert np.array_equal(long.ids.reshape(3, -1)[:, :100], short.ids.reshape(3, -1))


def test_features_of_one_table_are_drawn_apart() -> None:
    ids = drawn(synthetic([table("t", 1000, "a", "b")])).ids.reshape(2, -1)
    top = [np.bincount(column, minlength=1000).argmax() for column in ids]
    assert top[0] != top[1]
    assert np.mean(ids[0] == ids[1]) < 0.1


def test_an_eval_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="synthetic data has no files; remove it"):
        open_reader(make_job("synthetic", eval_path="x", eval_fraction=0.0))
