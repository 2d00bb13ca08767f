"""The header of a trace: the settings under which its plans were made, and the tables of its ids."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import CheckpointInterval, Horizon, Job
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.readers.pin_files import checksum, read_pins
from rowcast.runtime.errors import Mismatch


class TraceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_embeddings: int
    embedding_dim: int
    features: list[str]
    pooled: bool = True  # False: the table's look-ups are not pooled


class TraceGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    record_bytes: int
    slots: int
    tier_slots: int | None = None  # rows in the store's memory tier; None: it has none


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs over the same batches make the same plans if their headers differ only in `batch_size` and `capacity`."""

    tables: list[TraceTable]  # in the job's order, which is that of the features in every array
    groups: list[TraceGroup]
    depth: int
    policy: str
    # batches known beyond the one planned, at least the depth; None: the policy does not look ahead
    horizon: Horizon | None
    id_bytes: int | None  # lookahead.id_bytes, if the horizon is "auto"
    pinned: str | None  # checksum of the rows of cache.pin
    capacity: str | int  # cache.capacity, from which the slots follow
    batch_size: int  # data.batch_size
    checkpoint_every: CheckpointInterval = 0  # between barriers


def trace_header(job: Job, groups: tuple[GroupSpec, ...], slots: Sequence[Slots]) -> TraceHeader:
    """`slots`: of each level, from the device down."""
    horizon = job.lookahead.known_ahead if EVICTION_POLICIES[job.cache.policy].looks_ahead else None
    return TraceHeader(
        tables=trace_tables(job),
        groups=[
            TraceGroup(
                name=group.name, record_bytes=group.record_bytes, slots=n, tier_slots=below[0] if below else None
            )
            for group, n, *below in zip(groups, *slots, strict=True)
        ],
        depth=job.lookahead.depth,
        policy=job.cache.policy,
        horizon=horizon,
        id_bytes=parse_bytes(job.lookahead.id_bytes) if horizon == "auto" else None,
        pinned=None if job.cache.pin is None else checksum(read_pins(Path(job.cache.pin))),
        capacity=job.cache.capacity,
        batch_size=job.data.batch_size,
        checkpoint_every=job.checkpoint.interval,
    )


def trace_tables(job: Job) -> list[TraceTable]:
    return [
        TraceTable(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            features=list(table.features),
            pooled=table.pooling != "none",
        )
        for table in job.tables
    ]


def same_settings(header: TraceHeader, other: TraceHeader) -> bool:
    return header == msgspec.structs.replace(other, batch_size=header.batch_size, capacity=header.capacity)


def check_tables(header: TraceHeader, job: Job, where: str) -> None:
    """Raises Mismatch unless the trace's ids are ids of the job's tables. Widths and optimizer may differ."""
    ours, theirs = trace_tables(job), header.tables
    if len(ours) != len(theirs):
        raise Mismatch(
            f"{where}: the trace has {len(theirs)} tables and the job {len(ours)}; use the job file that made it"
        )
    for our, their in zip(ours, theirs, strict=True):
        if (our.name, our.num_embeddings, our.features) != (their.name, their.num_embeddings, their.features):
            raise Mismatch(
                f"{where}: the trace has table {described(their)} where the job has {described(our)}; "
                "use the job file that made it"
            )


def described(table: TraceTable) -> str:
    return f"{table.name} of {table.num_embeddings} rows for {', '.join(table.features)}"


def feature_limits(header: TraceHeader) -> list[tuple[str, int]]:
    return [(feature, table.num_embeddings) for table in header.tables for feature in table.features]
