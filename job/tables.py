"""Describes tables, groups of tables with the same record layout, and the layout of a row's record.

    byte    0         10    16                  36          48                  68          80
            weight    |     master              |           sum                 |
            5 bf16    | 0   5 fp32              | 0         5 fp32              | 0

The drawing shows bf16 of width 5 under Adagrad with optimizer.sparse.master = true: look-ups read `weight`, an update
changes `master` and `sum` and rounds the new master into `weight`. Without a master, an update changes the fp32 values
of `weight`. The padding after each part is always zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from rowcast.job.embedding_tables import RowType, Table, placement_of
from rowcast.job.optimizers import ROW_OPTIMIZERS, SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes, parse_rows

if TYPE_CHECKING:  # a launcher needs no numpy
    from rowcast.runtime.arrays import I64

KEY_SHIFT = 48  # key = table_index << 48 | row
ROW_MASK = (1 << KEY_SHIFT) - 1
ALIGNMENT = 16  # bytes; every part of a record starts at a multiple of it
Points = tuple[tuple[int, ...], ...]  # of each table of the job
LEAST_COLUMNS = 16  # "auto" makes no piece with fewer
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
    # of all its rows on the line that ranks divide (protocol/parts.py), u32; None: each block of rows has its own
    point: int | None = None
    first_column: int = 0  # of a piece, in the rows of the job's table of this name


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
    gradients: RowType = "fp32"  # dtype of the gradients of rows, between the parts of a batch and the row optimizer

    @property
    def gradient_bytes(self) -> int:
        """Of a row."""
        return self.embedding_dim * ITEM_BYTES[self.gradients]

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

    @property
    def feature_pieces(self) -> list[tuple[int, int]]:
        """The position of each of the group's features, and the first of its columns that the group has."""
        return list(
            zip(
                self.feature_positions,
                (feature_table.first_column for feature_table in self.feature_tables()),
                strict=True,
            )
        )

    def feature_tables(self) -> list[TableSpec]:
        """The table of each of the group's features, in the group's feature order."""
        return [table for table in self.tables for _ in table.features]


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def points_in(groups: Iterable["GroupSpec"]) -> Points:
    """Returns the points of the pieces of each table of the job, as a manifest keeps them; () if no table is placed."""
    positions: dict[str, tuple[int, ...]] = {}
    for table in sorted((table for group in groups for table in group.tables), key=lambda table: table.index):
        positions[table.name] = (*positions.get(table.name, ()), *(() if table.point is None else (table.point,)))
    return tuple(positions.values()) if any(positions.values()) else ()


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
    """The tables of the job file, whole."""
    return specs_of(job.tables, job.data.batch_features)


def with_placements(job: Job, placements: Sequence[str]) -> Job:
    """`placements`: of each table, none of them "auto"; () leaves the job as it is."""
    if not placements:
        return job
    pairs = zip(job.tables, placements, strict=True)
    return structs.replace(job, tables=[structs.replace(table, placement=placement) for table, placement in pairs])


def points_of(tables: Sequence[Table], num_ranks: int) -> Points:
    """Returns the points of each table's pieces: none of a table that ranks divide by rows, as "auto" does until
    `with_placements`. They halve the line, then its halves, and so on, the most pooled values first: so 2**n ranks get
    equally many, up to one, and others about as many."""
    widths = [table.width // max(1, table.pieces) * len(table.features) for table in tables]
    pieces = [(-widths[t], t, k) for t, table in enumerate(tables) for k in range(table.pieces) if num_ranks > 1]
    points = {(t, k): int(f"{number:032b}"[::-1], 2) for number, (_, t, k) in enumerate(sorted(pieces))}
    return tuple(tuple(points[t, k] for k in range(table.pieces)) for t, table in enumerate(tables)) if points else ()


def needs_whole_rows(sparse: SparseOptimizer, table: Table) -> list[str]:
    """Returns the settings by which no column of the table trains without the others."""
    is_whole_row = any(state.per_row for state in ROW_OPTIMIZERS[sparse.kind].states)
    needs = {sparse.kind: is_whole_row, "clip_rows": sparse.clip_rows is not None, "linear = true": table.linear}
    return [name for name, is_set in needs.items() if is_set]


def cuts(job: Job, table: Table) -> list[int]:
    """Returns how many pieces "auto" may cut the table into, ascending. Pieces are another group than their table, so
    none are made where the job counts the rows of a group."""
    most = table.embedding_dim // LEAST_COLUMNS
    if job.cache.capacity_rows is not None or job.cache.groups or needs_whole_rows(job.optimizer.sparse, table):
        most = 1
    return [1, *(2**n for n in range(1, most.bit_length()) if table.embedding_dim % (4 * 2**n) == 0)]


def specs_of(tables: Sequence[Table], batch_features: frozenset[str], points: Points = ()) -> tuple[TableSpec, ...]:
    """Returns tables in the job's order, then the other pieces of those that are cut. `points`: as `points_of`."""
    specs = [
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
    ]
    numbers = count(len(specs))
    for table, own in zip(list(specs), points, strict=False):
        dim = table.embedding_dim // max(1, len(own))
        for k, point in enumerate(own):
            piece = replace(table, embedding_dim=dim, point=point, first_column=k * dim)
            if k:
                specs.append(replace(piece, index=next(numbers)))
            else:
                specs[table.index] = piece
    return tuple(specs)


def group_specs(job: Job) -> tuple[GroupSpec, ...]:
    """The groups of a run: with several ranks, of tables and pieces as they are placed."""
    return groups_at(job, points_of(job.tables, job.ranks.count))


def whole_groups(job: Job) -> tuple[GroupSpec, ...]:
    """The groups of whole tables, as everyone has them who only reads rows."""
    return groups_at(job, ())


def possible_groups(job: Job) -> tuple[GroupSpec, ...]:
    """All groups that some choice of "auto" has, once for each set of poolings; their numbers are those of different
    runs."""
    by_name: dict[tuple[str, frozenset[str]], GroupSpec] = {}
    left_to_auto = {t: cuts(job, table) for t, table in enumerate(job.tables) if table.placement == "auto"}
    for most in sorted({1, *chain.from_iterable(left_to_auto.values())}):
        placed = [table.placement for table in job.tables]
        for t, counts in left_to_auto.items():
            placed[t] = placement_of(max(count for count in counts if count <= most))
        groups = group_specs(with_placements(job, placed))
        by_name |= {(group.name, frozenset(table.pooling for table in group.tables)): group for group in groups}
    return tuple(by_name.values())


def groups_at(job: Job, points: Points) -> tuple[GroupSpec, ...]:
    """The groups in order of their first table; tables within a group keep the job's order, and other pieces follow."""
    tables, optimizer = specs_of(job.tables, job.data.batch_features, points), job.optimizer.sparse
    first_features = accumulate((len(table.features) for table in job.tables), initial=0)
    first_feature = dict(zip((table.name for table in job.tables), first_features, strict=False))
    groups: list[GroupSpec] = []
    for dtype, dim in dict.fromkeys((table.dtype, table.embedding_dim) for table in tables):
        members = tuple(table for table in tables if (table.dtype, table.embedding_dim) == (dtype, dim))
        parts, record_bytes = record_parts(optimizer, dtype, dim)
        positions = [first_feature[table.name] + i for table in members for i in range(len(table.features))]
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
                gradients=job.ranks.gradients,
            )
        )
    return tuple(groups)


def num_features(groups: Iterable[GroupSpec]) -> int:
    """The features of a batch; pieces of a table share its features."""
    return 1 + max(position for group in groups for position in group.feature_positions)


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
