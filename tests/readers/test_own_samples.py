"""A rank's samples of each batch: read alone or cut from the whole batch, they are the same to the bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from rowcast.job.schema import Job
from rowcast.prefetcher.pipeline.key_exchange import differ
from rowcast.prefetcher.readers import row_reader
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.prefetcher.readers.formats import parquet
from rowcast.prefetcher.readers.reader import open_reader, stream_columns
from rowcast.prefetcher.readers.source import RankSource
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource, decode_share
from rowcast.protocol.batch import Batch, Lookups, ScheduledBatch
from rowcast.protocol.parts import Belonging, Rank, belonging, own_parts, parts_of
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import DataError
from tests.readers.polling import next_dense, next_ids, polled_ahead, rest_of
from tests.support import jobs
from tests.support.array_models import array_job
from tests.support.data_files import long_job, make_job, same_array, same_batch, with_workers, write_day
from tests.support.format_cases import CASES
from tests.support.inline_source import InlineSource

ROWS = 60
Make = Callable[[Path], Job]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(parquet, "RECORD_BATCH_ROWS", 10)


def case(name: str, **data: Any) -> Make:
    return lambda folder: CASES[name](folder, **data)[0]


def held_out(name: str) -> Make:
    def make(folder: Path) -> Job:
        (folder / "held_out").mkdir()
        path = CASES[name](folder / "held_out")[0].data.path
        return CASES[name](folder, eval_path=path, eval_fraction=0.0)[0]

    return make


def sequences(folder: Path, *negatives: dict[str, Any]) -> Job:
    """Histories with times and weights beside a pooled user, arrays of each kind, and drawn features."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4, ROWS)
    columns = {
        "history": pa.array([rng.integers(0, 50, n).tolist() for n in lengths], pa.list_(pa.int64())),
        "time": pa.array([rng.integers(0, 2**60, n).tolist() for n in lengths], pa.list_(pa.int64())),
        "positive": pa.array([rng.integers(0, 50, n).tolist() for n in lengths[::-1]], pa.list_(pa.int64())),
        "user": pa.array(rng.integers(0, 50, ROWS)),
        "age": pa.array(rng.random(ROWS).astype(np.float16)),
        "member": pa.array(rng.random(ROWS) < 0.5),
    }
    pq.write_table(pa.table(columns).slice(0, 25), folder / "0.parquet", row_group_size=9)
    pq.write_table(pa.table(columns).slice(25), folder / "1.parquet", row_group_size=9)
    features = ["history", "positive", *(own["feature"] for own in negatives)]
    data = {
        **{"format": "parquet", "path": str(folder), "batch_size": 8, "shuffle": "window:20", "eval_fraction": 0.2},
        "columns": {"inputs": ["time", "age", "member", "history"], "dense": [], "label_values": "none"},
        **{"of": {"time": "history"}, "negatives": negatives},
    }
    tables = [jobs.table("item", 50, 4, *features, pooling="none"), jobs.table("user", 50, 4)]
    return jobs.job(data=data, tables=tables, model={"kind": "tests.support.array_models:sequence_model"})


SHARED = {"feature": "shared", "number": 6, "by": "log-uniform"}
EACH = {"feature": "each", "number": 3, "per": "positive", "avoid": "positive"}
JOBS: dict[str, Make] = {
    **{name: case(name) for name in CASES},
    **{f"{name} shuffled": case(name, shuffle="window:20") for name in CASES if name != "custom"},
    **{f"{name} full": case(name, shuffle="full") for name in ("npy", "tsv", "synthetic")},
    **{f"{name} eval_path": held_out(name) for name in ("npy", "bags")},
    "sequences": sequences,
    "drawn for the batch": lambda folder: sequences(folder, SHARED),
    "drawn for look-ups": lambda folder: sequences(folder, SHARED, EACH),
    "a factory's arrays": lambda folder: array_job("causal"),
}
EVERY = pytest.mark.parametrize("name", JOBS)


def ranks() -> list[Rank]:
    parts = {count: count * (1 + count % 2) for count in range(1, 10)}
    return [Rank(number=n, count=count, parts=parts[count]) for count in parts for n in {0, count // 2, count - 1}]


def own_of(batch: Batch, rank: Rank, of: Belonging) -> Batch:
    """The rank's samples, sample by sample."""
    k, size, num_features = rank.parts // rank.count, batch.size, len(of.positions)
    first, last = (part * size // rank.parts for part in (rank.number * k, rank.number * k + k))
    samples, bags = range(first, last), bag_offsets(batch.ids, batch.offsets)

    def bag(f: int, sample: int) -> I64:
        """The places of a bag's look-ups in the batch."""
        whole = f in of.batch_positions
        at = f * size + (0 if whole and sample == first else sample)
        return np.arange(bags[at], bags[at + 1] if not whole or sample == first else bags[at])

    places = [bag(f, sample) for f in range(num_features) for sample in samples]
    lookups = np.concatenate([np.zeros(0, np.int64), *places])
    lengths = np.array([len(own) for own in places], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    def entries(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if name not in of.arrays:
            return array[first:last]
        f = of.positions[of.arrays[name]]
        own = np.concatenate([np.zeros(0, np.int64), *(bag(f, sample) for sample in samples)])
        found: npt.NDArray[Any] = array[own - bags[f * size]]
        return found

    return Batch(
        dense=batch.dense[first:last],
        labels=batch.labels[first:last],
        ids=batch.ids[lookups],
        offsets=None if (lengths == 1).all() else offsets,
        weights=None if batch.weights is None else batch.weights[lookups],
        inputs={name: entries(name, array) for name, array in batch.inputs.items()},
        others=size - len(samples),
    )


def same(a: Batch, b: Batch) -> bool:
    arrays = list(a.inputs) == list(b.inputs) and all(same_array(a.inputs[name], b.inputs[name]) for name in a.inputs)
    return arrays and same_batch(replace(a, inputs={}), replace(b, inputs={}))


@EVERY
def test_each_rank_has_its_samples_of_every_batch(name: str, tmp_path: Path) -> None:
    job = long_job(JOBS[name](tmp_path))
    whole, of = rest_of(InlineSource(job)), belonging(job)
    assert {len(own.batch.labels) for own in whole} > {8} or name == "a factory's arrays"
    for index, rank in enumerate(ranks()):
        start = whole[index * 5 % 17].position
        source = InlineSource(job, start=start, rank=rank, num_whole=(0, 3, 32)[index % 3])
        found = polled_ahead(RankSource(source, rank, of), horizon=index % 4)
        assert [own.position for own in found] == [own.position for own in whole[start.step :]]
        for own, batch in zip(found, whole[start.step :], strict=True):
            expected = own_of(batch.batch, rank, of)
            assert same(own.batch, expected), f"{rank}, step {own.step}"
            assert own.batch.lookups.batch_size == batch.batch.size


@EVERY
def test_a_ranks_parts_are_those_of_the_batch(name: str, tmp_path: Path) -> None:
    job = JOBS[name](tmp_path)
    of = belonging(job)
    for rank in ranks():
        for own in rest_of(InlineSource(job)):
            parts = parts_of(own.batch, rank.parts, of.batch_positions)[rank.own_parts.start : rank.own_parts.stop]
            found = own_parts(own_of(own.batch, rank, of).lookups, rank, of.batch_positions)
            assert all(same_batch(with_offsets(a), with_offsets(b)) for a, b in zip(found, parts, strict=True)), rank


def with_offsets(own: Lookups) -> Lookups:
    return replace(own, offsets=bag_offsets(own.ids, own.offsets))


@pytest.mark.parametrize(
    ("name", "num_workers"), [("bags shuffled", 3), ("npy", 1), ("synthetic", 3), ("a factory's arrays", 1)]
)
def test_decoders_give_a_rank_its_samples(name: str, num_workers: int, tmp_path: Path) -> None:
    job, rank = with_workers(long_job(JOBS[name](tmp_path)), num_workers), Rank(number=1, count=3, parts=6)
    whole, of = rest_of(InlineSource(job)), belonging(job)
    source = WorkerSource(job, rank=rank, num_whole=5)
    source.start()
    try:
        measured = list[ScheduledBatch]()
        while len(measured) < 5:
            if (batch := source.poll()) is not None:
                measured.append(batch)
        assert all(same(a.batch, b.batch) for a, b in zip(measured, whole[:5], strict=True))
        source.put_back(measured)
        found = polled_ahead(RankSource(source, rank, of), 7)
    finally:
        source.close()
    assert len(found) == len(whole)
    assert all(same(a.batch, own_of(b.batch, rank, of)) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("when", ["at the start", "after the first batches"])
@pytest.mark.parametrize("name", ["bags shuffled", "npy", "tsv", "a factory's arrays"])
def test_a_rank_that_owns_a_placed_table_reads_the_ids_of_all_samples_and_else_its_own(
    name: str, when: str, tmp_path: Path
) -> None:
    job = long_job(JOBS[name](tmp_path))
    tables = [structs.replace(job.tables[0], pooling="sum", placement="table"), *job.tables[1:]]  # of rank 0
    first = job if when == "after the first batches" else structs.replace(job, tables=tables)
    job = structs.replace(job, tables=tables, ranks=structs.replace(job.ranks, count=2, parts=4))
    batches, of, told = rest_of(InlineSource(job)), belonging(job), []
    for number in range(2):
        rank, checksums = Rank(number=number, count=2, parts=4), list[tuple[int, int]]()
        source = WorkerSource(structs.replace(first, ranks=job.ranks), rank=rank, num_whole=3)
        source.start()
        own, measured = RankSource(source, rank, of), list[ScheduledBatch]()
        try:
            while len(measured) < 3:
                if (batch := source.poll()) is not None:
                    measured.append(batch)
            source.put_back(measured)
            source.place(job, measured[-1].following)
            for whole in batches:
                ids = next_ids(own)
                assert ids is not None
                from_ids, expected = own.checksum, own_of(whole.batch, rank, of)
                samples = next_dense(own)
                assert same(Batch.of(ids.batch, samples), expected)
                is_whole = number == 0 or whole.step < 3 or name == "a factory's arrays"
                assert same_batch(
                    with_offsets(own.whole), with_offsets((whole.batch if is_whole else expected).lookups)
                )
                checksums.append((from_ids, own.checksum))
            assert next_ids(own) is None
            assert source.counters.batches >= len(batches)
        finally:
            source.close()
        told.append(checksums)
    pairs = [pair for both in zip(*told, strict=True) for pair in zip(*both, strict=True)]
    assert not any(differ(*pair) for pair in pairs)
    assert any(0 not in pair for pair in pairs[:6])


def test_one_rank_gets_the_arrays_as_they_are(tmp_path: Path) -> None:
    job = JOBS["bags"](tmp_path)
    source = InlineSource(job)
    [whole] = [source.poll()]
    assert whole is not None
    source.put_back([whole])
    alone = RankSource(source, Rank(number=0, count=1, parts=4), belonging(job))
    ids, samples = alone.poll_ids(), alone.poll_dense()
    assert ids is not None
    assert ids.batch.ids is whole.batch.ids
    assert samples is not None
    assert samples.dense is whole.batch.dense


@pytest.mark.parametrize("name", ["npy full", "tsv", "bags shuffled", "csv", "arrow", "synthetic"])
def test_after_the_first_batches_a_decoder_decodes_only_its_own_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rank, taken = JOBS[name](tmp_path), Rank(number=2, count=3, parts=3), list[int]()
    take = row_reader.PendingRows._take

    def counted(self: Any, start: int, stop: int) -> Any:
        taken.append(stop - start)
        return take(self, start, stop)

    monkeypatch.setattr(row_reader.PendingRows, "_take", counted)
    for columns in stream_columns(job):
        whole = rest_of(InlineSource(job))[2:]
        start, sizes = whole[0].position, [own.batch.size for own in whole]
        share = DecoderShare(
            job=job, columns=columns, max_steps=None, start=start, rank=rank, num_whole=4, index=0, num_decoders=1
        )
        taken.clear()
        list(decode_share(share, open_reader(job, columns)))
        assert taken == [size if step < 4 else size - size * 2 // 3 for step, size in enumerate(sizes)]


@pytest.mark.parametrize("broken", ["id", "value"])
def test_a_fault_is_seen_by_the_rank_that_has_the_sample(broken: str, tmp_path: Path) -> None:
    """The other ranks go on: their prefetchers must be told."""
    write_day(tmp_path, "day_0", 100)
    part, value = ("sparse", 7) if broken == "id" else ("dense", np.nan)
    array = np.load(tmp_path / f"day_0_{part}.npy")
    array[45, -1] = value  # sample 5 of 8 of batch 5
    np.save(tmp_path / f"day_0_{part}.npy", array)
    job = make_job("criteo-npy", path=str(tmp_path))
    for number in range(4):
        rank = Rank(number=number, count=4, parts=4)
        source = RankSource(InlineSource(job, rank=rank, num_whole=4), rank, belonging(job))
        if number == 2:
            with pytest.raises(DataError, match=f"day_0_{part}.npy, row 45"):
                polled_ahead(source, 2)
        else:
            assert len(polled_ahead(source, 2)) == 13
