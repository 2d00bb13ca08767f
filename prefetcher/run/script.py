"""Serves the rows of a training script that `rowcast.adopt` has adopted: `python -m rowcast.prefetcher.run.script JOB`.

The script's process starts it, tells it the rows that it will look up, and asks for others. It ends with its script
and leaves only what `rowcast.save` has asked for.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rowcast.job.file import load_own_job
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, group_specs, table_specs
from rowcast.prefetcher.checkpoints.snapshot import NoCheckpoints
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.key_exchange import NoLinks
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.planner.capacity import Touched, slots_of
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.script_ids import NO_SAMPLES, ScriptIds
from rowcast.prefetcher.readers.source import Source
from rowcast.prefetcher.run.connection import Connection
from rowcast.prefetcher.run.script_saves import ScriptSaves
from rowcast.prefetcher.run.sizing import (
    Sizes,
    Typical,
    automatic_ring_bytes,
    job_levels,
    stage_threads,
    staging_bytes,
    tier_rows,
)
from rowcast.prefetcher.run.tables import LEAST_ROWS
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.prefetcher.stores.store import Keys, Records, RowStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.protocol.messages import PROTOCOL_VERSION, Ids, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, batch_specs, belonging
from rowcast.protocol.script_setup import SETUP, Columns, ScriptSetup, ScriptTable
from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.crew import Crew
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals, run_until_stopped
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import ThreadPool
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.runtime.telemetry.metrics import Health

ARRAY_BYTES = 16  # of a plan's arrays for each row


class ScriptStore(TrackedStore):
    """A store in which rows that the script has not trained have its own first values."""

    def __init__(self, store: RowStore, group: GroupSpec, tables: Sequence[ScriptTable]) -> None:
        """`tables`: of the job."""
        super().__init__(store, group, seed=0)
        self._columns = {table.index: tables[table.index].columns for table in group.tables}
        sizes = {table.index: table.num_embeddings for table in group.tables}
        self._values = {
            each: mapped(each, sizes[table])
            for table, columns in self._columns.items()
            for each in columns
            if each.path
        }

    def fill_first(self, keys: Keys, places: I64, out: Records) -> None:
        records, tables = out.view(np.float32), keys >> KEY_SHIFT
        records[places] = 0
        for table, columns in self._columns.items():
            chosen, begin = np.flatnonzero(tables == table), 0
            rows = keys[chosen] & ROW_MASK
            for own in columns:
                values = own.rule.rows(rows) if own.rule else self._values[own][rows] if own.path else own.value
                records[places[chosen], begin : begin + own.width] = values
                begin += own.width


def mapped(columns: Columns, num_rows: int) -> F32:
    """Raises ConfigError if the file does not hold as many rows."""
    memory, row_bytes = np.memmap(columns.path, np.uint8, "r"), columns.row_bytes or 4 * columns.width
    needed = columns.offset + (num_rows - 1) * row_bytes + 4 * columns.width
    if len(memory) < needed:
        raise ConfigError(
            f"{columns.path} has {len(memory):,} bytes, and the first values of a table of {num_rows:,} rows take "
            f"{needed:,}; leave the file as it is while the script trains"
        )
    return np.ndarray((num_rows, columns.width), np.float32, memory, columns.offset, (row_bytes, 4))


def serve(job: Job, signals: Signals) -> None:
    """Returns when the script has ended or a stop was requested. Raises the first error of any stage, or PeerLost."""
    directory, groups, crew = (
        RunDirectory(job.run_dir, "prefetcher"),
        group_specs(job),
        Crew("prefetcher", signals.bell),
    )
    setup = msgspec.json.decode((job.run_dir / SETUP).read_bytes(), type=ScriptSetup)
    health = Health(dead_stage=crew.dead_stage)
    connection = Connection(directory.path, job.transport, crew, signals, health, None)
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
    job: Job, setup: ScriptSetup, connection: Connection, ids: ScriptIds, stores: tuple[ScriptStore, ...]
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
        links=NoLinks(),
        expected=(),
        stores=stores,
        conversation=connection.conversation,
        rings=(rings.fetch, rings.back),
        checkpointer=NoCheckpoints(),
        counters=new_counters(groups, UNDIVIDED.number),
    )


def main() -> int:
    def serve_job(signals: Signals) -> int:
        setup_logging("prefetcher")
        serve(load_own_job("prefetcher", Path(sys.argv[1]), ()), signals)
        return 0

    os.setsid()  # Ctrl-C in a terminal is the script's, which may save its tables
    return run_until_stopped("prefetcher", serve_job)


if __name__ == "__main__":
    sys.exit(main())
