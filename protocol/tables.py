"""Tables, groups of tables with one record layout, and the layout of a row's record."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from protocol.job import Job, SparseOptimizer, parse_bytes, parse_rows

KEY_SHIFT = 48  # key = table_index << 48 | row
ROW_MASK = (1 << KEY_SHIFT) - 1
ALIGNMENT = 16  # bytes; every part of a record starts at a multiple of it


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    index: int  # position in the job file; the high part of every key
    name: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[str, ...]
    pooling: Literal["sum", "mean", "none"]
    init: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPart:
    name: str  # "weight", or the name of an optimizer state as torch.optim has it
    offset: int  # in fp32 elements
    width: int  # in fp32 elements
    initial: float | None  # value of a row that was never trained; None for weights, which have an initializer


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Tables whose records have the same layout; they share one pool of slots."""

    index: int
    name: str  # <dtype>_d<width>_<optimizer>
    tables: tuple[TableSpec, ...]
    embedding_dim: int
    parts: tuple[RecordPart, ...]  # weight first
    record_bytes: int
    feature_positions: tuple[int, ...]  # of the group's features, in the job's feature order

    @property
    def num_rows(self) -> int:
        return sum(table.num_embeddings for table in self.tables)

    @property
    def num_features(self) -> int:
        return len(self.feature_positions)

    @property
    def record_floats(self) -> int:
        return self.record_bytes // 4

    def feature_tables(self) -> list[TableSpec]:
        """The table of each of the group's features, in the group's feature order."""
        return [table for table in self.tables for _ in table.features]


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def state_parts(optimizer: SparseOptimizer, dim: int) -> list[tuple[str, int, float]]:
    """(name as torch.optim has it, width in fp32, initial value) of each per-row state."""
    match optimizer.kind:
        case "sgd":
            return []
        case "adagrad":
            return [("sum", dim, optimizer.initial_accumulator)]
        case "rowwise_adagrad":
            return [("sum", 1, optimizer.initial_accumulator)]
        case "adam":
            return [("exp_avg", dim, 0.0), ("exp_avg_sq", dim, 0.0)]


def record_parts(optimizer: SparseOptimizer, dim: int) -> tuple[tuple[RecordPart, ...], int]:
    """Parts of a record and its bytes: fp32 weights, then fp32 state, each part 16-byte aligned."""
    parts = [RecordPart(name="weight", offset=0, width=dim, initial=None)]
    end = aligned(dim * 4)
    for name, width, initial in state_parts(optimizer, dim):
        parts.append(RecordPart(name=name, offset=end // 4, width=width, initial=initial))
        end += aligned(width * 4)
    return tuple(parts), end


def table_specs(job: Job) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(
            index=index,
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            features=tuple(table.features),
            pooling=table.pooling,
            init=table.init,
        )
        for index, table in enumerate(job.tables)
    )


def group_specs(job: Job) -> tuple[GroupSpec, ...]:
    """Groups in order of their first table; tables in a group in the job's order."""
    tables = table_specs(job)
    first_feature = np.cumsum([0, *(len(table.features) for table in tables)])
    groups: list[GroupSpec] = []
    for dim in dict.fromkeys(table.embedding_dim for table in tables):
        members = tuple(table for table in tables if table.embedding_dim == dim)
        parts, record_bytes = record_parts(job.optimizer.sparse, dim)
        positions = [int(first_feature[table.index]) + i for table in members for i in range(len(table.features))]
        groups.append(
            GroupSpec(
                index=len(groups),
                name=f"fp32_d{dim}_{job.optimizer.sparse.kind}",
                tables=members,
                embedding_dim=dim,
                parts=parts,
                record_bytes=record_bytes,
                feature_positions=tuple(positions),
            )
        )
    return tuple(groups)


def rows_in(group: GroupSpec, capacity: str | int) -> int:
    """Rows that a capacity of a job file ("16MiB" or "20000 rows") has room for, at most those that the group has."""
    rows = parse_rows(capacity)
    return min(parse_bytes(capacity) // group.record_bytes if rows is None else rows, group.num_rows)


def make_keys(table_index: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows | np.int64(table_index << KEY_SHIFT)
