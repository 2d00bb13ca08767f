"""An order of hot blocks: every sample once, hot ones and others in turns, whatever part of it is asked for."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.hot_samples import HotBlocks, HotSamples, hot_samples
from rowcast.prefetcher.readers.pin_files import save_pins
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.prefetcher.readers.schedule import RowOrder, expected_train_steps, schedule
from rowcast.protocol.batch import Lookups, Samples
from rowcast.runtime.arrays import I64, Bools
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import make_job, table, write_day
from tests.support.facts import facts

NUM_ROWS = 103


def blocks_of(order: I64, are_hot: Bools, num_blocks: int) -> list[int]:
    """The rule, word by word."""
    kinds = [[row for row in order.tolist() if are_hot[row] == hot] for hot in (True, False)]
    return [
        row
        for block in range(num_blocks)
        for rows in kinds
        for row in rows[len(rows) * block // num_blocks : len(rows) * (block + 1) // num_blocks]
    ]


@pytest.mark.parametrize("window", [None, 0, 1, 16, 40, 1000])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [1, 3, 250])
def test_hot_samples_and_others_take_turns_in_the_order_that_they_have(
    window: int | None, share: float, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowcast.prefetcher.readers.schedule.UNSHUFFLED_ROWS", 24)
    are_hot = np.random.default_rng(1).random(NUM_ROWS) < share
    hot = HotSamples(num_rows=NUM_ROWS, bits=np.packbits(are_hot))
    base = RowOrder(seed=3, epoch=1, num_rows=NUM_ROWS, window=window)
    expected = blocks_of(base.rows(0, NUM_ROWS), are_hot, num_blocks)
    assert sorted(expected) == list(range(NUM_ROWS))
    for start, stop in ((0, NUM_ROWS), (0, 1), (7, 8), (50, 90), (20, 21), (102, 103), (33, 64)):
        found = HotBlocks(base, hot, num_blocks).rows(start, stop)
        assert found.tolist() == expected[start:stop]
    order = HotBlocks(base, hot, num_blocks)  # and batch by batch, backwards too
    cuts = list(range(0, NUM_ROWS, 10))
    for start in [*cuts, *reversed(cuts)]:
        assert order.rows(start, min(start + 10, NUM_ROWS)).tolist() == expected[start : start + 10]


def job_of(folder: Path, **data: Any) -> Job:
    """A day of 103 rows, of which 83 are for training; rows 0 to 5 of each table are hot."""
    if not (folder / "day_0_dense.npy").exists():
        write_day(folder, "day_0", NUM_ROWS)
        save_hot(folder, 6)
    settings = {"path": str(folder), "shuffle": "window:30", "order": "hot-blocks:2", "hot": str(folder / "hot")}
    job = make_job("criteo-npy", **settings | data)
    return msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, run_dir=str(folder / "run")))


def save_hot(folder: Path, count: int) -> None:
    save_pins(folder / "hot", {"late": np.arange(count), "last": np.arange(count)}, {})


def reader_of(job: Job) -> RowReader:
    reader = open_reader(job)
    assert isinstance(reader, RowReader)
    return reader


def are_hot(ids: I64) -> Bools:
    return np.asarray((ids.reshape(3, -1) < 6).all(axis=0))


def test_a_sample_of_lists_is_hot_if_all_of_its_ids_are(tmp_path: Path) -> None:
    bags = [[own % 9 for own in range(row, row + row % 3)] for row in range(50)]
    lines = ["label,int_0,cat_0", *(f"1,0.5,{'|'.join(map(str, bag))}" for bag in bags)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    save_pins(tmp_path / "hot", {"t": np.arange(6)}, {})
    settings = {"order": "hot-blocks:1", "hot": str(tmp_path / "hot"), "columns": {"lists": {"cat_0": "|"}}}
    job = make_job("csv", [table("t", 9, "cat_0")], path=str(tmp_path / "a.csv"), eval_fraction=0.0, **settings)
    hot = reader_of(job).hot_samples.are_hot(0, 50)
    assert hot.tolist() == [all(own < 6 for own in bag) for bag in bags]
    assert 0 < hot.sum() < 50


def test_a_sample_is_hot_if_all_of_its_ids_are(tmp_path: Path) -> None:
    reader = reader_of(job_of(tmp_path, order="hot-blocks:1"))
    kinds = np.concatenate([are_hot(batch.ids) for batch in reader.batches("train", 0)])
    hot = reader.hot_samples
    assert (len(kinds), hot.num_hot) == (83, 59)
    assert kinds.tolist() == [True] * 59 + [False] * 24, "one block of each kind"
    one_table = reader_of(job_of(tmp_path, hot=save_one_table(tmp_path)))
    assert one_table.hot_samples.num_hot == 0, "no row of the other table is hot"


def save_one_table(folder: Path) -> str:
    save_pins(folder / "one", {"late": np.arange(40)}, {})
    return str(folder / "one")


def test_the_order_is_that_of_any_place_column_and_reader(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=2)
    whole = [batch for epoch in (0, 1) for batch in open_reader(job).batches("train", epoch)]
    assert [batch.size for batch in whole] == 2 * [*10 * [8], 3]
    assert not np.array_equal(whole[0].ids, whole[11].ids), "epochs differ"
    for start in range(12):
        rest = list(open_reader(job).batches("train", 0, start))
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(rest, whole[start:11], strict=True))
    parts = [[decode() for decode in open_reader(job, part).pending("train", 0)] for part in ("ids", "dense")]
    for batch, ids, dense in zip(whole[:11], *parts, strict=True):
        assert isinstance(ids, Lookups)
        assert isinstance(dense, Samples)
        assert np.array_equal(batch.ids, ids.ids)
        assert np.array_equal(batch.dense, dense.dense)
    assert expected_train_steps(job, open_reader(job)) == 22


def test_evaluation_is_left_as_it_is(tmp_path: Path) -> None:
    plain = job_of(tmp_path, order=None, hot=None)
    evaluations = [
        [own.batch.ids.tolist() for own in schedule(job, open_reader(job)) if own.kind == "eval"]
        for job in (job_of(tmp_path), plain)
    ]
    assert evaluations[0] == evaluations[1] != []


def test_what_is_hot_is_kept_in_the_run_directory_and_made_again_from_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, kept = job_of(tmp_path), tmp_path / "run" / "order" / "hot-samples"
    made = hot_samples(job, 83)
    assert not kept.exists(), "without a run directory nothing is kept"
    job.run_dir.mkdir()
    assert hot_samples(job, 83).bits.tobytes() == made.bits.tobytes()
    content = kept.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("rowcast.prefetcher.readers.hot_samples.passes", None)
        assert hot_samples(job, 83).bits.tobytes() == made.bits.tobytes(), "without a pass"
    for damaged in (content[:-1] + bytes([content[-1] ^ 16]), content[:-1], b""):
        kept.write_bytes(damaged)
        assert hot_samples(job, 83).bits.tobytes() == made.bits.tobytes()
        assert kept.read_bytes() == content
    save_hot(tmp_path, 4)
    assert hot_samples(job, 83).num_hot < made.num_hot
    save_hot(tmp_path, 6)
    write_day(tmp_path, "day_0", NUM_ROWS, seed=9)
    assert hot_samples(job, 83).bits.tobytes() != made.bits.tobytes(), "of the new data"


def test_synthetic_samples_have_hot_blocks_too(tmp_path: Path) -> None:
    save_pins(tmp_path / "hot", {"late": np.arange(30), "last": np.arange(7)}, {})
    order: dict[str, Any] = {"order": "hot-blocks:4", "hot": str(tmp_path / "hot"), "shuffle": "full"}
    reader = reader_of(make_job("synthetic", synthetic={"samples": 500}, **order))
    assert 0 < reader.hot_samples.num_hot < 400
    assert sum(batch.size for batch in reader.batches("train", 0)) == 400


def test_a_file_of_hot_rows_that_does_not_fit_is_refused_by_its_key(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "hot").unlink()
    with pytest.raises(ConfigError, match=facts("data.hot", "cannot be read", "rowcast profile")):
        list(open_reader(job).batches("train", 0))
    save_pins(tmp_path / "hot", {"other": np.arange(3)}, {})
    with pytest.raises(ConfigError, match=facts("data.hot", "table other")):
        list(open_reader(job).batches("train", 0))
    save_pins(tmp_path / "hot", {"last": np.array([7])}, {})
    with pytest.raises(ConfigError, match=facts("data.hot", "row 7", "table last")):
        list(open_reader(job).batches("train", 0))
    (tmp_path / "hot").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"data\.hot = '.*': not a whole pin file"):
        list(open_reader(job).batches("train", 0))
