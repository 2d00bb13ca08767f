"""Serves the rows of a training script that `rowcast.adopt` has adopted: `python -m rowcast.prefetcher.run.script JOB`.

The script's process starts it, announces the rows that it will look up, and asks for others. It ends with its script,
and leaves only what `rowcast.save` asked for.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rowcast.job.file import load_own_job
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec, group_specs, table_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter, NoCheckpoints, collected
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.planner.first_batches import Touched, slots_of
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.source import NO_SAMPLES, ScriptIds, Source
from rowcast.prefetcher.run.connection import TrainerConnection
from rowcast.prefetcher.run.sizing import (
    Sizes,
    Typical,
    automatic_ring_bytes,
    job_levels,
    stage_threads,
    staging_bytes,
    tier_rows,
)
from rowcast.prefetcher.run.starting_point import LEAST_ROWS
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.prefetcher.stores.records import FirstColumns
from rowcast.prefetcher.stores.store import Keys, Records, RowStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.protocol.messages import (
    PROTOCOL_VERSION,
    SETUP,
    Answer,
    Ids,
    Save,
    SaveRequest,
    ScriptSetup,
    ScriptTable,
    StopRequest,
    Welcome,
)
from rowcast.protocol.parts import UNDIVIDED, batch_specs, belonging
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import Manifest, Position
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.process import Signals, run_until_stopped
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import POLL_S, Crew, ThreadPool
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.runtime.telemetry.metrics import Health
from rowcast.runtime.tensor_file import BLOCK_BYTES

ARRAY_BYTES = 16  # of a plan's arrays for each row


class ScriptStore(TrackedStore):
    """A store in which rows that the script has not trained have its own first values."""

    def __init__(self, store: RowStore, group: GroupSpec, tables: Sequence[ScriptTable]) -> None:
        """`tables`: of the job."""
        super().__init__(store, group, seed=0)
        sizes = {table.index: table.num_embeddings for table in group.tables}
        self._first = FirstColumns({table: tables[table].columns for table in sizes}, sizes)

    def fill_first(self, keys: Keys, places: I64, out: Records) -> None:
        self._first.fill(keys, places, out)


def serve(job: Job, signals: Signals) -> None:
    """Returns when the script has ended or a stop was requested. Raises the first error of any stage, or PeerLost."""
    directory, groups, crew = (
        RunDirectory(job.run_dir, "prefetcher"),
        group_specs(job),
        Crew("prefetcher", signals.bell),
    )
    setup = msgspec.json.decode((job.run_dir / SETUP).read_bytes(), type=ScriptSetup)
    health = Health(dead_stage=crew.dead_stage)
    connection = TrainerConnection(directory.path, job.transport, crew, signals, health, None)
    ids = ScriptIds(table_specs(job))
    with directory, connection.stack as stack:
        directory.clear_failure()
        try:
            connection.open()
            connection.watch(lambda: ids.counters.batches)
            warm_up(tiers_in=job.table_folder if isinstance(job.store, StoreWithTier) else None)
            stores = [ScriptStore(open_row_store(job, group), group, setup.tables) for group in groups]
            pool = ThreadPool(stage_threads(job), name="rows", least=LEAST_ROWS)
            for store in stores:
                stack.callback(store.close)
                store.numbers.pool = pool
            engine = make_engine(job, setup, connection, ids, tuple(stores))
            left: list[StopRequest] = []
            engine.conversation.listen({Ids: ids.accept, StopRequest: left.append})
            saves = ScriptSaves(job, groups, tuple(stores), engine.conversation.send)
            stack.callback(saves.close)
            engine.writeback.on_save, saves.wake = saves.take, partial(crew.wake, "checkpoint")
            connection.start(engine, {"checkpoint": saves.advance})
            while not left and signals.stop_reason is None:
                signals.bell.wait(1.0)
                signals.bell.hush()
                if not left:
                    crew.check()
        except BaseException as error:
            connection.fail(error)
            directory.note_failure(error)
            raise


def make_engine(
    job: Job, setup: ScriptSetup, connection: TrainerConnection, ids: ScriptIds, stores: tuple[ScriptStore, ...]
) -> PrefetcherEngine:
    groups, depth = group_specs(job), job.lookahead.depth
    largest, distinct = (
        tuple(max(1, sum(getattr(setup.tables[table.index], rows) for table in group.tables)) for group in groups)
        for rows in ("largest_rows", "distinct_rows")
    )
    touched = Touched(num_batches=setup.num_steps, largest_batch_rows=largest, distinct_rows=distinct)
    slots = slots_of(job, groups, touched)
    rows_bytes = sum(rows * group.record_bytes for rows, group in zip(largest, groups, strict=True))
    typical = Typical(rows=rows_bytes, arrays=ARRAY_BYTES * sum(largest))
    ring_bytes = automatic_ring_bytes(typical, depth, pairs=1)
    own = Sizes(ring_bytes=ring_bytes, staging_bytes=staging_bytes(rows_bytes, ring_bytes))
    try:
        levels = job_levels(job, groups, touched, slots, lambda: own)
    except ConfigError as error:
        raise ConfigError(f"adopt(memory=...) is too small for the steps that are known: {error}") from None
    for in_memory in levels[1:]:
        for store, rows in zip(stores, tier_rows(job, groups, touched, in_memory), strict=True):
            store.store.begin(rows)
    rings = connection.open_rings(ring_bytes)
    welcome = Welcome(
        protocol_version=PROTOCOL_VERSION,
        run_id="",
        incarnation=connection.incarnation,
        pid=os.getpid(),
        slots=slots,
        inputs=batch_specs(NO_SAMPLES, belonging(job).arrays),
        depth=depth,
        fetch_ring=rings.specs[0],
        back_ring=rings.specs[1],
        staging_bytes=own.staging_bytes,
        train_steps=None,
        first_train_step=0,
        restore_bytes=0,
    )
    return PrefetcherEngine(
        job=job,
        welcome=welcome,
        source=Source(ids, None),
        planner=job_planner(job, groups, levels, (), num_threads=stage_threads(job)),
        stores=stores,
        conversation=connection.conversation,
        rings=(rings.fetch, rings.back),
        checkpointer=NoCheckpoints(),
        counters=new_counters(groups, UNDIVIDED.number),
    )


class ScriptWriter(CheckpointWriter):
    def __init__(self, job: Job, groups: tuple[GroupSpec, ...], request: SaveRequest) -> None:
        checkpoints = Checkpoints(Path(request.folder), Disk())
        newest = next((own for own in known(checkpoints) if own.checksum == request.after), None)
        super().__init__(job, groups, request.run_id, None, checkpoints, newest, request.keep)
        self.request = request

    def content(self) -> dict[str, Any]:
        return {"job": {}, "script": self.request.script}


def known(checkpoints: Checkpoints) -> list[Manifest]:
    return [own for name in checkpoints.candidates() if (own := checkpoints.readable(name)) is not None]


class ScriptSaves:
    """Writes the checkpoints of a training script that saves itself, with the writer of job runs.

    write-back's thread    take: all rows before are in the stores | changed rows are frozen, the model state is queued
    checkpoint's thread    advance: files, manifest, old ones go   | Answer, or why it failed
    """

    def __init__(
        self, job: Job, groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...], send: Callable[[Answer], None]
    ) -> None:
        self.wake: Callable[[], None] = lambda: None  # of the checkpoint's thread
        self._job, self._groups, self._stores, self._send = job, groups, stores, send
        self._locked = ExitStack()
        self._saving: tuple[Save, CheckpointWriter] | None = None
        self._changing = threading.Lock()  # whether rows are frozen for a save

    def take(self, message: Save) -> None:
        while self._saving is not None:  # an interrupt has ended the script's wait for the last one
            time.sleep(POLL_S)
        if not message.request:
            for store in self._stores:
                store.settle()
            return
        try:
            self._begin(message)
        except (RowcastError, OSError) as error:
            self._fail(message, error)

    def _begin(self, message: Save) -> None:
        request = msgspec.json.decode(message.request, type=SaveRequest)
        self._locked.close()
        self._locked.enter_context(RunDirectory(Path(request.folder), "prefetcher"))
        writer = ScriptWriter(self._job, self._groups, request)
        writer.begin(Position(step=request.step, train_step=request.step), finished=False, reason="rowcast.save")
        self._saving = message, writer
        self.wake()
        hasher = xxhash.xxh3_64()
        with Path(request.objects).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
                while self._saving is not None and not writer.offer_dense(block):
                    time.sleep(POLL_S)
        with self._changing:
            if self._saving is not None:  # it has not failed
                frozen = [store.freeze(1.0) for store in self._stores]
                writer.finish(hasher.hexdigest(), collected(self._stores, frozen))
        self.wake()

    def advance(self) -> bool:
        if self._saving is None:
            return False
        message, writer = self._saving
        try:
            progress = writer.advance()
        except RowcastError as error:
            self._fail(message, error)
            return True
        if not writer.busy:
            self._saving = None
            self._send(Answer(number=message.number, records=b""))
        return progress

    def _fail(self, message: Save, error: Exception) -> None:
        """The previous save stays, and the script goes on: it still knows which rows the next save needs."""
        with self._changing:
            self._saving = None
            for store in self._stores:
                store.thaw()
        self._send(Answer(number=message.number, records=str(error).encode()))

    def close(self) -> None:
        self._locked.close()


def main() -> int:
    def serve_job(signals: Signals) -> int:
        setup_logging("prefetcher")
        serve(load_own_job("prefetcher", Path(sys.argv[1]), ()), signals)
        return 0

    os.setsid()  # Ctrl-C in a terminal is the script's, which may save its tables
    return run_until_stopped("prefetcher", serve_job)


if __name__ == "__main__":
    sys.exit(main())
