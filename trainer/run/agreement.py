"""Before they train, all ranks compare where their prefetchers begin, and each hears why another cannot."""

import msgspec

from rowcast.protocol.messages import Welcome
from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, RanksDiffer, RowcastError
from rowcast.trainer.run.meeting import GivenUp
from rowcast.trainer.run.rank_group import Group


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank begins, or why it does not."""

    run_id: str = ""
    checkpoint: str = ""  # the checksum of its manifest
    train_steps: int = 0
    leaves: bool = False  # its prefetcher was stopped, or it was
    failure: tuple[int, str] | None = None  # exit code and sentence


def start_of(welcome: Welcome | None) -> Start:
    if welcome is None:
        return Start(leaves=True)
    return Start(run_id=welcome.run_id, checkpoint=welcome.checkpoint, train_steps=welcome.first_train_step)


def failed_start(error: RowcastError) -> Start:
    return Start(failure=(error.exit_code, str(error)))


def all_start(group: Group, own: Start, timeout_s: float, given_up: GivenUp) -> bool:
    """Waits for all ranks. Returns False if one of them leaves.

    Raises the error of a rank that failed, the same on every rank, and RanksDiffer if they begin at different
    checkpoints.
    """
    gathered = group.agree(msgspec.json.encode(own), timeout_s, given_up)
    if gathered is None:
        return False
    starts = [msgspec.json.decode(content, type=Start) for content in gathered]
    for start in starts:
        if start.failure is not None:
            code, sentence = start.failure
            raise ERRORS_BY_EXIT_CODE.get(code, RowcastError)(sentence)
    if any(start.leaves for start in starts):
        return False
    first = starts[0]
    for rank, start in enumerate(starts):
        if (start.run_id, start.checkpoint) != (first.run_id, first.checkpoint):
            raise RanksDiffer(
                f"the prefetcher of rank 0 begins after {first.train_steps} train steps of run {first.run_id}, that of "
                f"rank {rank} after {start.train_steps} of run {start.run_id}; job.run_dir must be one folder that all "
                "hosts share, and all must be started with the same options"
            )
    return True
