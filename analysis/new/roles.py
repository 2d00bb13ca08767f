"""The role of each column: label, dense feature, ids, or none. RULES is the whole of it; docs/data.md explains it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from rowcast.analysis.new import names
from rowcast.analysis.new.columns import FEW, ColumnFacts
from rowcast.analysis.new.files import DataSet
from rowcast.analysis.new.labels import Label, contents, known, label_of, option
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import ConfigError

Role = Literal["dense", "ids", "left out"]

# Values
EXACT = 2.0**53  # beyond, a float cannot tell neighbouring integers apart: no one measured them
FEW_FRACTIONS = 0.01  # in a column of integers that are ids
FILLED = 0.5  # integers that fill this share of the range from 0 are numbered things; the lower half, counts
UNIQUE, MANY_ROWS = 0.9, 5000  # with this share of distinct values in as many rows, ids carry no information
FEWEST_UNIQUE = 5  # rows that tell a number of rows by its name; 20 times as many without
MOST_CODES, LEAST_REPEATS = 4096, 3  # codes are few, and each is seen this often
CHANCE = 1e-3  # that a column is 1 only where the label is
HEAVY = 10.0  # the 99th percentile over the median (+ 1) of counts, from which a logarithm helps
ROWS_A_VALUE = 10  # rows per value in a table of hashed ids: about a tenth of the values share their row with another
LEAST_HASHED = 100
CRITEO = Prepare(fill=0.0, log1p=True)  # that its reader does


class Case(NamedTuple):
    """What a rule looks at."""

    c: ColumnFacts
    name: str  # without spaces and type
    typed: str  # RecBole's type: token, token_seq, float, float_seq or ""
    words: list[str]
    data: DataSet
    label: Label


class Rule(NamedTuple):
    role: Role
    holds: Callable[[Case], bool]
    why: str  # filled with what `told` has
    instead: str = ""  # the option that chooses otherwise; a choice with one is doubtful


AT_ONCE = "a timestamp is not a feature; docs/data.md makes hour and weekday of it"
RULES = (
    Rule("left out", lambda k: not k.c.num_values, "it has no values"),
    Rule("left out", lambda k: k.c.kind == "other", "{type} cannot be read"),
    Rule("left out", lambda k: is_index(k), "it numbers the rows, as the index of pandas does"),
    Rule("left out", lambda k: k.c.kind == "time", AT_ONCE + "{odd_time}"),
    Rule("left out", lambda k: bool(clock_of(k)), "{clock}: " + AT_ONCE, "--ids"),
    Rule("left out", lambda k: k.typed == "float_seq" or (k.c.is_list and k.c.kind == "number" and not k.c.whole),
         "lists of numbers are not features; for weights of ids use data.columns.weights"),
    Rule("left out", lambda k: is_constant(k.c), "every value is the same"),
    Rule("left out", lambda k: k.c.is_flag and (k.words[:1] == ["is"] or any(map(is_event, k.words))),
         "by its name another label, which is unknown when {label} is predicted", "--dense"),
    Rule("left out", lambda k: tells_label(k), "it tells {label}: {tells}", "--dense"),
    Rule("left out", lambda k: k.c.pairs, "pairs key:weight; write keys and weights as two columns of lists", "--ids"),
    Rule("left out", lambda k: is_row_number(k), "every row has a value of its own", "--ids"),
    Rule("left out", lambda k: is_unique(k), "nearly every row has a value of its own", "--ids"),

    Rule("ids", lambda k: k.typed.startswith("token"), "its type is {typed}"),
    Rule("ids", lambda k: k.c.is_list, "lists of {items}"),
    Rule("ids", lambda k: is_prose(k), "text with spaces, whose words repeat little", "--lists"),
    Rule("ids", lambda k: k.c.kind == "text" and 0 < k.c.odd.count < 0.5 * k.c.num_values,
         "{odd}; hashed as text"),
    Rule("ids", lambda k: k.c.kind == "text", "text"),

    # numbers from here on
    Rule("left out", lambda k: k.c.is_text and not is_named_id(k) and not is_code(k) and not k.c.padded,
         "numbers in text, of type {type}; write numbers (pandas.to_numeric)", "--ids"),
    Rule("ids", lambda k: bool(k.c.odd.count) and (is_named_id(k) or is_code(k)), "{odd}; hashed as text"),
    Rule("left out", lambda k: bool(k.c.odd.count), "{odd}; {remedy}", "--ids"),
    Rule("dense", lambda k: k.typed == "float", "its type is float"),
    Rule("left out", lambda k: is_nearly_whole(k), "{fractions}", "--dense"),
    Rule("dense", lambda k: not k.c.whole, "numbers with fractions"),
    Rule("ids", lambda k: is_named_id(k), "by its name"),
    Rule("ids", lambda k: re.fullmatch(names.CODE, k.name) is not None, "codes, by its name"),
    Rule("ids", lambda k: is_code(k), "codes, by its name"),
    Rule("dense", lambda k: k.c.is_flag, "0 and 1"),
    Rule("dense", lambda k: is_measure(k), "a measure or a count, by its name"),
    Rule("ids", lambda k: k.c.padded, "numbers that begin with 0"),
    Rule("ids", lambda k: max(-k.c.low, k.c.high) > EXACT, "whole numbers beyond 2**53"),
    Rule("ids", lambda k: is_numbered(k.c), "whole numbers from 0 on that leave few gaps"),
    Rule("ids", lambda k: k.c.name in shared_numbering(k), "the columns {stem} share one numbering"),
    Rule("dense", lambda k: is_count(k.c), "whole numbers, most of them small: a count"),
    Rule("ids", lambda k: repeats(k.c) and has_gaps(k.c), "{distinct} whole numbers with gaps, as codes", "--dense"),
    Rule("dense", lambda k: True, "whole numbers"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    label: str
    dense: Sequence[str]
    ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What becomes of a column, and why. `hashed` and `num_embeddings` are of ids, `prepare` of dense features."""

    column: ColumnFacts
    role: Role
    why: str
    instead: str  # the option that chooses otherwise; "" where there is little doubt
    hashed: bool = False
    num_embeddings: int = 0
    prepare: Prepare = AS_IT_IS


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRoles:
    label: Label
    choices: list[Choice]

    def of(self, role: Role) -> list[Choice]:
        return [own for own in self.choices if own.role == role]


def choose(data: DataSet, wish: Wish) -> ChosenRoles:
    """Raises ConfigError if a wish cannot be met, or no label or no ids are found."""
    dense, ids = (
        [known(data, given, name) for name in names] for given, names in (("--dense", wish.dense), ("--ids", wish.ids))
    )
    label = label_of(data, wish.label)
    choices = [
        chosen(case_of(data, label, column), column in dense, column in ids)
        for column in data.columns
        if column.name != label.name
    ]
    if not any(own.role == "ids" for own in choices):
        raise ConfigError(f"{data.path}: no column looks like ids (text, lists, codes); name some with --ids")
    return ChosenRoles(label=label, choices=choices)


def chosen(case: Case, is_dense: bool, is_ids: bool) -> Choice:
    c, rule = case.c, next(own for own in RULES if own.holds(case))
    if is_dense:
        require_dense(c)
        rule = Rule("dense", rule.holds, "by --dense")
    if is_ids:
        if (c.kind in ("time", "other") and c.type != "text") or not c.num_values:
            raise ConfigError(f"--ids {c.name}: ids are text or integers, and the column's type is {c.type}")
        rule = Rule("ids", rule.holds, "by --ids")
    why, value = rule.why.format_map(told(case)), c.name + "= " * (rule.instead == "--lists")
    instead = rule.instead and option(rule.instead, value)
    if rule.role == "ids":
        hashed = is_hashed(c)
        size = ROWS_A_VALUE * c.distinct + 1 if hashed else with_room(int(c.high) + 1)
        return Choice(
            column=c, role="ids", why=why, instead=instead, hashed=hashed,
            num_embeddings=max(LEAST_HASHED * hashed, rounded_up(size)),
        )  # fmt: skip
    prepare = AS_IT_IS if rule.role != "dense" else CRITEO if case.data.shape.kind == "criteo-tsv" else scaling(c)
    return Choice(column=c, role=rule.role, why=why, instead=instead, prepare=prepare)


def case_of(data: DataSet, label: Label, column: ColumnFacts) -> Case:
    name, _, typed = column.name.strip().partition(":")
    is_typed = typed in ("token", "token_seq", "float", "float_seq")
    name = name if is_typed else column.name.strip()
    words = [own.lower() for own in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    return Case(column, name, typed if is_typed else "", words, data, label)


def told(case: Case) -> dict[str, str]:
    """What the reasons of rules name."""
    c, label = case.c, case.label
    odd = c.odd.of(c.num_cells, "no timestamp" if c.kind == "time" else "no number") if c.odd.count else ""
    larger = f"its numbers are larger, or smaller, in all rows where {label.text} is 1"
    return {
        "type": c.type,
        "typed": case.typed,
        "label": label.text,
        "odd": odd,
        "odd_time": odd and f"; {odd}",
        "remedy": "write a decimal point, no separators or units"
        if re.search(r"\d", c.odd.value)
        else "correct it"
        if not re.fullmatch(r"(?i:null|none|n/?a|#n/a|nan|\\n|-|\?)", c.odd.value.strip())
        else f"pandas.read_csv({case.data.path!r}).to_parquet('log.parquet') makes NULL and N/A missing values",
        "clock": clock_of(case),
        "stem": stem_of(c),
        "distinct": f"{c.distinct:,}",
        "items": "text" if c.kind == "text" else "whole numbers",
        "fractions": c.fractions.of(c.num_cells, "no integer") + "; correct it" if c.fractions.count else "",
        "tells": f"it is 1 only where {label.text} is 1" if c.is_flag else larger,
    }


def last_word(case: Case) -> str:
    return next((word for word in reversed(case.words) if not word.isdigit()), "")


def is_named_id(case: Case) -> bool:
    return re.fullmatch(names.ID, case.name) is not None and not re.fullmatch(names.NO_ID, case.name)


def is_code(case: Case) -> bool:
    return re.fullmatch(names.CODE_WORD, last_word(case)) is not None and not is_measure(case)


def is_measure(case: Case) -> bool:
    return (
        any(re.fullmatch(own, case.name) for own in (names.MEASURE, names.NO_ID))
        or re.fullmatch(names.FIRST_OF_MEASURE, case.words[0] if case.words else "") is not None
        or re.fullmatch(names.MEASURE_WORD, last_word(case)) is not None
        or "per" in case.words
    )


def is_event(word: str) -> bool:
    return re.fullmatch(names.SECOND_LABEL, word) is not None


def is_nearly_whole(case: Case) -> bool:
    """Whether numbers would be ids without a few that are not whole."""
    c = case.c
    ids = is_named_id(case) or is_code(case) or (is_numbered(c) and c.high > 1 and not is_measure(case))
    return ids and not c.whole and c.fractions.count <= FEW_FRACTIONS * c.num_values


def repeats(c: ColumnFacts) -> bool:
    return c.distinct <= MOST_CODES and c.num_values >= LEAST_REPEATS * c.distinct


def is_constant(c: ColumnFacts) -> bool:
    return c.distinct < 2 and not (c.missing.count or c.odd.count or c.is_list)


def is_index(case: Case) -> bool:
    return re.fullmatch(names.INDEX, case.name) is not None and is_increasing(case.c)


def is_increasing(c: ColumnFacts) -> bool:
    return c.kind == "integer" and not c.missing.count and len(c.numbers) > 1 and bool((np.diff(c.numbers) > 0).all())


def is_row_number(case: Case) -> bool:
    """Whether the column numbers or names the rows."""
    c, num_rows = case.c, case.data.num_rows
    unique = c.kind in ("integer", "text") and not c.is_list and c.distinct >= 0.99 * num_rows and not c.missing.count
    named = re.fullmatch(names.ROW, case.name) is not None
    least = FEWEST_UNIQUE if named else 20 * FEWEST_UNIQUE
    return unique and num_rows >= least and (named or (is_increasing(c) and not is_measure(case)))


def is_unique(case: Case) -> bool:
    c = case.c
    ids = c.kind == "text" or (c.whole and is_named_id(case))
    return ids and not c.is_list and c.num_values >= MANY_ROWS and c.distinct > UNIQUE * c.num_values


def is_prose(case: Case) -> bool:
    c = case.c
    return c.kind == "text" and c.distinct > 0.2 * c.num_values and c.num_spaces >= c.num_values


def clock_of(case: Case) -> str:
    """What kind of time a column of numbers is; "" if none."""
    c = case.c
    if c.kind not in ("integer", "number") or c.is_list or is_named_id(case) or not c.low > 0:
        return ""
    numbers = np.unique(c.numbers[np.isfinite(c.numbers)])[:1000].tolist()
    texts = [str(int(number) if number.is_integer() else number) for number in numbers]
    named = re.fullmatch(names.TIME, case.name) is not None
    of = (
        what
        for what, form, by_name in names.CLOCKS
        if (named or not by_name) and all(re.fullmatch(form, own) for own in texts)
    )
    return next(of, "")


def tells_label(case: Case) -> bool:
    """Whether numbers are 1 only where the label is 1, or all larger or all smaller where it is 1."""
    c, ones = case.c, case.label.ones
    if c.kind not in ("integer", "number") or c.is_list or c.odd.count or is_named_id(case) or is_code(case):
        return False
    if c.is_flag:
        own = c.numbers == 1
        return not (own & ~ones).any() and ones.mean() ** own.sum() < CHANCE
    where, other = (numbers[np.isfinite(numbers)] for numbers in (c.numbers[ones], c.numbers[~ones]))
    if min(len(where), len(other)) < 2 * FEWEST_UNIQUE:
        return False
    return bool(where.min() > other.max() or where.max() < other.min())


def measured(c: ColumnFacts) -> F64:
    """Numbers of the sample; -1 means missing where others are codes."""
    own: F64 = c.numbers[np.isfinite(c.numbers) & (c.numbers != -1)]
    return own


def is_numbered(c: ColumnFacts) -> bool:
    """Whether integers fill their range from 0 on, as numbered things do."""
    return c.low >= 0 and c.distinct >= FILLED * (c.high + 1)


def has_gaps(c: ColumnFacts) -> bool:
    own = measured(c)
    return len(own) > 0 and c.distinct < FILLED * (own.max() - own.min() + 1)


def is_count(c: ColumnFacts) -> bool:
    """Whether the smaller half of the values fills its range from about 0 on, and the larger half does not."""
    own = measured(c)
    if not len(own) or own.min() > 1:
        return False
    lower = own[own <= np.median(own)]
    return bool(len(np.unique(lower)) >= FILLED * (lower.max() - lower.min() + 1))


def stem_of(c: ColumnFacts) -> str:
    return re.sub(r"\d+", "*", c.name)


def shared_numbering(case: Case) -> list[str]:
    """The columns of one name but for its number, if their ranges are disjoint and they are three or more."""
    stem = stem_of(case.c)
    own = [c for c in case.data.columns if stem_of(c) == stem and c.kind == "integer" and "*" in stem]
    own.sort(key=lambda c: c.low)
    apart = all(after.low > before.high for before, after in pairwise(own))
    return [c.name for c in own] if len(own) > 2 and apart else []


def is_hashed(c: ColumnFacts) -> bool:
    """Integers from 0 up that leave few gaps are rows; everything else is hashed."""
    sparse = c.distinct < FILLED / 5 * (c.high + 1) and c.high >= 1000
    rows = c.kind == "integer" and c.plain and not (c.missing.count or c.padded or c.low < 0 or sparse)
    return not rows


def scaling(c: ColumnFacts) -> Prepare:
    """How a dense feature gets a mean of 0 and a deviation of 1; 0 and 1 stay, but for missing ones."""
    own = c.numbers[np.isfinite(c.numbers)]
    if c.is_flag:
        return Prepare(fill=0.0) if c.missing.count else AS_IT_IS
    middle, most = np.percentile(own, [50, 99])
    heavy = bool(c.low >= -FEW * max(most, 1) and most > HEAVY * (max(middle, 0) + 1))
    fill = (0.0 if heavy else short(float(middle))) if c.missing.count else None
    filled = np.append(own, np.full(len(c.numbers) - len(own), fill or 0.0)) if fill is not None else own
    scaled = np.log1p(np.maximum(filled, 0)) if heavy else filled
    mean, spread = float(scaled.mean()), float(scaled.std())
    return Prepare(
        fill=fill,
        least=0.0 if heavy else None,
        log1p=heavy,
        standardize=(round(mean, 3 - math.floor(math.log10(spread))), short(spread)) if spread else None,
    )


def short(number: float) -> float:
    return float(f"{number:.4g}")


def require_dense(column: ColumnFacts) -> None:
    if column.kind not in ("integer", "number") or column.is_list or column.odd.count:
        raise ConfigError(
            f"--dense {column.name}: a dense feature is a number, and this column holds {contents(column)}"
            + (f"; {column.odd.of(column.num_cells, 'no number')}" if column.odd.count else "")
        )


def with_room(count: int) -> int:
    return -(-11 * count // 10)


def rounded_up(count: int) -> int:
    """To two digits: 20,001 -> 21,000."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step
