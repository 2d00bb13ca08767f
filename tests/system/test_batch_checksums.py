"""Checksums of batches: what they tell apart, and what they do not."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rowcast.prefetcher.pipeline.batch_checksums import (
    DENSE_AND_LABELS,
    BatchChecksums,
    check_first,
    file_checksums,
    first_checksums,
)
from rowcast.prefetcher.readers.data_files import sampled
from rowcast.prefetcher.readers.source import RankSource, SourceInfo
from rowcast.prefetcher.run.sizing import data_checksums
from rowcast.protocol.batch import Batch, Kind, Samples, Scheduled, ScheduledBatch, after
from rowcast.protocol.parts import Belonging, Rank, own_parts
from rowcast.runtime.checkpoint_manifest import BatchChecksum, DataFile, Position, TrainingData
from rowcast.runtime.errors import Mismatch
from rowcast.trainer.run.rank_group import other_data
from tests.support.data_files import write_day
from tests.support.driver import ListSource
from tests.support.facts import facts

FEATURES = ["user", "item", "shop"]


def placed(batch: Batch, kind: Kind = "train", train_step: int = 0) -> ScheduledBatch:
    at = Position(step=train_step, train_step=train_step, eval_batch=0 if kind == "eval" else None)
    return Scheduled(kind=kind, position=at, following=after("train", at), batch=batch)


def jagged() -> Batch:
    """Three samples of three features with 0 to 2 look-ups."""
    return Batch(
        dense=np.ones((3, 2), np.float32),
        labels=np.array([0, 1, 0], np.float32),
        ids=np.arange(9, dtype=np.int64),
        offsets=np.array([0, 1, 3, 3, 4, 5, 6, 8, 8, 9]),
        weights=np.ones(9, np.float32),
    )


def differing(batch: Batch, kind: Kind = "train") -> list[str]:
    """What tells it from `jagged`."""
    first, other = (first_checksums(FEATURES, [placed(one, kind)]) for one in (jagged(), batch))
    return [name for name in first if first[name] != other[name]]


def test_the_feature_that_differs_is_named() -> None:
    ids, weights, offsets = jagged().ids.copy(), np.ones(9, np.float32), np.array([0, 1, 3, 3, 4, 5, 6, 7, 8, 9])
    ids[4], weights[8] = 99, 2
    assert differing(replace(jagged(), ids=ids)) == ["feature item"]
    assert differing(replace(jagged(), weights=weights)) == ["feature shop"]
    assert differing(replace(jagged(), offsets=offsets)) == ["feature shop"]
    assert differing(replace(jagged(), labels=1 - jagged().labels)) == [DENSE_AND_LABELS]
    assert differing(replace(jagged(), dense=jagged().dense * 2)) == [DENSE_AND_LABELS]
    assert differing(replace(jagged(), ids=ids), "eval") == ["feature item of an evaluation"]
    assert differing(jagged()) == []


def test_of_very_many_features_neighbours_share_a_checksum() -> None:
    features = [f"f{index}" for index in range(2500)]
    batch = Batch(dense=np.zeros((1, 0), np.float32), labels=np.zeros(1, np.float32), ids=np.arange(2500))
    ids = batch.ids.copy()
    ids[2000] = 0
    first, other = (first_checksums(features, [placed(one)]) for one in (batch, replace(batch, ids=ids)))
    assert len(first) == 835
    assert [name for name in first if first[name] != other[name]] == ["one of 3 features from feature f1998 on"]


def compared(*folders: Path) -> str:
    first, others = (file_checksums(sampled(sorted(folder.iterdir()))) for folder in folders)
    return str(other_data("", first, others)).partition(": ")[2].partition(";")[0] if first != others else ""


def test_the_data_file_that_differs_is_named(tmp_path: Path) -> None:
    hosts = [tmp_path / name for name in ("a", "b")]
    for host in hosts:
        host.mkdir()
        write_day(host, "day_0", 3000)
        write_day(host, "day_1", 3000)
    assert compared(*hosts) == ""
    path = hosts[1] / "day_1_sparse.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert compared(*hosts) == "data file 6 (day_1_sparse.npy) differs"
    write_day(hosts[1], "day_0", 3001)
    assert compared(*hosts) == "the size of data file 1 (day_0_dense.npy) and 6 more differ"
    write_day(hosts[1], "day_0", 3000)
    write_day(hosts[1], "day_2", 3000)
    assert compared(*hosts) == "the size of data file 7 (day_2_dense.npy) and 6 more differ"


def test_an_epoch_of_another_length_is_named() -> None:
    data = TrainingData(files=(), num_dense=0)
    info = SourceInfo(dense_names=[], expected_train_steps=None, num_train=640, num_eval=None, paths=[])
    first, other = (data_checksums(data, own) for own in (info, replace(info, num_train=641)))
    assert [name for name in first if first[name] != other[name]] == ["the length of an epoch"]


def test_of_very_many_files_neighbours_share_a_checksum() -> None:
    files = [DataFile(path=f"days/day_{day}", nbytes=100, checksum=f"{day:016x}") for day in range(2500)]
    first, other = (
        file_checksums(own)
        for own in (files, [*files[:2000], msgspec.structs.replace(files[2000], checksum="0"), *files[2001:]])
    )
    assert len(first) == 2 * 834
    assert [name for name in first if first[name] != other[name]] == [
        "one of 3 data files from data file 1999 (day_1998) on"
    ]


OF_NOTHING = Belonging(arrays={}, positions={name: f for f, name in enumerate(FEATURES)}, batch_features=frozenset())


def checksums(rank: Rank, expected: Iterable[BatchChecksum] = ()) -> BatchChecksums:
    checksums = BatchChecksums(rank, OF_NOTHING)
    checksums.expect(expected)
    return checksums


def add_ids(to: BatchChecksums, batch: ScheduledBatch, rank: Rank) -> None:
    """As the rank's samples arrive."""
    own = RankSource(ListSource([batch]), rank, OF_NOTHING).poll_ids()
    assert own is not None
    to.add_ids(own.holding(own.batch), own_parts(own.batch, rank, ()))


def samples(batch: ScheduledBatch, rank: Rank) -> Samples:
    source = RankSource(ListSource([batch]), rank, OF_NOTHING)
    source.poll_ids()
    own = source.poll_dense()
    assert own is not None
    return own


ROOMS = [(parts, before, after) for parts in (1, 2, 4) for before in (1, 2, 4) for after in (1, 2, 4)]


@pytest.mark.parametrize(("parts", "before", "after"), [room for room in ROOMS if max(room) == room[0]])
def test_a_restart_compares_ids_and_the_dense_parts_that_were_known(parts: int, before: int, after: int) -> None:
    batches = [placed(jagged(), train_step=step) for step in range(3)]
    known: list[BatchChecksum] = []
    for rank in (Rank(number=number, count=before, parts=parts) for number in range(before)):
        one = checksums(rank)
        for batch in batches:
            add_ids(one, batch, rank)
        one.add_dense(samples(batches[0], rank))
        assert [bool(part.dense) for part in one.ahead] == [
            train_step == 0 for train_step in (0, 1, 2) for _ in rank.own_parts
        ]
        known += one.ahead
    assert len(known) == 3 * parts
    relabelled = placed(replace(jagged(), labels=1 - jagged().labels))
    others = placed(replace(jagged(), ids=jagged().ids + 1), train_step=2)
    for rank in (Rank(number=number, count=after, parts=parts) for number in range(after)):
        own = checksums(rank, known)
        for batch in batches:
            add_ids(own, batch, rank)
            own.add_dense(samples(batch, rank))
        check_first(batches, rank, OF_NOTHING, known)
        if not samples(relabelled, rank).labels.size:
            continue  # none of its parts has a sample
        own = checksums(rank, known)
        add_ids(own, relabelled, rank)
        with pytest.raises(Mismatch, match=facts("dense features and labels", "train step 0")):
            own.add_dense(samples(relabelled, rank))
        with pytest.raises(Mismatch, match=facts("dense features and labels", "train step 0")):
            check_first([relabelled], rank, OF_NOTHING, known)
        with pytest.raises(Mismatch, match="the ids of train step 2"):
            add_ids(checksums(rank, known), others, rank)
        with pytest.raises(Mismatch, match="the ids of train step 2"):
            check_first([others], rank, OF_NOTHING, known)
        add_ids(checksums(rank, known), placed(others.batch, train_step=3), rank)  # not known then
