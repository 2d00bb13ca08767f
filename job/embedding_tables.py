"""Defines the embedding tables of a job file, and the first values of their rows."""

import math
import re
from typing import Annotated, Literal

from msgspec import Meta

from rowcast.job.section import Section
from rowcast.runtime.first_values import RowRule

RowType = Literal["fp32", "fp16", "bf16"]
Rows = Annotated[int, Meta(ge=1, le=2**48)]  # a key is table_index << 48 | row
Width = Annotated[int, Meta(ge=1, le=4096)]
Placement = str  # "rows", "table", "columns:K" or "auto"
# the largest finite values
LARGEST: dict[RowType, float] = {"fp32": (2 - 2**-23) * 2.0**127, "fp16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
LARGEST_NORMAL = math.sqrt(64 * math.log(2))  # the largest value of `init = "normal:std"`, in standard deviations


class Table(Section, frozen=True, kw_only=True):
    name: str
    num_embeddings: Rows  # rows
    embedding_dim: Width
    features: list[str]  # one or more features that look up this table
    # the dtype of the weights that a look-up reads; `fp16` and `bf16` take half the bytes and round every update to the
    # nearest value, ties to even; arithmetic and optimizer state stay in fp32
    dtype: RowType = "fp32"
    # how the rows of a bag are combined; `none` keeps them separate, as a sequence
    pooling: Literal["sum", "mean", "none"] = "sum"
    # the rows' first values: `uniform` (within +-1/sqrt(num_embeddings)), `uniform:lo,hi`, `normal:std` or `constant:x`
    init: str = "uniform"
    # every row has one more weight, its linear weight, which begins as 0: models get f32 [B, 1] beside f32
    # [B, embedding_dim] from one look-up, as Wide & Deep and DeepFM need it; not with `rowwise_adagrad` or `clip_rows`,
    # which treat a row as a whole
    linear: bool = False
    # which rank owns a row, if there are several: `rows` divides the table among all, and rows travel to the ranks that
    # look them up; `table` gives it to one rank, which pools it for all, and pooled vectors travel; `columns:K` gives
    # each of K pieces of its columns to one rank, not with `rowwise_adagrad`, `clip_rows` or `linear`, which treat a
    # row as a whole; `auto` chooses among these by the bytes that the first batches would send, within `ranks.memory`;
    # it cuts no table if `cache.groups` is set or `cache.capacity` is in rows. It changes no bit, and a restart may
    # change it
    placement: Placement = "rows"

    @property
    def width(self) -> int:
        """Weights in a row: `embedding_dim`, and the linear one."""
        return self.embedding_dim + self.linear

    @property
    def pieces(self) -> int:
        """How many pieces have one owner each: 0 if ranks divide the rows, as "auto" does until it has chosen."""
        kind, _, columns = self.placement.partition(":")
        return int(columns or kind == "table")

    @property
    def is_cut(self) -> bool:
        return self.placement.startswith("columns:")

    def check(self) -> None:
        self._check_name()
        if not self.features:
            raise ValueError(f"table {self.name} has no feature; list at least one in features = [...]")
        if self.linear and self.pooling == "none":
            raise ValueError(
                f'table {self.name}: linear = true needs pooled look-ups, and pooling is "none"; use "sum" or "mean"'
            )
        if self.placement != "rows" and self.pooling == "none":
            raise ValueError(
                f'table {self.name}: placement = "{self.placement}" needs pooled look-ups, and pooling is "none"; set '
                'placement = "rows"'
            )
        self._check_pieces()
        reach = init_reach(self.init, self.num_embeddings)
        if reach > LARGEST[self.dtype]:
            raise ValueError(
                f"table {self.name}: init = {self.init!r} reaches {reach:.6g}, and {self.dtype} ends at "
                f"{LARGEST[self.dtype]:.6g}; choose smaller first values"
            )

    def _check_name(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name):
            raise ValueError(f"table name {self.name!r} must be letters, digits and underscores")

    def _check_pieces(self) -> None:
        own = f'table {self.name}: placement = "{self.placement}"'
        if not re.fullmatch(r"rows|table|auto|columns:[1-9][0-9]*", self.placement):
            raise ValueError(f"{own} is not one of rows, table, columns:K, auto")
        fitting = [count for count in range(1, self.embedding_dim // 4 + 1) if self.embedding_dim % (4 * count) == 0]
        if self.is_cut and self.pieces not in fitting:
            nearest = placement_of(min(fitting, key=lambda count: abs(count - self.pieces), default=1))
            raise ValueError(
                f"{own} does not divide {self.embedding_dim} columns into pieces of a multiple of 4; set "
                f'placement = "{nearest}"'
            )


class ParameterTable(Table, frozen=True, kw_only=True):
    """The table of a training script, which has the name of its parameter."""

    rule: RowRule | None = None  # makes the first values, in place of `init` and the job's seed

    def _check_name(self) -> None:
        """Any name of a parameter."""


class TablesFrom(Section, frozen=True, kw_only=True):
    """A short form for the usual case: one table `t_cat_<n>` for each feature `cat_<n>`, all of the same width."""

    cardinalities: list[Rows] | None = None  # the rows of each table; required unless `data.synthetic.preset` is set
    embedding_dim: Width
    dtype: RowType = "fp32"  # as in `[[tables]]`
    pooling: Literal["sum", "mean"] = "sum"
    init: str = "uniform"  # as in `[[tables]]`
    linear: bool = False  # as in `[[tables]]`
    placement: Placement = "rows"  # as in `[[tables]]`


def placement_of(pieces: int) -> Placement:
    """`pieces`: as `Table.pieces`."""
    return ("rows", "table")[pieces] if pieces < 2 else f"columns:{pieces}"


def parse_init(init: str, num_embeddings: int) -> tuple[Literal["uniform", "normal", "constant"], float, float]:
    """(kind, a, b): uniform on [a, b), normal with mean a and deviation b, or the constant a. Raises ValueError."""
    try:
        if init == "uniform":
            bound = num_embeddings**-0.5
            return "uniform", -bound, bound
        kind, _, rest = init.partition(":")
        values = [float(value) for value in rest.split(",")]
        if not all(map(math.isfinite, values)):
            raise ValueError("not finite")
        if kind == "uniform" and len(values) == 2 and values[0] <= values[1]:
            return "uniform", values[0], values[1]
        if kind == "normal" and len(values) == 1 and values[0] >= 0:
            return "normal", 0.0, values[0]
        if kind == "constant" and len(values) == 1:
            return "constant", values[0], 0.0
    except ValueError:
        pass
    raise ValueError(f"init = {init!r} is not one of uniform, uniform:lo,hi, normal:std, constant:x")


def init_reach(init: str, num_embeddings: int) -> float:
    """The largest magnitude that a first value can have. Raises ValueError."""
    kind, a, b = parse_init(init, num_embeddings)
    return b * LARGEST_NORMAL if kind == "normal" else max(abs(a), abs(b))


def is_constant(table: Table) -> bool:
    kind, a, b = parse_init(table.init, table.num_embeddings)
    return kind == "constant" or (b == 0 if kind == "normal" else a == b)
