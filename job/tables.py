"""Describes tables, groups of tables with the same record layout, and the layout of a row's record.

    byte    0         10    16                  36          48                  68          80
            weight    |     master              |           sum                 |
            5 bf16    | 0   5 fp32              | 0         5 fp32              | 0

The drawing shows bf16 of width 5 under Adagrad with optimizer.sparse.master = true: look-ups read `weight`, an update
changes `master` and `sum` and rounds the new master into `weight`. Without a master, an update changes the fp32 values
of `weight`. The padding after each part is always zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from rowcast.job.embedding_tables import RowType, Table
from rowcast.job.row_optimizers import ROW_OPTIMIZERS, SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes, parse_rows

if TYPE_CHECKING:  # a launcher needs no numpy
    from rowcast.runtime.arrays import I64

KEY_SHIFT = 48  # key = table_index << 48 | row
ROW_MASK = (1 << KEY_SHIFT) - 1
ALIGNMENT = 16  # bytes; every part of a record starts at a multiple of it
ITEM_BYTES: dict[RowType, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
GROUP_NAME = rf"(?:{'|'.join(ITEM_BYTES)})_d[0-9]+_(?:{'|'.join(ROW_OPTIMIZERS)})(?:_master)?"  # of `GroupSpec.name`


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    index: int  # position in the job file; the high part of every key
    name: str
    num_embeddings: int
    embedding_dim: int  # weights in a row: those of the job file, and the linear one
    features: tuple[str, ...]
    pooling: Literal["sum", "mean", "none"]
    init: str
    dtype: RowType = "fp32"  # dtype of the weights that a look-up reads
    linear: bool = False  # whether the last weight in a row is its linear weight
    batch_features: tuple[str, ...] = ()  # the features whose look-ups are the batch's (data.of)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPart:
    name: str  # "weight", "master", or the name of an optimizer state as torch.optim has it
    dtype: RowType
    offset: int  # in bytes from the start of the record, a multiple of ALIGNMENT
    width: int  # in elements
    # the value in a row that was never trained; None for weight and master, which have an initializer
    initial: float | None

    @property
    def nbytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> slice:
        """The part's columns in records viewed as elements of its dtype."""
        first = self.offset // ITEM_BYTES[self.dtype]
        return slice(first, first + self.width)

    @property
    def bytes(self) -> slice:
        return slice(self.offset, self.offset + self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Tables whose records have the same layout; they share one pool of slots."""

    index: int
    name: str  # <dtype>_d<width>_<optimizer>, with _master if the record keeps fp32 weights beside the rounded ones
    tables: tuple[TableSpec, ...]
    embedding_dim: int  # weights in a row
    optimizer: SparseOptimizer
    parts: tuple[RecordPart, ...]  # weight first
    record_bytes: int
    feature_positions: tuple[int, ...]  # positions of the group's features in the job's feature order

    @property
    def num_rows(self) -> int:
        return sum(table.num_embeddings for table in self.tables)

    @property
    def num_features(self) -> int:
        return len(self.feature_positions)

    @property
    def record_floats(self) -> int:
        return self.record_bytes // 4

    @property
    def feature_names(self) -> list[str]:
        return [name for table in self.tables for name in table.features]

    @property
    def unpooled_features(self) -> tuple[int, ...]:
        """The features with pooling = "none", by their number among the group's features."""
        return tuple(f for f, table in enumerate(self.feature_tables()) if table.pooling == "none")

    def row_name(self, key: int) -> str:
        """How sentences name a row of the group: `row 7 of table users`."""
        table = next(table for table in self.tables if table.index == key >> KEY_SHIFT)
        return f"row {key & ROW_MASK} of table {table.name}"

    def feature_tables(self) -> list[TableSpec]:
        """The table of each of the group's features, in the group's feature order."""
        return [table for table in self.tables for _ in table.features]


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def has_master(optimizer: SparseOptimizer, dtype: RowType) -> bool:
    return optimizer.master and dtype != "fp32"


def record_parts(optimizer: SparseOptimizer, dtype: RowType, dim: int) -> tuple[tuple[RecordPart, ...], int]:
    """The parts of a record and its size in bytes: weights, master weights if they are kept, then optimizer state."""
    content: list[tuple[str, RowType, int, float | None]] = [("weight", dtype, dim, None)]
    if has_master(optimizer, dtype):
        content.append(("master", "fp32", dim, None))
    content += [
        (state.name, "fp32", state.width(dim), optimizer.initial_accumulator if state.accumulates else 0.0)
        for state in ROW_OPTIMIZERS[optimizer.kind].states
    ]
    parts, end = [], 0
    for name, part_dtype, width, initial in content:
        parts.append(RecordPart(name=name, dtype=part_dtype, offset=end, width=width, initial=initial))
        end += aligned(parts[-1].nbytes)
    return tuple(parts), end


def table_specs(job: Job) -> tuple[TableSpec, ...]:
    return specs_of(job.tables, job.data.batch_features)


def specs_of(tables: list[Table], batch_features: frozenset[str]) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(
            index=index,
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.width,
            features=tuple(table.features),
            pooling=table.pooling,
            init=table.init,
            dtype=table.dtype,
            linear=table.linear,
            batch_features=tuple(name for name in table.features if name in batch_features),
        )
        for index, table in enumerate(tables)
    )


def group_specs(job: Job) -> tuple[GroupSpec, ...]:
    """The groups in order of their first table; tables within a group keep the job's order."""
    tables, optimizer = table_specs(job), job.optimizer.sparse
    first_feature = [*accumulate((len(table.features) for table in tables), initial=0)]
    groups: list[GroupSpec] = []
    for dtype, dim in dict.fromkeys((table.dtype, table.embedding_dim) for table in tables):
        members = tuple(table for table in tables if (table.dtype, table.embedding_dim) == (dtype, dim))
        parts, record_bytes = record_parts(optimizer, dtype, dim)
        positions = [int(first_feature[table.index]) + i for table in members for i in range(len(table.features))]
        groups.append(
            GroupSpec(
                index=len(groups),
                name=f"{dtype}_d{dim}_{optimizer.kind}{'_master' if has_master(optimizer, dtype) else ''}",
                tables=members,
                embedding_dim=dim,
                optimizer=optimizer,
                parts=parts,
                record_bytes=record_bytes,
                feature_positions=tuple(positions),
            )
        )
    return tuple(groups)


def batch_features(groups: Iterable[GroupSpec]) -> frozenset[int]:
    """The features whose look-ups are the batch's, by position in the job's feature order."""
    return frozenset(
        position
        for group in groups
        for position, name, table in zip(
            group.feature_positions, group.feature_names, group.feature_tables(), strict=True
        )
        if name in table.batch_features
    )


def unpooled_places(groups: Sequence[GroupSpec]) -> dict[str, tuple[int, int]]:
    """The group of each feature without pooling, and its number among those of the group."""
    return {
        group.feature_names[f]: (g, number)
        for g, group in enumerate(groups)
        for number, f in enumerate(group.unpooled_features)
    }


def rows_in(group: GroupSpec, capacity: str | int) -> int:
    """How many of the group's rows fit into a capacity of the job file ("16MiB" or "20000 rows")."""
    rows = parse_rows(capacity)
    return min(parse_bytes(capacity) // group.record_bytes if rows is None else rows, group.num_rows)


def make_keys(table_index: int, rows: "I64") -> "I64":
    return rows | (table_index << KEY_SHIFT)
