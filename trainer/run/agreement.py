"""Compares, before training, where all ranks' prefetchers begin, and sends every rank's error to all."""

from collections.abc import Mapping

import msgspec

from rowcast.protocol.messages import Welcome
from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, ConfigError, Mismatch, RanksDiffer, RowcastError
from rowcast.runtime.machine import UNRECORDED, Machine, differences
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.run.meeting import GivenUp, decoded
from rowcast.trainer.run.rank_group import Group


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's starting point, or why it cannot start."""

    run_id: str = ""
    checkpoint: str = ""  # the checksum of its manifest
    train_steps: int = 0
    first_batches: tuple[tuple[str, str], ...] = ()  # see `Welcome`
    machine: Machine = UNRECORDED  # that will compute its parts
    leaves: bool = False  # it or its prefetcher was stopped
    failure: tuple[int, str] | None = None  # exit code and sentence


def start_of(welcome: Welcome | None, machine: Machine) -> Start:
    if welcome is None:
        return Start(leaves=True)
    return Start(
        run_id=welcome.run_id,
        checkpoint=welcome.checkpoint,
        train_steps=welcome.first_train_step,
        first_batches=welcome.first_batches,
        machine=machine,
    )


def failed_start(error: RowcastError) -> Start:
    return Start(failure=(error.exit_code, str(error)))


def all_start(group: Group, own: Start, timeout_s: float, given_up: GivenUp) -> bool:
    """Waits for all ranks. Returns False if any of them leaves.

    Raises the error of a rank that failed, the same on every rank, RanksDiffer if they begin at different checkpoints,
    and Mismatch if they have read different batches."""
    gathered = group.agree(msgspec.json.encode(own), timeout_s, given_up)
    if gathered is None:
        return False
    starts = [decoded(content, Start) for content in gathered]
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
    for rank, start in enumerate(starts):
        if start.first_batches != first.first_batches:
            raise other_batches(rank, dict(first.first_batches), dict(start.first_batches))
        here, others = start.machine, first.machine
        if here.threads != others.threads:
            raise ConfigError(
                f"rank {rank} computes with {here.threads} threads and rank 0 with {others.threads}, so the bits "
                "depend on which of them computes a part; give all trainers the same trainer.threads"
            )
        if found := differences(others, here):
            get_logger().warning(f"rank {rank} may round differently than rank 0: {'; '.join(found)}")
    return True


def other_batches(rank: int, first: Mapping[str, str], others: Mapping[str, str]) -> Mismatch:
    differing = [name for name in {**first, **others} if first.get(name) != others.get(name)]
    more = "" if len(differing) == 1 else f" and {len(differing) - 1} more"
    return Mismatch(
        f"rank {rank} has read other batches than rank 0: {differing[0]}{more} {'differs' if not more else 'differ'}; "
        "give every host the same data files, and a data set of your own the same order on every rank"
    )
