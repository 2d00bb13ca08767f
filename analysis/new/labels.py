"""The label: which column it is, what makes 0 and 1 of it, and the option to write if no column is one as it is."""

import re
import shlex
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.new import names
from rowcast.analysis.new.columns import FEW, NUMBER, ColumnFacts
from rowcast.analysis.new.files import DataSet
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS, prepared
from rowcast.prefetcher.readers.formats.csv import TRUE
from rowcast.runtime.arrays import Bools
from rowcast.runtime.errors import ConfigError, listed, nearest
from rowcast.runtime.telemetry.format_numbers import plural

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "clk", "target", "y", "ctr", "income")
RATING_NAMES = ("rating", "ratings", "stars", "score", "overall", "review_score")
YES = r"(?i)\s*(yes|y|true|t|pos|positive|click|clicked|won|win|good|like|buy|>.*)\s*"
MOST_STARS = 11  # different numbers of a rating
FEWEST = 10  # rows of each class, for an evaluation that says something
TAIL = 0.1  # of the rows, for evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    column: ColumnFacts
    text: str  # as in --label
    prepare: Prepare
    why: str
    ones: Bools  # of the sample

    @property
    def name(self) -> str:
        return self.column.name


def label_of(data: DataSet, wish: str) -> Label:
    """`wish`: as in --label; "" for none. Raises ConfigError if it cannot be met, or no column is a label."""
    if wish and data.named(wish) is None and (found := re.fullmatch(r"(.*?)\s*(>=|==?)(.*)", wish)):
        return made_label(data, *found.groups())
    if wish:
        column = known(data, "--label", wish)
        if not column.is_binary:
            held = f"a label is 0 or 1 in every row, and this column holds {no_label(column)}"
            raise ConfigError(f"--label {column.name}: {held}{otherwise(data, [column])}")
        return as_it_is(data, column, "by --label")
    binary = [column for column in data.columns if column.is_binary]
    named = [column for name in LABEL_NAMES for column in data.columns if bare(column) == name]
    by_name = [column for column in named if column.is_binary]
    if by_name:
        return as_it_is(data, by_name[0], "by its name")
    nearly = [column for column in named if is_nearly_binary(column)]
    if len(binary) == 1 and not nearly:
        return as_it_is(data, binary[0], "the only column of 0 and 1")
    if binary and not nearly:
        flags = [column.name for column in binary]
        likely = f"say which is the label: {option('--label', flags[-1])}"
        raise ConfigError(f"{data.path}: {len(flags)} columns hold 0 and 1 ({listed(flags)}); {likely}")
    held = "; ".join(f"{column.name} holds {no_label(column)}" for column in named)
    if named and named[0].distinct < 2 and not named[0].missing.count:
        raise ConfigError(
            f"{data.path}: no column holds 0 and 1 in every row, as a label does ({held}); add rows with another "
            "value, or --label names another column"
        )
    raise ConfigError(
        f"{data.path}: no column holds 0 and 1 in every row, as a label does{held and f' ({held})'}"
        + otherwise(data, [*named, *likely_labels(data), *reversed(binary)])
    )


def known(data: DataSet, given: str, name: str) -> ColumnFacts:
    """Raises ConfigError for a name that no column has."""
    column = data.named(name)
    if column is None:
        found = [own.name for own in data.columns]
        raise ConfigError(
            f"{given} {name}: {data.path} has no such column{nearest(name, found)}; it has {listed(found)}"
        )
    return column


def bare(column: ColumnFacts) -> str:
    return column.name.strip().partition(":")[0].lower()


def as_it_is(data: DataSet, column: ColumnFacts, why: str) -> Label:
    words = {own: float(own in (*TRUE, "1")) for own in column.values}
    prepare = Prepare(map=words) if column.is_text else AS_IT_IS
    return Label(column=column, text=column.name, prepare=prepare, why=why, ones=column.numbers == 1)


def made_label(data: DataSet, name: str, relation: str, value: str) -> Label:
    """`rating>=4`, or `label=2`: 1 where it is 2."""
    column, text = known(data, "--label", name), f"{name}{relation}{value}"
    if column.missing.count:
        raise ConfigError(f"--label {text}: {column.missing.of(column.num_cells, 'missing')}; remove these rows")
    if relation == ">=":
        prepare = Prepare(at_least=number(text, value))
        if column.odd.count or column.kind not in ("integer", "number") or column.is_list:
            raise ConfigError(f"--label {text}: {column.name} holds {no_label(column)}; >= needs numbers")
    else:
        wanted = re.sub(r"\.0*$", "", value.strip()) if re.fullmatch(NUMBER, value) else value.strip()
        ones = [own for own in column.values if own.strip() == wanted]
        if not ones:
            held = listed(list(column.values)) or f"{column.distinct:,} values, too many to list"
            raise ConfigError(f"--label {text}: {column.name} never is {value.strip()}; it holds {held}")
        prepare = Prepare(map={own: float(own in ones) for own in column.values})
    own = prepared(data.sample[column.name].combine_chunks(), {column.name: prepare}, column.name, lambda i: data.path)
    if own.all() or not own.any():
        raise ConfigError(f"--label {text}: it is {own[0]:g} in every row; {column.name} holds {contents(column)}")
    return Label(column=column, text=text, prepare=prepare, why="by --label", ones=own == 1)


def number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"--label {text}: {value} is no number; >= needs one, and = takes any value") from None


def likely_labels(data: DataSet) -> list[ColumnFacts]:
    """Columns of ratings by their names, then those of two values, then those of few numbers; the last first."""
    own = [column for column in reversed(data.columns) if not re.fullmatch(names.ID, bare(column))]
    rated = [column for column in own if bare(column) in RATING_NAMES]
    few = [column for column in own if column.kind in ("integer", "number") and 2 < column.distinct <= MOST_STARS]
    return [*rated, *(column for column in own if len(column.values) == 2), *few]


def otherwise(data: DataSet, columns: list[ColumnFacts]) -> str:
    """The option that makes a label of one of the columns."""
    made = [own for column in columns if (own := expression(column))]
    if made:
        return f"; {option('--label', made[0])} makes one"
    return (
        "; to learn from a log of clicks alone, add rows without a click and a column of 0 and 1; --label NAME, or "
        "'NAME>=4', names one"
    )


def expression(column: ColumnFacts) -> str:
    """What makes a label of a column; "" if nothing does."""
    if column.is_binary:
        return column.name.strip()
    if column.missing.count or column.is_list or column.kind not in ("integer", "number", "text"):
        return ""
    if len(column.values) == 2:
        rare = min(column.values, key=lambda own: column.values[own])
        yes = next((own for own in column.values if re.fullmatch(YES, own)), rare)
        one = yes if column.kind == "text" else f"{column.high:g}"
        return f"{column.name}={one}"
    if is_nearly_binary(column):
        return f"{column.name}=1" * ("1" in column.values)
    if column.odd.count or column.kind == "text" or not column.high > column.low:
        return ""
    bound = 0.75 * column.high if column.low >= 0 else 0.5 * (column.low + column.high)
    return f"{column.name}>={np.ceil(bound) if column.whole or column.high > 2 else 0.5 * (column.low + column.high):g}"


def option(name: str, value: str) -> str:
    return f"{name} {shlex.quote(value)}"


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
    return {"text": "text", "time": "timestamps"}.get(column.kind, column.type)


def poor_evaluation(data: DataSet, label: Label) -> str:
    """What is wrong with the last rows as an evaluation; "" if nothing is."""
    first = data.num_rows - int(TAIL * data.num_rows)
    tail = label.ones[-(-first // data.step) :]
    rarer = min(tail.sum(), (~tail).sum()) * data.step
    if not len(tail) or rarer >= FEWEST:
        return ""
    found = f"only {'about ' * (data.step > 1)}{plural(int(rarer), 'row')}" if rarer else "no row"
    return (
        f"the last tenth, {data.num_rows - first:,} rows, is for evaluation and has {found} with {label.text} = "
        f"{int(tail.sum() <= (~tail).sum())}: its AUC says {'little' if rarer else 'nothing'}; shuffle the rows of the "
        "file, or name other rows with data.eval_path"
    )
