"""The sampled rows of one plan or barrier, and their checksums as far as they are known."""

from dataclasses import dataclass

import numpy as np

from rowcast.runtime.arrays import I64


@dataclass(slots=True)
class SampledRows:
    """Sampled rows of a move, in its order."""

    keys: I64  # [n]
    positions: I64  # [n] ascending, in the move
    checksums: I64  # [n] what the trainer should report; filled in as it becomes known
    num_known: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def within(self, start: int, count: int) -> slice:
        low, high = np.searchsorted(self.positions, [start, start + count])
        return slice(int(low), int(high))

    def expect(self, part: slice, checksums: I64) -> None:
        self.checksums[part] = checksums
        self.num_known += len(checksums)


@dataclass(slots=True)
class GroupVisit:
    """One group's part, in the order of the trainer's report."""

    fetched: SampledRows
    dirty: SampledRows  # victims, or the dirty rows of a barrier
    clean: SampledRows  # victims

    @property
    def samples(self) -> tuple[SampledRows, SampledRows, SampledRows]:
        return self.fetched, self.dirty, self.clean


@dataclass(slots=True)
class Visit:
    step: int | None
    barrier: int | None
    groups: list[GroupVisit]
    reported: I64  # [n] what the trainer has found in the slots
    num_reported: int = 0

    @property
    def complete(self) -> bool:
        known = all(sample.num_known == len(sample) for group in self.groups for sample in group.samples)
        return known and self.num_reported == len(self.reported)

    def report(self, start: int, checksums: I64) -> None:
        """`Order` has checked that these follow the previous ones and are not too many."""
        self.reported[start : start + len(checksums)] = checksums
        self.num_reported += len(checksums)


def new_visit(step: int | None, barrier: int | None, groups: list[GroupVisit]) -> Visit:
    total = sum(len(sample) for group in groups for sample in group.samples)
    return Visit(step, barrier, groups, np.zeros(total, np.int64))
