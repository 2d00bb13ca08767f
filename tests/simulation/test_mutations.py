"""The simulation sees what is wrong: with one thing broken on purpose, some seed of those that the tests run fails."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import rowcast.prefetcher.run.starting_point
import rowcast.trainer.models.job_model
import rowcast.trainer.models.runner
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.restore import OwnShard, restore_chosen
from rowcast.prefetcher.checkpoints.row_files import HashingWriter
from rowcast.prefetcher.checkpoints.writer import BarrierCheckpointer
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows
from rowcast.prefetcher.stores.store import Keys, Places
from rowcast.prefetcher.stores.tracked_store import FrozenRows, TrackedStore
from rowcast.protocol.messages import AnyMessage
from rowcast.protocol.session import Session
from rowcast.runtime.arrays import U64
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.trainer.models.model_state import Tensors
from tests.simulation.life import LifeFailed, run_life
from tests.support.driver import RecordedResults
from tests.support.repeats import count

pytestmark = pytest.mark.rest  # slow, and about the simulation, not the product

Break = Callable[[pytest.MonkeyPatch], None]


def roll_back_without_forgetting(patch: pytest.MonkeyPatch) -> None:
    """Rows that no layer has keep what was trained after the checkpoint."""

    def restore_changed(
        root: Path, manifest: Manifest, groups: Sequence[GroupSpec], stores: Sequence[TrackedStore], shard: OwnShard
    ) -> None:
        [part] = shard.parts_of(manifest)
        for group, store in zip(groups, stores, strict=True):
            keys = np.sort(np.concatenate([store.changed_keys(table.index) for table in group.tables]))
            for layer in reversed(part.layers):
                keys = restore_chosen(root, part, layer, group, store, keys)
            store.settle()

    patch.setattr(rowcast.prefetcher.run.starting_point, "restore_changed", restore_changed)


def freeze_before_the_rows_are_home(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint freezes its rows when its barrier is announced."""
    begin = BarrierCheckpointer.begin

    def begin_and_freeze(self: BarrierCheckpointer, barrier: PlannedBarrier) -> bool:
        begun = begin(self, barrier)
        if begun:
            frozen = self._freeze()
            patch.setattr(self, "_freeze", lambda: frozen)
        return begun

    patch.setattr(BarrierCheckpointer, "begin", begin_and_freeze)


def write_over_frozen_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that a checkpoint has not collected yet are written without being set aside."""
    patch.setattr(FrozenRows, "set_aside", lambda self, keys, numbers: None)


def forget_losses(patch: pytest.MonkeyPatch) -> None:
    restore = RecordedResults.restore

    def restore_zeros(self: RecordedResults, tensors: Tensors) -> None:
        restore(self, tensors | {"losses": tensors["losses"] * 0})

    patch.setattr(RecordedResults, "restore", restore_zeros)


def forget_the_dense_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rowcast.trainer.models.job_model, "restore_optimizer", lambda model, optimizer, tensors: None)


def forget_random_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rowcast.trainer.models.runner, "restore_random", lambda device, tensors: None)


def never_sync(patch: pytest.MonkeyPatch) -> None:
    """Files are renamed and named by a manifest, but not on the disk when power is lost."""
    patch.setattr(HashingWriter, "sync", lambda self: None)


def accept_any_incarnation(patch: pytest.MonkeyPatch) -> None:
    def check(self: Session, incarnation: int, message: AnyMessage, *others: object) -> None:
        self.incarnation = self.incarnation or incarnation

    patch.setattr(Session, "_check_incarnation", check)


def take_rows_that_a_server_lost_for_zeros(patch: pytest.MonkeyPatch) -> None:
    def as_they_come(self: RedisRows, keys: Keys, places: Places, values: list[bytes | None]) -> U64:
        joined = b"".join(value or bytes(self._value_bytes) for value in values)
        return np.frombuffer(joined, np.uint64).reshape(len(keys), -1)

    patch.setattr(RedisRows, "_checked", as_they_come)


BREAKS: tuple[Break, ...] = (
    freeze_before_the_rows_are_home,
    write_over_frozen_rows,
    forget_losses,
    forget_the_dense_optimizer,
    forget_random_state,
    never_sync,
    accept_any_incarnation,
    roll_back_without_forgetting,  # this one and the next are rare: many lives until one sees them
    take_rows_that_a_server_lost_for_zeros,
)


@pytest.mark.parametrize("break_it", BREAKS[: count(7, 9)], ids=lambda break_it: break_it.__name__)
def test_a_life_fails_when_something_is_broken(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    # one life in 25 sees the rarest of them, and which one changes with whatever is drawn
    failure = first_failure(count(200, 1000))
    assert failure is not None, f"no seed noticed: {break_it.__name__}"
    assert "tests.simulation.replay" in str(failure)
    assert isinstance(failure.__cause__, AssertionError), "what was broken does not even run"


def first_failure(num_seeds: int) -> LifeFailed | None:
    for seed in range(num_seeds):
        try:
            run_life(seed)
        except LifeFailed as failure:
            return failure
    return None
