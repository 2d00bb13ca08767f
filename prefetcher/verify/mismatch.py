"""Words the error of `--verify` for the first row that is not what it should be."""

from dataclasses import dataclass

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.pipeline.metrics import VerifyKind

ADVICE = "check the memory and disks of this machine, its driver and the last change of rowcast before you train on it"


@dataclass(frozen=True, slots=True)
class Difference:
    kind: VerifyKind
    key: int
    step: int | None  # the plan that moved the row, or the step that a barrier follows
    since: int | None  # given, kept: the step that wrote the row, None: none has
    num_wrong: int  # of the rows that were checked together
    num_checked: int


def mismatch_message(groups: tuple[GroupSpec, ...], difference: Difference) -> str:
    table = difference.key >> KEY_SHIFT
    group = next(group for group in groups if any(own.index == table for own in group.tables))
    row = group.row_name(difference.key)
    at = "before the first step" if difference.step is None else f"at step {difference.step}"
    last = "it gave before" if difference.since is None else f"it took after step {difference.since}"
    message = {
        "given": f"is stale, torn or lost: the store gives other bytes {at} than {last}",
        "kept": f"is stale, torn or lost: the store gives other bytes at the barrier {at} than {last}",
        "filled": f"is stale or torn: its slot {at} does not hold the bytes that the store gave",
        "returned": f"is torn or lost: other bytes came home {at} than were in its slot",
        "dropped": f"was not trained, but its slot {at} does not hold the bytes that were filled",
    }[difference.kind]
    return f"{row} {message} ({difference.num_wrong} of {difference.num_checked} rows checked there); {ADVICE}"
