"""Plans one level of a chain of caches. Every level plans the same batches.

    level          capacity          fetches rows from, evicts rows to
    the device     cache.capacity    the store: its memory tier, or all of it without one
    memory tier    store.memory      the cold tier

Eviction follows one order of all rows (next use, last use, key), which is the same for any number of slots. A lower
level has at least as many slots, so it contains every row of the levels above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.prefetcher.planner.group_planner import GroupMoves, GroupPlanner
from rowcast.prefetcher.planner.horizon import KnownBatch, NeededRows
from rowcast.prefetcher.planner.integrity import check_group
from rowcast.runtime.errors import ConfigError

CAPACITY_KEYS = ("cache.capacity", "store.memory")  # of the levels, from the device down

Slots = tuple[int, ...]  # of each group


@dataclass(frozen=True, slots=True)
class Level:
    groups: Sequence[GroupPlanner]
    trains: bool  # on the device only: a row that leaves a lower level is home, as it has left the device

    def enter(self, rows: Sequence[NeededRows], step: int) -> Slots:
        """Adds a batch. Returns the slots that it needs, pinned rows included. `rows`: of each group."""
        return tuple(group.enter(own.keys, step) for group, own in zip(self.groups, rows, strict=True))

    def move(self, batch: KnownBatch, last_step: int) -> tuple[GroupMoves, ...]:
        """Plans the oldest batch, whose rows must fit. `last_step` is the last one entered."""
        step, train = batch.step, self.trains and batch.kind == "train"
        return tuple(
            group.move(own.num_unique, step, last_step, train)
            for group, own in zip(self.groups, batch.groups, strict=True)
        )

    def check_integrity(self, known: Sequence[KnownBatch]) -> None:
        for index, group in enumerate(self.groups):
            check_group(group, [(batch.step, batch.groups[index].keys) for batch in known])


def check_capacity(levels: Sequence[Level], batch: KnownBatch) -> None:
    """Raises ConfigError if the batch does not fit the device. If it fits there, it fits every level."""
    for index, needed in enumerate(batch.slots_needed):
        if needed > levels[0].groups[index].num_slots:
            raise ConfigError(refusal(levels, index, batch.step, needed))


def refusal(levels: Sequence[Level], index: int, step: int, num_rows: int) -> str:
    # one group's slots follow its capacity; several groups share one, which is raised in proportion
    refused, *below = (level.groups[index] for level in levels)
    group = refused.group
    memory = "".join(
        f" and {own.capacity_key}, which has room for {own.num_slots} rows of the group"
        for own in below
        if own.num_slots < num_rows
    )
    pinned = f", {refused.num_pinned} pinned ones included" if refused.num_pinned else ""
    what = (
        f"step {step} touches {num_rows} distinct rows of group {group.name}{pinned}, "
        f"more than its {refused.num_slots} slots"
    )
    needed = f"{num_rows} rows ({num_rows * group.record_bytes} bytes)"
    device = levels[0].groups
    if len(device) == 1:
        return f"{what}; raise {refused.capacity_key} to at least {needed}{memory}, or make data.batch_size smaller"
    total = sum(other.num_slots * other.group.record_bytes for other in device)
    enough = -(-total * num_rows // max(1, refused.num_slots))
    return (
        f"{what}; it needs {needed}, so raise {refused.capacity_key} from {total} to about {enough} bytes{memory}, "
        "or make data.batch_size smaller"
    )
