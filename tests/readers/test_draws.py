"""Draws of ids: a function of their place, with the probabilities they say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.prefetcher.readers.draws import Drawn, Draws, draws
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples
from rowcast.protocol.parts import UNDIVIDED
from rowcast.runtime.errors import ConfigError
from tests.support import jobs, repeats
from tests.support.facts import facts

COUNTS = np.array([5, 0, 1, 100, 0, 37], np.int64)
WAYS: dict[str, Callable[[Draws, int], Drawn]] = {
    "below": lambda own, count: own.below(37, count),
    "log-uniform": lambda own, count: own.log_uniform(37, count),
    "log-uniform of a power of two": lambda own, count: own.log_uniform(64, count),
    "by": lambda own, count: own.by(COUNTS, count),
}
NUM_DRAWS = repeats.count(test=200_000, soak=10**7)


def test_the_ids_are_known() -> None:
    """Fails if ids change: a run that continues would train on other negatives."""
    own = draws(7, "train", 2, 5)
    assert own.below(1000, 4).ids.tolist() == KNOWN["below"]
    assert own.log_uniform(1000, 6).ids.tolist() == KNOWN["log_uniform"]
    assert own.by(COUNTS, 12).ids.tolist() == KNOWN["by"]


KNOWN = {
    "below": [529, 847, 744, 173],
    "log_uniform": [510, 2, 239, 2, 280, 220],
    "by": [3, 3, 3, 3, 3, 3, 5, 3, 5, 3, 0, 3],
}


@pytest.mark.parametrize("other", [(8, "train", 2, 5), (7, "eval", 2, 5), (7, "train", 3, 5), (7, "train", 2, 6)])
def test_every_place_has_its_own_ids(other: tuple[int, str, int, int]) -> None:
    here = draws(7, "train", 2, 5).below(2**40, 8).ids
    there = draws(*other).below(2**40, 8).ids  # type: ignore[arg-type]
    assert not set(here.tolist()) & set(there.tolist())


def test_all_evaluations_draw_the_same() -> None:
    first, second = (draws(7, "eval", epoch, 3).below(2**40, 8).ids for epoch in (0, 5))
    np.testing.assert_array_equal(first, second)


@pytest.mark.timeout(repeats.count(300, 1800))
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_drawn_as_log_q_says(way: str) -> None:
    """Pearson's test, at one in a thousand: a wrong probability fails every seed."""
    for seed in range(repeats.count(test=2, soak=20)):
        drawn = WAYS[way](draws(seed, "train", 0, 0), NUM_DRAWS)
        ids, places, counts = np.unique(drawn.ids, return_index=True, return_counts=True)
        q = np.exp(drawn.log_q[places].astype(np.float64))
        assert q.sum() == pytest.approx(1, abs=1e-5), f"every id is drawn: {ids}"
        chi_squared = ((counts - NUM_DRAWS * q) ** 2 / (NUM_DRAWS * q)).sum()
        freedom = len(ids) - 1
        assert chi_squared < freedom + 3.2905 * np.sqrt(2 * freedom) + 2 * 3.0902**2 / 3, f"seed {seed}"


@pytest.mark.parametrize("n", [1, 2, 3, 2**31 - 1])
def test_log_uniform_takes_any_number_of_ids(n: int) -> None:
    ids = draws(1, "train", 0, 0).log_uniform(n, 1000).ids
    assert len(ids) == 1000
    assert 0 <= ids.min() <= ids.max() < n
    assert n < 2**31 - 1 or ids.max() > 2**28


@pytest.mark.parametrize(
    "draw",
    [
        lambda own: own.below(0, 1),
        lambda own: own.log_uniform(0, 1),
        lambda own: own.log_uniform(2**31, 1),
        lambda own: own.by(np.zeros(3, np.int64), 1),
        lambda own: own.by(np.array([3, -1], np.int64), 1),
        lambda own: own.by(np.zeros(0, np.int64), 1),
    ],
)
def test_impossible_draws_are_refused(draw: Callable[[Draws], Drawn]) -> None:
    with pytest.raises(ValueError, match="give"):
        draw(draws(1, "train", 0, 0))


ROWS, SIZE, SAMPLES = 50, 8, 30
FEATURES = ["history", "shared", "positive", "own"]
SHARED = {"feature": "shared", "number": 6, "by": "log-uniform"}
OWN = {"feature": "own", "number": 3, "per": "positive", "avoid": "positive"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    lists = [[rng.integers(0, ROWS, rng.integers(0, 4)).tolist() for _ in range(SAMPLES)] for _ in range(2)]
    table = pa.table(
        {name: pa.array(own, pa.list_(pa.int64())) for name, own in zip(FEATURES[::2], lists, strict=True)}
    )
    pq.write_table(table, tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def job_of(data: Path, *negatives: dict[str, Any], seed: int = 3) -> Job:
    features = [name for name in FEATURES if name in (*FEATURES[::2], *(own["feature"] for own in negatives))]
    return jobs.job(
        job={"run_dir": str(data.parent / "run"), "seed": seed},
        data={
            **{"format": "parquet", "path": str(data), "batch_size": SIZE, "eval_fraction": 0.2},
            **{"columns": {"label_values": "none", "dense": []}, "negatives": list(negatives)},
        },
        tables=[jobs.table("item", ROWS, 4, *features, pooling="none")],
        model={"kind": "tests.support.array_models:sequence_model"},
    )


def bag(batch: Batch, feature: str, sample: int) -> list[int]:
    bags = bag_offsets(batch.ids, batch.offsets)
    at = FEATURES.index(feature) * batch.size + sample
    found: list[int] = batch.ids[bags[at] : bags[at + 1]].tolist()
    return found


def read(job: Job, split: Kind = "train", epoch: int = 0, start: int = 0) -> list[Batch]:
    return list(open_reader(job).batches(split, epoch, start))


def test_ids_are_drawn_beside_those_of_the_file(data: Path) -> None:
    job = job_of(data, SHARED, OWN)
    rows = pq.read_table(data).to_pylist()
    for number, batch in enumerate(read(job)):
        stream = draws(job.job.seed, "train", 0, number)
        shared, log_q = stream.log_uniform(ROWS, 6)
        assert bag(batch, "shared", 0) == shared.tolist() == batch.inputs["shared.id"].tolist()
        np.testing.assert_array_equal(batch.inputs["shared.log_q"], log_q)
        positives = []
        for sample in range(batch.size):
            row = rows[number * SIZE + sample]
            assert bag(batch, "history", sample) == row["history"]
            assert bag(batch, "positive", sample) == row["positive"]
            assert sample == 0 or not bag(batch, "shared", sample)
            own = np.reshape(bag(batch, "own", sample), (len(row["positive"]), 3))
            assert all(positive not in drawn for positive, drawn in zip(row["positive"], own.tolist(), strict=True))
            positives += row["positive"]
        assert batch.inputs["positive.id"].tolist() == positives
        np.testing.assert_allclose(batch.inputs["own.log_q"], np.full(3 * len(positives), -np.log(ROWS - 1)), 1e-6)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_stream_of_ids_and_one_of_the_rest_draw_the_same_from_any_start(data: Path, start: int) -> None:
    job = job_of(data, SHARED, OWN)
    ids, dense = (open_reader(job, columns).pending("train", 1, start) for columns in ("ids", "dense"))
    for whole, one, other in zip(read(job, epoch=1)[start:], ids, dense, strict=True):
        half, rest = one(UNDIVIDED), other(UNDIVIDED)
        assert isinstance(half, Lookups)
        assert isinstance(rest, Samples)
        joined = Batch.of(half, rest)
        for name in ("ids", "offsets"):
            np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
        assert joined.inputs.keys() == whole.inputs.keys()
        for name, array in whole.inputs.items():
            np.testing.assert_array_equal(joined.inputs[name], array)


def test_epochs_and_seeds_draw_their_own_and_all_evaluations_the_same(data: Path) -> None:
    job = job_of(data, SHARED)
    first = read(job)[0].inputs["shared.id"].tolist()
    assert read(job, epoch=1)[0].inputs["shared.id"].tolist() != first
    assert read(job_of(data, SHARED, seed=4))[0].inputs["shared.id"].tolist() != first
    evaluations = [read(job, "eval", epoch)[0].inputs["shared.id"].tolist() for epoch in (0, 1)]
    assert evaluations[0] == evaluations[1] != first


def test_ids_are_drawn_by_counts_in_a_file_that_belongs_to_the_data(data: Path, tmp_path: Path) -> None:
    counts = np.zeros(ROWS, np.int64)
    counts[[7, 9]] = 1, 1000
    np.save(tmp_path / "counts.npy", counts)
    job = job_of(data, SHARED | {"by": str(tmp_path / "counts.npy")})
    assert {*read(job)[0].inputs["shared.id"].tolist()} <= {7, 9}
    assert tmp_path / "counts.npy" in open_reader(job).paths, "so a restart compares it"


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        (np.ones(ROWS - 1, np.int64), (ROWS - 1, ROWS)),
        (np.ones(ROWS), ("float64",)),
        (np.zeros(ROWS, np.int64), ("0",)),
        (np.arange(-1, ROWS - 1), ("-1",)),
    ],
)
def test_unusable_counts_are_refused(data: Path, tmp_path: Path, counts: Any, named: tuple[Any, ...]) -> None:
    np.save(tmp_path / "counts.npy", counts)
    with pytest.raises(ConfigError, match=facts("shared", "counts.npy", *named)):
        open_reader(job_of(data, SHARED | {"by": str(tmp_path / "counts.npy")}))


@pytest.mark.parametrize(
    ("negatives", "named"),
    [
        ([SHARED | {"by": "zipf"}], ("zipf", "log-uniform")),
        ([SHARED | {"avoid": "positive"}], ("avoid", "per")),
        ([SHARED, SHARED], ("shared", "again")),
        ([SHARED | {"feature": "other"}], ("other", "no table")),
        ([SHARED, OWN | {"per": "shared", "avoid": "shared"}], ("own", "shared")),
        ([SHARED | {"number": 0}], ("number", "0")),
    ],
)
def test_impossible_negatives_are_refused(data: Path, negatives: list[dict[str, Any]], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=facts("data.negatives", *named)):
        job_of(data, *negatives)


def test_a_data_set_of_ones_own_draws_for_itself(data: Path) -> None:
    sections = {"data": {"format": "tests.readers.factories:made", "negatives": [SHARED]}}
    with pytest.raises(ConfigError, match=facts("data.negatives", "rowcast.draws")):
        jobs.job(tables=[jobs.table("item", ROWS, 4, *FEATURES, pooling="none")], **sections)
