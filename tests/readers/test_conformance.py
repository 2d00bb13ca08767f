"""What every reader promises, checked on all of them. A new format adds a function that writes some of it to
`tests/support/format_cases.py`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rowcast.job.formats import FORMATS
from rowcast.job.schema import Job
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.formats import parquet
from rowcast.prefetcher.readers.reader import Columns, Part, can_share, open_reader, schedule, stream_columns
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource, decode_share
from rowcast.protocol.batch import Batch, Kind, Scheduled, ScheduledBatch
from rowcast.protocol.parts import UNDIVIDED
from rowcast.runtime.checkpoint_manifest import Position
from tests.readers.polling import rest_of
from tests.support.data_files import (
    BATCH_SIZE,
    NUM_ROWS,
    NUM_TRAIN,
    all_samples,
    long_job,
    make_job,
    same_batch,
    with_workers,
)
from tests.support.format_cases import CASES, Case, arrow, bags, custom, lines, named, npy, synthetic, tsv, tsv_gz
from tests.support.inline_source import InlineSource
from tests.support.one_frame import TABLES, WAYS, written

ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SHUFFLED = pytest.mark.parametrize(
    ("case", "shuffle"),
    [
        (case, f"window:{window}")
        for case in (tsv, tsv_gz, npy, bags, arrow, named, lines, synthetic)
        for window in (1, 10, 16, 50, 1000)
    ]
    + [(case, "full") for case in (tsv, tsv_gz, npy, arrow, named, lines, synthetic)],
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in pieces far smaller than they are, so that every boundary is crossed."""
    monkeypatch.setattr(text, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(parquet, "RECORD_BATCH_ROWS", 10)


def test_every_format_has_a_case(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in CASES}
    for folder in folders.values():
        folder.mkdir()
    assert {case(folders[name])[0].data.format for name, case in CASES.items()} >= set(FORMATS)


def batches(job: Job, split: Kind = "train", epoch: int = 0, start: int = 0) -> list[Batch]:
    return list(open_reader(job).batches(split, epoch, start))


@ALL
def test_full_batches_hold_the_samples_of_an_independent_decode_in_order(case: Case, tmp_path: Path) -> None:
    job, expected = case(tmp_path)
    reader = open_reader(job)
    train, again, held_out = (list(reader.batches(*of)) for of in (("train", 0), ("train", 1), ("eval", 0)))
    assert [batch.size for batch in train] == [BATCH_SIZE] * 10 + [3]
    assert [batch.size for batch in held_out] == [8, 8, 4]
    assert (reader.num_samples("train"), reader.num_samples("eval")) == (NUM_TRAIN, NUM_ROWS - NUM_TRAIN)
    assert all(same_batch(a, b) for a, b in zip(train, again, strict=True)), "without a shuffle epochs are alike"
    rows = all_samples([*train, *held_out])
    sizes = [table.num_embeddings for table in job.tables for _ in table.features]
    assert all(0 <= i < size for row in rows for bag, size in zip(row.ids, sizes, strict=True) for i in bag)
    assert expected is None or rows == expected


@pytest.mark.parametrize("case", [tsv, tsv_gz, npy, bags, arrow, named, lines, synthetic])
def test_without_eval_fraction_all_is_for_training(case: Case, tmp_path: Path) -> None:
    job, _ = case(tmp_path, eval_fraction=0.0)
    assert sum(batch.size for batch in batches(job)) == NUM_ROWS
    assert batches(job, "eval") == []


@ALL
def test_arrays_have_the_shapes_and_types_of_the_agreement(case: Case, tmp_path: Path) -> None:
    job, _ = case(tmp_path)
    reader = open_reader(job)
    for batch in [*reader.batches("train", 0), *reader.batches("eval", 0)]:
        num_bags = len(job.features) * batch.size
        assert batch.dense.shape == (batch.size, len(reader.dense_names))
        assert [batch.dense.dtype, batch.labels.dtype, batch.ids.dtype] == [np.float32, np.float32, np.int64]
        assert all(
            type(array) is np.ndarray and array.flags.c_contiguous for array in (batch.dense, batch.labels, batch.ids)
        )
        assert batch.offsets is not None or len(batch.ids) == num_bags
        if batch.offsets is not None:
            assert batch.offsets.dtype == np.int64
            assert (len(batch.offsets), batch.offsets[0], batch.offsets[-1]) == (num_bags + 1, 0, len(batch.ids))
            assert (np.diff(batch.offsets) != 1).any(), "offsets of single ids are left away"
        assert (batch.weights is not None) == bool(job.data.columns.weights)
        assert batch.weights is None or (batch.weights.dtype == np.float32 and batch.weights.shape == batch.ids.shape)


@ALL
def test_reading_goes_on_bit_for_bit_at_every_batch(case: Case, tmp_path: Path) -> None:
    job, _ = case(tmp_path)
    for split in ("train", "eval"):
        assert_goes_on(job, split)


@SHUFFLED
def test_shuffled_reading_goes_on_bit_for_bit_at_every_batch(case: Case, shuffle: str, tmp_path: Path) -> None:
    job, _ = case(tmp_path, shuffle=shuffle)
    assert_goes_on(job, "train", epoch=2)


def assert_goes_on(job: Job, split: Kind, epoch: int = 0) -> None:
    whole = batches(job, split, epoch)
    reader = open_reader(job)
    for start in range(len(whole) + 2):
        rest = list(reader.batches(split, epoch, start))
        assert len(rest) == max(len(whole) - start, 0)
        assert all(same_batch(a, b) for a, b in zip(rest, whole[start:], strict=True))


@SHUFFLED
def test_a_shuffle_permutes_each_block_by_philox_of_seed_epoch_and_block(
    case: Case, shuffle: str, tmp_path: Path
) -> None:
    job, _ = case(tmp_path)
    shuffled_job, _ = case(tmp_path, shuffle=shuffle)
    window = NUM_TRAIN if shuffle == "full" else int(shuffle.partition(":")[2])
    rows = all_samples(batches(job))
    for epoch in (0, 3):
        expected = []
        for block in range(-(-NUM_TRAIN // window)):
            part = rows[block * window : (block + 1) * window]
            key = np.array([job.job.seed, epoch * 2**32 + block], dtype=np.uint64)
            expected += [part[i] for i in np.random.Generator(np.random.Philox(key=key)).permutation(len(part))]
        assert all_samples(batches(shuffled_job, epoch=epoch)) == expected
    assert all_samples(batches(shuffled_job, "eval", epoch=1)) == all_samples(batches(job, "eval"))


def orders(job: Job) -> list[str]:
    return ["none", "window:20"] if can_share(job) else ["none"]  # a data set of one's own has its own order


def middles(whole: list[ScheduledBatch]) -> list[Position | None]:
    """The beginning of a run, the middle of an epoch, and that of an evaluation."""
    positions = [batch.position for batch in whole]
    in_epoch = next(at for at in positions if at.epoch == 1 and at.train_batch == 5 and at.eval_batch is None)
    in_evaluation = next(at for at in positions if at.epoch == 0 and at.train_batch == 8 and at.eval_batch == 1)
    return [None, in_epoch, in_evaluation]


@ALL
@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_readers_that_share_the_batches_give_those_of_one(case: Case, num_readers: int, tmp_path: Path) -> None:
    for shuffle in orders(case(tmp_path)[0]):
        job = long_job(case(tmp_path, shuffle=shuffle)[0])
        whole = list(schedule(job, open_reader(job)))
        start = middles(whole)[num_readers - 1]
        expected = whole[start.step if start else 0 :]
        for columns in stream_columns(job):
            found = shared(job, columns, start, num_readers)
            assert [own.position for own in found] == [batch.position for batch in expected]
            assert [own.following for own in found] == [batch.following for batch in expected]
            for own, batch in zip(found, expected, strict=True):
                assert own.kind == batch.kind
                assert same_batch(own.batch, part_of(batch.batch, columns))


def shared(job: Job, columns: Columns, start: Position | None, num_readers: int) -> list[Scheduled[Part]]:
    """What each of several readers decodes of its share, in the order of the steps."""
    found: list[Scheduled[Part]] = []
    for index in range(num_readers):
        share = DecoderShare(
            job=job, columns=columns, max_steps=None, start=start, index=index, num_decoders=num_readers
        )
        found += decode_share(share, open_reader(job, columns))
    return sorted(found, key=lambda own: own.step)


def part_of(batch: Batch, columns: Columns) -> Part:
    parts: dict[Columns, Part] = {"all": batch, "ids": batch.lookups, "dense": batch.samples}
    return parts[columns]


@pytest.mark.parametrize("case", [bags, custom])  # the others in one process: the test before
def test_any_number_of_workers_gives_the_batches_of_the_source_without(case: Case, tmp_path: Path) -> None:
    shuffle = orders(case(tmp_path)[0])[-1]
    job = long_job(case(tmp_path, shuffle=shuffle)[0])
    whole = rest_of(InlineSource(job))
    assert len(whole) == 2 * 11 + 7 * 3
    for num_workers, start, source in workers_at(job, middles(whole)):
        found = rest_of(source)
        expected = whole[start.step if start else 0 :]
        assert [(b.step, b.kind, b.train_step, b.epoch, b.position, b.following) for b in found] == [
            (b.step, b.kind, b.train_step, b.epoch, b.position, b.following) for b in expected
        ]
        assert all(same_batch(a.batch, b.batch) for a, b in zip(found, expected, strict=True)), f"{num_workers} workers"
        assert source.counters.batches == len(expected)


def workers_at(job: Job, starts: list[Position | None]) -> Iterator[tuple[int, Position | None, WorkerSource]]:
    """One, two and three workers, each of them from one of `starts`; all at once, because starting takes longest."""
    with ExitStack() as stack:
        sources = [WorkerSource(with_workers(job, 1 + i), start=start) for i, start in enumerate(starts)]
        for source in sources:
            stack.callback(source.close)
            source.start()
        for i, source in enumerate(sources):
            yield 1 + i, starts[i], source


@pytest.mark.parametrize("case", [tsv, npy, bags, arrow, named, lines])
def test_eval_path_is_evaluated_whole_and_leaves_all_of_path_for_training(case: Case, tmp_path: Path) -> None:
    (tmp_path / "held_out").mkdir()
    held_out, expected = case(tmp_path / "held_out")
    job, rows = case(tmp_path, eval_path=held_out.data.path, eval_fraction=0.0)
    assert all_samples(batches(job)) == rows
    assert all_samples(batches(job, "eval")) == expected


@pytest.mark.parametrize("case", [tsv, tsv_gz, npy, bags, arrow, named, lines])
def test_the_paths_are_those_of_the_files_read(case: Case, tmp_path: Path) -> None:
    job, _ = case(tmp_path)
    assert sorted(open_reader(job).paths) == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("shuffle", ["none", "window:150", "full"])
def test_every_format_gives_the_same_batches(shuffle: str, tmp_path: Path) -> None:
    expected: list[Part] = []
    for way in WAYS:
        if (way, shuffle) == ("parquet", "full"):  # it reads row groups, and refuses this order
            continue
        data = written(way, tmp_path)
        job = make_job(data.pop("format"), TABLES, shuffle=shuffle, eval_fraction=0.1, batch_size=64, **data)
        found = of_both_splits(job)
        expected = expected or found
        assert all(same_batch(own, other) for own, other in zip(found, expected, strict=True)), way


def of_both_splits(job: Job) -> list[Part]:
    splits: list[tuple[Kind, int]] = [("train", 0), ("train", 1), ("eval", 0)]
    return [
        decode(UNDIVIDED)
        for part in stream_columns(job)
        for split, epoch in splits
        for decode in open_reader(job, part).pending(split, epoch)
    ]
