"""The role of each column in a model: label, dense feature, ids, or none. docs/data.md explains the rules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.analysis.new.columns import FEW, TEXT, ColumnFacts, DataSet
from rowcast.prefetcher.readers.id_check import EVERY_WHOLE
from rowcast.runtime.errors import ConfigError, listed, nearest

ID_NAME = r"(?i:.*ids?|cat_\d+)"
NUMBER_NAME = r"(?i:(|.*[_\W])(un|pre|in)?(bid|paid|valid|void|aid|kid|solid|liquid|fluid|acid|covid)s?|int_\d+)"
TIME_NAME, FIRST_SECOND = r"(?i:.*(time|date|epoch|stamp)|(.*_)?(ts|at))", 1e8
EXACT = 2.0**53  # beyond, a float cannot tell neighbouring integers apart: no one measured them
LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
FEW_FRACTIONS = 0.01  # in a column of integers that are ids
FILLED = 0.5  # integers that fill this share of the range from 0 are taken for ids
UNIQUE, LEAST_ROWS = 0.9, 100  # with this share of distinct values in this many rows or more, ids carry no information
ROWS_A_VALUE = 10  # rows per value in a table of hashed ids: about a tenth of the values share their row with another
LEAST_HASHED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    label: str | None = None
    dense: Sequence[str] = ()
    ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    column: ColumnFacts
    hashed: bool
    num_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRoles:
    label: ColumnFacts
    dense: list[ColumnFacts]
    ids: list[Ids]
    left_out: dict[str, str]  # column -> reason
    notes: dict[str, str]  # column of ids -> its exceptions


def choose(data: DataSet, wish: Wish) -> ChosenRoles:
    """Raises ConfigError if a wish cannot be met, or no label or no ids are found."""
    for option, names in (
        ("--label", [wish.label] if wish.label else []),
        ("--dense", wish.dense),
        ("--ids", wish.ids),
    ):
        for name in names:
            if data.named(name) is None:
                known = [column.name for column in data.columns]
                raise ConfigError(
                    f"{option} {name}: {data.path} has no such column{nearest(name, known)}; it has {listed(known)}"
                )
    label = label_of(data, wish)
    dense, ids, left_out = [], [], dict[str, str]()
    for column in data.columns:
        if column.name == label.name:
            continue
        if column.name in wish.ids:
            ids.append(as_ids(data, column))
        elif column.name in wish.dense:
            dense.append(column)
            require_dense(column)
        elif (why := useless(data, column)) is not None:
            left_out[column.name] = why
        elif is_ids(column):
            ids.append(as_ids(data, column))
        elif (why := no_numbers(column)) is not None:
            left_out[column.name] = why
        else:
            dense.append(column)
    if not ids:
        raise ConfigError(f"{data.path}: no column looks like ids (text, lists, integers); name some with --ids")
    notes = {own.column.name: note for own in ids if (note := odd_ids(own.column)) is not None}
    return ChosenRoles(label=label, dense=dense, ids=ids, left_out=left_out, notes=notes)


def label_of(data: DataSet, wish: Wish) -> ColumnFacts:
    if wish.label is not None:
        column = data.named(wish.label)
        assert column is not None, "its name was looked up"
        if not column.is_binary:
            raise ConfigError(
                f"--label {column.name}: a label is 0 or 1 in every row, and this column holds {no_label(column)}"
            )
        return column
    binary = [column for column in data.columns if column.is_binary]
    named = [column for name in LABEL_NAMES for column in data.columns if column.name.strip().lower() == name]
    by_name = [column for column in named if column.is_binary]
    if by_name:
        return by_name[0]
    nearly = [column for column in named if is_nearly_binary(column)]
    if len(binary) == 1 and not nearly:
        return binary[0]
    if binary and not nearly:
        names = [column.name for column in binary]
        raise ConfigError(
            f"{data.path}: {len(names)} columns hold 0 and 1 ({listed(names)}); say which is the label: --label "
            f"{names[0]}"
        )
    held = "; ".join(f"{column.name} holds {no_label(column)}" for column in named)
    other = f"--label {binary[0].name} takes another column" if binary else "--label names another column"
    raise ConfigError(
        f"{data.path}: no column holds 0 and 1 in every row, as a label does{held and f' ({held})'}; correct "
        f"it, or {other}"
    )


def is_nearly_binary(column: ColumnFacts) -> bool:
    """Whether the column is meant as the label: two values, or few others than 0 and 1."""
    return column.distinct == 2 or column.not_binary.count + column.missing.count <= FEW * column.num_cells


def no_label(column: ColumnFacts) -> str:
    """What the column holds, and the first cells that are no label."""
    found = [contents(column)]
    if column.missing.count:
        found.append(column.missing.of(column.num_cells, "missing"))
    if column.not_binary.count and not column.words:
        repeats = column.not_binary.value == column.name
        found.append(
            column.not_binary.of(column.num_cells, f"neither {column.binary}")
            + (", which repeats the header: remove such lines" if repeats else "")
        )
    return "; ".join(found)


def contents(column: ColumnFacts) -> str:
    if column.kind in ("integer", "number"):
        return f"{'lists of ' if column.is_list else ''}values from {column.low:g} to {column.high:g}"
    return column.type


def useless(data: DataSet, column: ColumnFacts) -> str | None:
    if column.kind == "time" or is_clock(column):
        odd = f"; {column.odd.of(column.num_cells, 'no timestamp')}" if column.odd.count else ""
        return f"a timestamp is not a feature; docs/data.md shows how to make hour and weekday of it{odd}"
    if column.kind == "other":
        return f"{column.type} cannot be read" if column.num_values else "it has no values"
    if column.kind == "number" and column.is_list:
        return "lists of numbers are not features; for weights of ids use data.columns.weights"
    if column.kind == "number" and column.whole and is_named_id(column) and column.type != TEXT:
        return f"ids are integers or text, and the type is {column.type}; in pandas, .astype('Int64') writes integers"
    constant = column.low == column.high and not (column.missing.count or column.odd.count)
    if column.kind in ("integer", "number") and constant:
        return "every value is the same"
    if column.kind == "text" and column.distinct < 2 and not column.missing.count:
        return "every value is the same"
    many = column.num_values >= LEAST_ROWS and column.distinct > UNIQUE * column.num_values
    if many and not column.is_list and is_ids(column):
        return f"nearly every row has a value of its own; --ids {column.name} uses it anyway"
    return None


def is_clock(column: ColumnFacts) -> bool:
    """Whether integers are seconds since 1970, or parts of them, by name and size."""
    return column.kind == "integer" and column.low >= FIRST_SECOND and re.fullmatch(TIME_NAME, column.name) is not None


def is_ids(column: ColumnFacts) -> bool:
    """Text, lists, integers named like ids, beyond 2^53 or with zeros before them, and integers that fill their range,
    as numbered things do; 0 and 1 are a number."""
    if column.kind == "text" or column.is_list:
        return True
    if column.kind not in ("integer", "number") or column.words or is_flag(column):
        return False
    return column.whole and (is_named_id(column) or (column.kind == "integer" and is_numbered(column)))


def is_flag(column: ColumnFacts) -> bool:
    return column.whole and column.low >= 0 and column.high <= 1


def is_named_id(column: ColumnFacts) -> bool:
    name = column.name.strip()
    return re.fullmatch(ID_NAME, name) is not None and not re.fullmatch(NUMBER_NAME, name)


def is_numbered(column: ColumnFacts) -> bool:
    """Whether integers are ids by their values."""
    fills = column.low >= 0 and column.distinct >= FILLED * (column.high + 1)
    return (fills or column.padded or max(-column.low, column.high) > EXACT) and not re.fullmatch(
        NUMBER_NAME, column.name.strip()
    )


def as_ids(data: DataSet, column: ColumnFacts) -> Ids:
    """Integers from 0 up are row numbers, in tables a little larger than needed; everything else is hashed."""
    if column.kind not in ("integer", "text") and not (data.format == "csv" and column.num_values):
        raise ConfigError(f"--ids {column.name}: ids are text or integers, and the column's type is {column.type}")
    sparse = column.distinct < FILLED / 5 * (column.high + 1) and column.high >= 1000
    if column.kind == "integer" and not (column.missing.count or column.words or column.low < 0 or sparse):
        return Ids(column=column, hashed=False, num_embeddings=rounded_up(with_room(int(column.high) + 1)))
    return Ids(
        column=column, hashed=True, num_embeddings=max(LEAST_HASHED, rounded_up(ROWS_A_VALUE * column.distinct + 1))
    )


def odd_ids(column: ColumnFacts) -> str | None:
    """Cells that hash to other rows than the same numbers written as the others are."""
    few = column.odd.count < column.num_values * (1 if column.kind == "number" else 0.5)
    if column.kind in ("number", "text") and column.odd.count and few:
        return column.odd.of(column.num_cells, "no number; every cell is hashed as text")
    if column.kind == "number" and 0 < column.fractions.count < column.num_values:
        return column.fractions.of(
            column.num_cells, "not written as an integer, and 12.0 and 12 hash to two rows; write all alike"
        )
    return None


def no_numbers(column: ColumnFacts) -> str | None:
    """Why the column cannot be a dense feature, with the first cell that is in the way."""
    if column.odd.count:
        written = " (write a decimal point, no separators or units)" if re.search(r"\d", column.odd.value) else ""
        empty = f"; {column.missing.of(column.num_cells, 'missing')}" if column.missing.count else ""
        return (
            f"{column.odd.of(column.num_cells, 'no number')}{empty}; correct it{written}, or --ids {column.name} "
            "hashes every cell as text"
        )
    if column.missing.count:
        return (
            f"{column.missing.of(column.num_cells, 'missing')}; replace it first, for example by 0 (docs/data.md, "
            "Missing values)"
        )
    if column.whole and (largest := max(-column.low, column.high)) > EVERY_WHOLE:
        return f"fp32 changes whole numbers beyond 2**24, and it has up to {largest:.0f}; scale it, or use --ids"
    few = not column.whole and 0 < column.fractions.count <= FEW_FRACTIONS * column.num_values
    if few and (is_named_id(column) or is_numbered(column)):
        return (
            f"{column.fractions.of(column.num_cells, 'no integer')}; correct it, or --dense {column.name} takes the "
            "column as numbers"
        )
    return None


def require_dense(column: ColumnFacts) -> None:
    if column.kind not in ("integer", "number") or column.is_list:
        raise ConfigError(
            f"--dense {column.name}: a dense feature is a number, and this column holds {contents(column)}"
            + (f"; {column.odd.of(column.num_cells, 'no number')}" if column.odd.count else "")
        )
    if (why := no_numbers(column)) is not None:
        raise ConfigError(f"--dense {column.name}: {why}")


def with_room(count: int) -> int:
    return -(-11 * count // 10)


def rounded_up(count: int) -> int:
    """To two digits: 20,001 -> 21,000."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step
