"""Compiles the loops of planner and stores before they are needed; numba keeps them for later starts."""

import time
from pathlib import Path

import numpy as np

from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.tables import GroupSpec, RecordPart, TableSpec
from rowcast.prefetcher.pipeline.key_exchange import Unpacker, pack
from rowcast.prefetcher.planner.exchange import ShareOfBatch
from rowcast.prefetcher.planner.group_planner import ALL_KEYS, NO_ROWS, NO_SLOTS
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.prefetcher.planner.horizon import OCCURRENCE, close_gaps, correct_cells, spread
from rowcast.prefetcher.planner.planner import RowPlanner, share_key
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS, SegmentFile
from rowcast.prefetcher.stores.cold.segments import page_layout
from rowcast.prefetcher.stores.memory_store import AllStores, MemoryStore
from rowcast.prefetcher.stores.records import FiniteRows
from rowcast.prefetcher.stores.row_loops import BITS, gather_lines, scatter_lines
from rowcast.prefetcher.stores.store import Records, finish
from rowcast.prefetcher.stores.tier_loops import not_loaded, not_spilled
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.first_values import initial_rows
from rowcast.protocol.parts import Rank, Shards
from rowcast.protocol.plan import MOST_ORDERED
from rowcast.protocol.released_rows import copy_rows
from rowcast.runtime.compiled import STORES_PAST_CACHES, LoopCache
from rowcast.runtime.mapped_pages import ask_for
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow

SLOW_S = 1.0
NUM_TIER_ROWS = 600  # on more than two pages
INITS = ("uniform", "normal:1", "constant:0")


def warm_up(*, tiers_in: Path | None = None, is_divided: bool = False) -> None:
    """`tiers_in`: the folder of a store with a memory tier. `is_divided`: batches have parts."""
    began_s, LoopCache.say = time.perf_counter(), get_logger().warning
    with said_if_slow(SLOW_S, "preparing the planner; a first start compiles it: about 15 s"):
        plan_and_move()
        if is_divided:
            share_rows()
        if tiers_in is not None:
            move_between_tiers(tiers_in)
    seconds = time.perf_counter() - began_s
    if seconds > SLOW_S:
        get_logger().info("prepared the planner; its first start compiles it", seconds=round(seconds, 1))


def tiny_groups() -> tuple[GroupSpec, ...]:
    return tuple(tiny_group(index, init) for index, init in enumerate(INITS))


def plan_and_move() -> None:
    groups = tiny_groups()
    for multi_hot in (False, True):
        planner = RowPlanner(groups, [(2,) * len(groups)], depth=1, horizon=2)
        stores = [TrackedStore(MemoryStore(group), group, seed=0) for group in groups]
        all_stores = AllStores(stores)
        for step in range(3):
            planner.add(tiny_batch(step, multi_hot=multi_hot))
        planner.end()
        while planner.ready():
            plan = planner.plan()
            fetched = [
                (group.index, rows.fetch_keys, np.empty((len(rows.fetch_keys), group.record_bytes), np.uint8))
                for group, rows in zip(groups, plan.move, strict=True)
            ]
            for tickets in (all_stores.read(fetched), all_stores.write(fetched), all_stores.read(fetched)):
                for ticket in tickets:
                    finish(ticket)
        planner.barrier("warm-up", finished=True)
        for store, group in zip(stores, groups, strict=True):
            keys = store.changed_keys(group.tables[0].index)
            frozen = store.freeze(1.0)
            finish(store.write(keys, np.zeros((len(keys), group.record_bytes), np.uint8)))
            for _ in frozen.blocks(group.record_bytes):
                pass
            store.thaw()
            store.forget(keys)
            store.settle()
            store.close()


def share_rows() -> None:
    groups = tiny_groups()
    share = ShareOfBatch(groups, JointGrouper(groups), Rank(number=0, count=1, parts=2))
    own = share.want([tiny_batch(0, multi_hot=True).batch] * 2)
    unpacker = Unpacker(groups, [Shards(group.tables, 1) for group in groups], 0)
    share.complete(own, [unpacker.unpack(memoryview(pack([rows.wanted[0] for rows in own])))])


def every_loop(folder: Path) -> None:
    """Compiles what any job may need. `folder`: for files that are of no use afterwards."""
    plan_and_move()
    share_rows()
    move_between_tiers(folder)
    group = tiny_group(0, INITS[0], num_rows=2 * MOST_ORDERED)
    for policy, size in (("lookahead", MOST_ORDERED + 1), ("lfu", 8)):
        planner = RowPlanner((group,), [(size + 8,)], depth=1, horizon=0, policy=policy, num_threads=2)
        for step in range(3):
            for batch in (wide_batch(2 * step, size), wide_batch(2 * step + 1, 8)):
                planner.add(batch)
                planner.plan()
    call_on_nothing(group)


def call_on_nothing(group: GroupSpec) -> None:
    """Calls what only a large, a rare or a failing job reaches: numba looks at types, not at lengths."""
    words, bits, i64, i32 = np.empty((0, 8), np.uint64), np.zeros(1, np.uint64), NO_ROWS, NO_SLOTS
    u32, marks, keys = np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int64)
    if STORES_PAST_CACHES:
        gather_lines(words, i64, words)
        scatter_lines(words, i64, words)
    FiniteRows(group).fault(keys, np.zeros((1, group.record_bytes), np.uint8))
    initial_rows(0, group.tables[0], i64)
    touched = TouchedRows(group, NUM_TIER_ROWS)
    list(touched.found(np.zeros(1 + group.num_rows // BITS, np.uint64), [0], 8))
    for array in (np.zeros(2, OCCURRENCE), np.zeros(2, np.int32)):
        spread(array, 1, 0, 0)
    correct_cells(np.zeros(2, OCCURRENCE), bits, 0, 0, *ALL_KEYS)
    close_gaps(np.zeros(2, OCCURRENCE), i32, 0, 0)
    share_key(keys, keys)
    not_loaded(i64, u32, marks, u32, i64, i64, 0)
    not_spilled(i64, marks)
    ask_for(marks, 0, 8, i64)
    copy_rows(marks, 0, i64, i64, np.empty((0, 8), np.uint8))


def move_between_tiers(folder: Path) -> None:
    group = tiny_group(0, INITS[0], num_rows=NUM_TIER_ROWS)
    layout = page_layout(group.record_bytes)
    cold = SegmentFile.open(group, folder, SEGMENTS * layout.nbytes)
    store = TieredStore(group.name, group.record_bytes, TouchedRows(group, NUM_TIER_ROWS), cold)
    keys = np.arange(NUM_TIER_ROWS)
    records: Records = np.zeros((NUM_TIER_ROWS, group.record_bytes), np.uint8)
    finish(store.write(keys, records))
    most = keys[keys % 10 > 0]
    finish(store.write(most, records[: len(most)]))  # leaves garbage, which `advance` collects
    store.begin(NUM_TIER_ROWS)
    planner = RowPlanner((group,), [(2,), (4,)], depth=1, horizon=2)
    for step in range(3):
        planner.add(tiny_batch(step, multi_hot=False, num_features=1))
    planner.end()
    while planner.ready():
        plan = planner.plan()
        [moves] = plan.move
        store.stage(plan.plan, moves)
        while store.advance(plan.plan - 1):
            pass
        finish(store.write(moves.fetch_keys, records[: len(moves.fetch_keys)]))
    store.begin(0)
    finish(store.read(keys, records))
    store.close()


def tiny_group(index: int, init: str, num_rows: int = 8) -> GroupSpec:
    table = TableSpec(
        index=index,
        name=f"t{index}",
        num_embeddings=num_rows,
        embedding_dim=4,
        features=(f"f{index}",),
        pooling="sum",
        init=init,
    )
    part = RecordPart(name="weight", dtype="fp32", offset=0, width=4, initial=None)
    return GroupSpec(
        index=index,
        name=f"g{index}",
        tables=(table,),
        embedding_dim=4,
        optimizer=SparseOptimizer(kind="sgd", lr=0.1),
        parts=(part,),
        record_bytes=16,
        feature_positions=(index,),
    )


def wide_batch(step: int, size: int) -> ScheduledBatch:
    ids = np.arange(size, dtype=np.int64) + 9 * step
    batch = Batch(dense=np.zeros((size, 1), np.float32), labels=np.zeros(size, np.float32), ids=ids)
    return ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=batch)


def tiny_batch(step: int, *, multi_hot: bool, num_features: int = len(INITS)) -> ScheduledBatch:
    num_lookups = 2 * num_features
    batch = Batch(
        dense=np.zeros((2, 1), np.float32),
        labels=np.zeros(2, np.float32),
        ids=np.arange(num_lookups, dtype=np.int64) % 2 + 2 * step,
        offsets=np.arange(num_lookups + 1) if multi_hot else None,
        weights=np.ones(num_lookups, np.float32) if multi_hot else None,
    )
    return ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=batch)
