"""The role of each column in a model: label, dense feature, ids, or none. docs/data.md explains the rules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.analysis.new.columns import ColumnFacts, DataSet
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.name_lists import listed, nearest

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
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
        elif column.missing:
            left_out[column.name] = f"{column.missing:,} values are missing; replace them first"
        else:
            dense.append(column)
    if not ids:
        raise ConfigError(f"{data.path}: no column looks like ids (text, lists, integers); name some with --ids")
    return ChosenRoles(label=label, dense=dense, ids=ids, left_out=left_out)


def label_of(data: DataSet, wish: Wish) -> ColumnFacts:
    if wish.label is not None:
        column = data.named(wish.label)
        assert column is not None, "its name was looked up"
        if not column.is_binary:
            raise ConfigError(
                f"--label {column.name}: a label is 0 or 1 in every row, and this column holds {contents(column)}"
            )
        return column
    binary = [column for column in data.columns if column.is_binary]
    by_name = [column for name in LABEL_NAMES for column in binary if column.name.lower() == name]
    if by_name or len(binary) == 1:
        return (by_name or binary)[0]
    if binary:
        names = [column.name for column in binary]
        raise ConfigError(
            f"{data.path}: {len(names)} columns hold 0 and 1 ({listed(names)}); say which is the label: --label "
            f"{names[0]}"
        )
    held = "; ".join(
        f"{column.name} holds {contents(column)}" for column in data.columns if column.name.lower() in LABEL_NAMES
    )
    raise ConfigError(
        f"{data.path}: no column holds 0 and 1 in every row, as a label does{held and f' ({held})'}; make one"
    )


def contents(column: ColumnFacts) -> str:
    missing = f" and {column.missing:,} missing" if column.missing else ""
    if column.kind in ("integer", "number"):
        return f"{'lists of ' if column.is_list else ''}values from {column.low:g} to {column.high:g}{missing}"
    return f"{column.type}{missing}"


def useless(data: DataSet, column: ColumnFacts) -> str | None:
    if column.kind == "time":
        return "a timestamp is not a feature; docs/data.md shows how to make hour and weekday of it"
    if column.kind == "other":
        return f"{column.type} cannot be read" if column.num_values else "it has no values"
    if column.kind == "number" and column.is_list:
        return "lists of numbers are not features; for weights of ids use data.columns.weights"
    if column.kind in ("integer", "number") and column.low == column.high and not column.missing:
        return "every value is the same"
    if column.kind == "text" and column.distinct < 2 and not column.missing:
        return "every value is the same"
    many = column.num_values >= LEAST_ROWS and column.distinct > UNIQUE * column.num_values
    if many and not column.is_list and is_ids(column):
        return f"nearly every row has a value of its own; --ids {column.name} uses it anyway"
    return None


def is_ids(column: ColumnFacts) -> bool:
    """Text, lists, integers named like ids, and integers that fill their range, as numbered things do; 0 and 1 are a
    number.
    """
    if column.kind == "text" or column.is_list:
        return True
    if column.kind != "integer" or column.words or re.fullmatch(r"int_\d+", column.name):
        return False
    if re.search(r"(^|[_\W])ids?$|[a-z]I[dD]s?$|^cat_\d+$", column.name) or column.name.lower() in ("id", "ids"):
        return True
    return column.low >= 0 and column.high > 1 and column.distinct >= FILLED * (column.high + 1)


def as_ids(data: DataSet, column: ColumnFacts) -> Ids:
    """Integers from 0 up are row numbers, in tables a little larger than needed; everything else is hashed."""
    if column.kind not in ("integer", "text") and not (data.format == "csv" and column.num_values):
        raise ConfigError(f"--ids {column.name}: ids are text or integers, and the column's type is {column.type}")
    sparse = column.distinct < FILLED / 5 * (column.high + 1) and column.high >= 1000
    if column.kind == "integer" and not (column.missing or column.words or column.low < 0 or sparse):
        return Ids(column=column, hashed=False, num_embeddings=rounded_up(with_room(int(column.high) + 1)))
    return Ids(
        column=column, hashed=True, num_embeddings=max(LEAST_HASHED, rounded_up(ROWS_A_VALUE * column.distinct + 1))
    )


def require_dense(column: ColumnFacts) -> None:
    if column.kind not in ("integer", "number") or column.is_list:
        raise ConfigError(
            f"--dense {column.name}: a dense feature is a number, and this column holds {contents(column)}"
        )
    if column.missing:
        raise ConfigError(f"--dense {column.name}: {column.missing:,} values are missing; replace them first")


def with_room(count: int) -> int:
    return -(-11 * count // 10)


def rounded_up(count: int) -> int:
    """To two digits: 20,001 -> 21,000."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step
