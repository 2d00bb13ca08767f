"""Checksums of batches: what they tell apart, and what they do not."""

from dataclasses import replace

import numpy as np
import pytest

from rowcast.prefetcher.pipeline.batch_checksums import DENSE_AND_LABELS, BatchChecksums, Chain, first_checksums
from rowcast.protocol.batch import Batch, Kind, Scheduled, ScheduledBatch, after
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import Mismatch
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


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_chain_has_seen_as_far_ahead_as_it_says(ahead: int) -> None:
    def chain(values: str) -> list[int]:
        one = Chain(ahead)
        return [one.planned([*values[at:]]) for at in range(len(values))]

    for place in range(8):
        other = chain("abcdefgh"[:place] + "X" + "abcdefgh"[place + 1 :])
        same = [mine == theirs for mine, theirs in zip(chain("abcdefgh"), other, strict=True)]
        assert same == [step + ahead < place for step in range(8)]


def test_a_chain_does_not_depend_on_how_much_more_is_known() -> None:
    near, far = Chain(2), Chain(2)
    for at in range(6):
        assert near.planned([*"abcdefgh"[at : at + 3]]) == far.planned([*"abcdefgh"[at:]])


def test_a_restart_compares_ids_and_the_dense_parts_that_were_known() -> None:
    batches = [placed(jagged(), train_step=step) for step in range(3)]
    before = BatchChecksums(depth=1)
    for batch in batches:
        before.add_ids(batch)
    before.add_dense(batches[0].batch)
    assert [bool(batch.dense) for batch in before.ahead] == [True, False, False]
    relabelled = placed(replace(jagged(), labels=1 - jagged().labels))

    def restart() -> BatchChecksums:
        return BatchChecksums(depth=1, expected=before.ahead)

    after = restart()
    for batch in batches:
        after.add_ids(batch)
        after.add_dense(batch.batch)
    after = restart()
    after.add_ids(relabelled)
    with pytest.raises(Mismatch, match=facts("dense features and labels", "train step 0")):
        after.add_dense(relabelled.batch)
    with pytest.raises(Mismatch, match="the ids of train step 2"):
        restart().add_ids(placed(replace(jagged(), ids=jagged().ids + 1), train_step=2))
    restart().add_ids(placed(replace(jagged(), ids=jagged().ids + 1), train_step=3))  # not known then
