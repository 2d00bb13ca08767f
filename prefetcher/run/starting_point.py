"""Decides where a run begins: at its newest checkpoint, at a different run's, or at step 0.

With several ranks, the parent of rank 0's prefetcher decides for all (`settle_run`). The prefetcher of a rank then
looks before each attempt (`look`). It may look too early, on a different host or during a checkpoint; the trainers
compare what their prefetchers found, and all look again if it differs.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rowcast.job.schema import Job
from rowcast.job.training_identity import refuse_finished
from rowcast.job.units import parse_seconds
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.import_checkpoint import import_into, open_source
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.prefetcher.stores.redis_store import remove_left_tables
from rowcast.protocol.messages import Mode
from rowcast.runtime.checkpoint_manifest import Manifest, write_durably
from rowcast.runtime.disk import unreadable
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.logs import get_logger

RUN_FILE = "run.json"  # in the run directory, only with several ranks
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    max_steps: int | None = None
    fresh: bool = False
    source: Path | None = None  # a run directory or an exported file to start from
    timeline: bool = False  # record one
    mode: Mode = "train"
    checkpoint: str | None = None  # eval: the name of the checkpoint to evaluate; None: see `Checkpoints.choose`
    host: int = 0  # which of the hosts that have ranks
    rank: int | None = None  # serve only this rank; None: all ranks of the host


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    newest: Manifest | None  # the checkpoint; None: step 0
    run_id: str


def settle_run(
    job: Job, options: RunOptions, checkpoints: Checkpoints, directory: RunDirectory, shard: OwnShard
) -> StartingPoint:
    """Finishes what a killed run has left, and begins a new one if the options ask for it.

    `directory`: the run directory, held by this process. `shard`: the first one. Raises ConfigError if the run is
    complete, DataError if every checkpoint is damaged."""
    newest = newest_of_run(job, options, checkpoints, directory, shard)
    remove_left_tables(job)
    point = StartingPoint(newest=newest, run_id=new_run_id() if newest is None else newest.run_id)
    if shard.count > 1:
        write_durably(job.run_dir / RUN_FILE, msgspec.json.encode(RunNote(run_id=point.run_id)) + b"\n")
    return point


def newest_of_run(
    job: Job, options: RunOptions, checkpoints: Checkpoints, directory: RunDirectory, shard: OwnShard
) -> Manifest | None:
    carry_out(checkpoints.settle())
    if options.mode == "eval":
        return checkpoints.choose(options.checkpoint)
    if options.checkpoint is not None:
        raise ConfigError("--checkpoint chooses what --eval evaluates; a run continues from its newest checkpoint")
    if options.fresh:
        carry_out(checkpoints.begin_fresh(shard))
        return first_checkpoint(job, options, checkpoints)
    refuse_finished(directory, job, options.max_steps)
    return checkpoints.newest_valid() or first_checkpoint(job, options, checkpoints)


def first_checkpoint(job: Job, options: RunOptions, checkpoints: Checkpoints) -> Manifest | None:
    if options.source is None:
        return None
    source = open_source(job, options.source)
    manifest = import_into(checkpoints, job, source)
    get_logger().info("begins with", source=str(options.source), after_train_steps=manifest.train_steps)
    return manifest


def look(
    job: Job,
    options: RunOptions,
    checkpoints: Checkpoints,
    known: Manifest | None,
    shard: OwnShard,
    given_up: Callable[[], bool],
) -> StartingPoint | None:
    """Returns what one of several ranks finds; `known`: the newest checkpoint that it has seen. None if `given_up`.

    Raises PeerLost if no run has begun within transport.connect_timeout."""
    carry_out(checkpoints.withdraw(shard))
    deadline_s = time.monotonic() + parse_seconds(job.transport.connect_timeout)
    while (note := read_note(job.run_dir)) is None:
        if given_up():
            return None
        if time.monotonic() > deadline_s:
            raise PeerLost(
                f"{job.run_dir} holds no run: the prefetchers of rank 0's host did not begin one within "
                f"{job.transport.connect_timeout}; start them with the same job file, on a folder that all hosts share"
            )
        time.sleep(POLL_S)
    if options.mode == "eval":
        newest: Manifest | None = checkpoints.choose(options.checkpoint)
    else:
        newest = checkpoints.newest_for_ranks(known)
    return StartingPoint(newest=newest, run_id=note.run_id if newest is None else newest.run_id)


def read_note(run_dir: Path) -> RunNote | None:
    """Returns the note of the run that began there, if any. Raises Unreadable."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunNote)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise unreadable(run_dir / RUN_FILE, error) from None


def new_run_id() -> str:
    return uuid.uuid4().hex[:12]
