"""The role of each column: label, dense feature, ids, or none. RULES is the whole of it; docs/data.md explains it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc
from msgspec.structs import replace

from rowcast.analysis.new.columns import FEW, ColumnFacts, as_cells, matches, one_of, shown
from rowcast.analysis.new.files import DataSet
from rowcast.analysis.new.labels import (
    CLOCKS,
    CODE,
    CODE_WORD,
    FIRST_OF_MEASURE,
    ID,
    INDEX,
    MEASURE,
    MEASURE_WORD,
    NO_ID,
    ROW,
    SECOND_LABEL,
    TIME,
    Label,
    contents,
    known,
    label_of,
    option,
)
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS, prepared
from rowcast.prefetcher.readers.formats.csv import FALSE, TRUE
from rowcast.runtime.arrays import F64, Bools
from rowcast.runtime.errors import ConfigError

Role = Literal["dense", "ids", "weights", "left out"]

# Values
EXACT = 2.0**53  # beyond, a float cannot tell neighbouring integers apart: no one measured them
FEW_FRACTIONS = 0.01  # in a column of integers that are ids
FILLED = 0.5  # integers that fill this share of the range from 0 are numbered things; the lower half, counts
UNIQUE, MANY_ROWS = 0.9, 5000  # with this share of distinct values in as many rows, ids carry no information
NUMBERED = 4  # a range over the rows below which increasing numbers are numbers of rows, by any name
FEWEST_UNIQUE = 5  # rows that tell a number of rows by its name; 20 times as many without
FEW_CODES, LEAST_REPEATS = 50, 2  # codes are this few, or each is seen this often
CROWDED, BINS = 5.0, 64
ROUND = (1000, 100, 10, 5)
FEWEST_COUNTS = 5  # different numbers
CHANCE = 5e-3  # that a column has a value, or not its commonest one, only where the label is 1
BUCKETS = 32  # at most, for a dense feature
FEWEST_BUCKETS, MOST_BUCKETED = 4, 1_000_000  # different numbers that need buckets; rows that need none
HEAVY = 10.0  # the 99th percentile over the median (+ 1) of counts, from which a logarithm helps
ROWS_A_VALUE = 10  # rows per value in a table of hashed ids: about a tenth of the values share their row with another
LEAST_HASHED = 100
WEIGHTS = "_weights"  # after the name of lists of ids
CRITEO = Prepare(fill=0.0, log1p=True)  # that its reader does


class Case(NamedTuple):
    """What a rule looks at."""

    c: ColumnFacts
    name: str  # without spaces and type
    typed: str  # RecBole's type: token, token_seq, float, float_seq or ""
    words: list[str]
    data: DataSet
    label: Label


class Clue(NamedTuple):
    role: Role
    holds: Callable[[Case], bool]
    why: str  # filled with what `TOLD` has
    instead: str = ""  # the option that chooses otherwise; a choice with one is doubtful


AT_ONCE = "a timestamp is not a feature; docs/data.md makes hour and weekday of it"
RULES = (
    Clue("left out", lambda k: not k.c.num_values, "it has no values"),
    Clue("left out", lambda k: k.c.kind == "other", "{type} cannot be read"),
    Clue("left out", lambda k: is_index(k), "it numbers the rows, as the index of pandas does"),
    Clue("left out", lambda k: k.c.kind == "time", AT_ONCE + "{odd_time}"),
    Clue("left out", lambda k: bool(clock_of(k)), "{clock}: " + AT_ONCE, "--ids"),
    Clue("weights", lambda k: bool(weighted_by(k)), "by its name: a number for each item of {weighted}"),
    Clue("left out", lambda k: k.typed == "float_seq" or (k.c.is_list and k.c.kind == "number" and not k.c.whole),
         "lists of numbers are not features; those of ids NAME may be their weights, as NAME_weights"),
    Clue("left out", lambda k: is_constant(k.c), "every value is the same"),
    Clue("left out", lambda k: k.c.is_flag and any(re.fullmatch(SECOND_LABEL, word) for word in k.words),
         "by its name another label, which is unknown when {label} is predicted", "--dense"),
    Clue("left out", lambda k: bool(tale_of(k)), "it tells {label}: {tale}", "{either}"),
    Clue("left out", lambda k: k.c.pairs, "pairs key:weight; write keys and weights as two columns of lists", "--ids"),
    Clue("left out", lambda k: is_row_number(k), "every row has a value of its own", "--ids"),
    Clue("left out", lambda k: is_unique(k), "nearly every row has a value of its own", "--ids"),

    Clue("ids", lambda k: k.typed.startswith("token"), "its type is {typed}"),
    Clue("ids", lambda k: k.c.is_list, "lists of {items}"),
    Clue("ids", lambda k: is_prose(k), "text with spaces, whose words repeat little", "--lists"),
    Clue("ids", lambda k: k.c.kind == "text" and 0 < k.c.odd.count < 0.5 * k.c.num_values and bool(len(measured(k.c))),
         "{odd}; hashed as text"),
    Clue("ids", lambda k: k.c.kind == "text", "text"),

    # numbers from here on
    Clue("ids", lambda k: bool(k.c.odd.count or k.c.absent.count) and (is_named_id(k) or is_code(k)),
         "{odd}; hashed as text"),
    Clue("left out", lambda k: bool(k.c.odd.count), "{odd}; correct it", "--ids"),
    Clue("dense", lambda k: k.typed == "float", "its type is float"),
    Clue("left out", lambda k: is_nearly_whole(k), "{fractions}", "--dense"),
    Clue("dense", lambda k: not k.c.whole, "numbers with fractions"),
    Clue("ids", lambda k: is_named_id(k), "by its name"),
    Clue("ids", lambda k: re.fullmatch(CODE, k.name) is not None, "codes, by its name"),
    Clue("ids", lambda k: is_code(k), "codes, by its name"),
    Clue("dense", lambda k: k.c.is_flag, "0 and 1"),
    Clue("dense", lambda k: is_measure(k), "a measure or a count, by its name"),
    Clue("ids", lambda k: k.c.padded, "numbers that begin with 0"),
    Clue("ids", lambda k: max(-k.c.low, k.c.high) > EXACT, "whole numbers beyond 2**53"),
    Clue("ids", lambda k: k.c.name in shared_numbering(k), "the columns {stem} share one numbering"),
    Clue("dense", lambda k: is_count(k.c), "whole numbers, the smaller the more frequent: a count", "--ids"),
    Clue("ids", lambda k: k.c.distinct <= FEW_CODES and is_numbered(k.c),
         "{distinct} whole numbers from 0 on that leave few gaps", "--dense"),
    Clue("ids", lambda k: crowding(k.c) >= CROWDED, "{distinct} whole numbers that come again, as codes do", "--dense"),
    Clue("dense", lambda k: True, "{distinct} whole numbers, as of a measure", "--ids"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    label: str
    dense: Sequence[str]
    ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleChoice:
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
    choices: list[RoleChoice]

    def of(self, role: Role) -> list[RoleChoice]:
        return [choice for choice in self.choices if choice.role == role]


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
    if not any(choice.role == "ids" or choice.prepare.buckets for choice in choices):
        raise ConfigError(
            f"{data.path}: no column looks like ids (text, lists, codes), and none is a number to look up by ranges; "
            "name some with --ids"
        )
    return ChosenRoles(label=label, choices=choices)


def chosen(case: Case, is_dense: bool, is_ids: bool) -> RoleChoice:
    c, rule = case.c, next(clue for clue in RULES if clue.holds(case))
    if is_dense:
        require_dense(c)
        rule = Clue("dense", rule.holds, "by --dense")
    if is_ids:
        if (c.kind in ("time", "other") and c.type != "text") or not c.num_values:
            raise ConfigError(f"--ids {c.name}: ids are text or integers, and the column's type is {c.type}")
        rule = Clue("ids", rule.holds, "by --ids")
    why, value = reason_of(rule, case), c.name + "= " * (rule.instead == "--lists")
    given = rule.instead.format(either="--ids" if c.kind == "text" or is_named_id(case) else "--dense")
    instead = given and option(given, value)
    if rule.role == "ids":
        hashed = is_hashed(c)
        size = ROWS_A_VALUE * c.distinct + 1 if hashed else with_room(int(c.high) + 1)
        return RoleChoice(
            column=c, role="ids", why=why, instead=instead, hashed=hashed,
            num_embeddings=max(LEAST_HASHED * hashed, rounded_up(size)),
        )  # fmt: skip
    is_criteo = case.data.shape.kind == "criteo-tsv"
    prepare = AS_IT_IS if rule.role != "dense" else CRITEO if is_criteo else bucketed(case.data, prepare_of(c), c)
    return RoleChoice(column=c, role=rule.role, why=why, instead=instead, prepare=prepare)


def case_of(data: DataSet, label: Label, column: ColumnFacts) -> Case:
    name, _, typed = column.name.strip().partition(":")
    is_typed = typed in ("token", "token_seq", "float", "float_seq")
    name = name if is_typed else column.name.strip()
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    return Case(column, name, typed if is_typed else "", words, data, label)


def odd_of(case: Case) -> str:
    c = case.c
    other, what = (c.odd, "no timestamp" if c.kind == "time" else "no number") if c.odd.count else (c.absent, "missing")
    return other.of(c.num_cells, what) if other.count else ""


def reason_of(rule: Clue, case: Case) -> str:
    """Fills the rule's reason; only what it names is computed."""
    named = [name for _, name, _, _ in Formatter().parse(rule.why) if name]
    return rule.why.format_map({name: TOLD[name](case) for name in named})


def last_word(case: Case) -> str:
    return next((word for word in reversed(case.words) if not word.isdigit()), "")


def is_named_id(case: Case) -> bool:
    return re.fullmatch(ID, case.name) is not None and not re.fullmatch(NO_ID, case.name)


def is_code(case: Case) -> bool:
    return re.fullmatch(CODE_WORD, last_word(case)) is not None and not is_measure(case)


def is_measure(case: Case) -> bool:
    return (
        any(re.fullmatch(pattern, case.name) for pattern in (MEASURE, NO_ID))
        or re.fullmatch(FIRST_OF_MEASURE, case.words[0] if case.words else "") is not None
        or re.fullmatch(MEASURE_WORD, last_word(case)) is not None
        or "per" in case.words
    )


def is_nearly_whole(case: Case) -> bool:
    """Whether numbers would be ids without a few that are not whole."""
    c = case.c
    ids = is_named_id(case) or is_code(case) or (is_numbered(c) and c.high > 1 and not is_measure(case))
    return ids and not c.whole and not c.mark and c.fractions.count <= FEW_FRACTIONS * c.num_values


def is_constant(c: ColumnFacts) -> bool:
    is_odd = c.odd.count and c.kind != "text"
    return c.distinct < 2 and not (c.missing.count or c.absent.count or is_odd or c.is_list)


def is_index(case: Case) -> bool:
    return re.fullmatch(INDEX, case.name) is not None and is_increasing(case.c)


def is_increasing(c: ColumnFacts) -> bool:
    return c.kind == "integer" and not c.missing.count and len(c.numbers) > 1 and bool((np.diff(c.numbers) > 0).all())


def is_row_number(case: Case) -> bool:
    """Whether the column numbers or names the rows."""
    c, num_rows = case.c, case.data.num_rows
    unique = c.kind in ("integer", "text") and not c.is_list and c.distinct >= 0.99 * num_rows and not c.missing.count
    named = re.fullmatch(ROW, case.name) is not None
    least = FEWEST_UNIQUE if named else 20 * FEWEST_UNIQUE
    is_name = named or (c.kind == "text" and (is_named_id(case) or c.num_spaces < c.num_values))
    is_numbered = is_increasing(c) and (not is_measure(case) or c.high - c.low < NUMBERED * num_rows)
    return unique and num_rows >= least and (is_name or is_numbered)


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
    named = re.fullmatch(TIME, case.name) is not None
    of = (
        what
        for what, form, by_name in CLOCKS
        if (named or not by_name) and all(re.fullmatch(form, text) for text in texts)
    )
    return next(of, "")


def tale_of(case: Case) -> str:
    """How a column tells the label: it is given, or not its commonest value, only where the label is one class, or all
    its numbers are larger or smaller where it is 1. "" if it does not."""
    c, ones, name = case.c, case.label.ones, case.label.text
    if c.is_list or case.label.is_number:
        return ""
    values = case.data.sample[c.name].combine_chunks()
    cells = as_cells(values)
    given = cells.is_valid().to_numpy(zero_copy_only=False) & ~matches(cells, r"^$")
    signs = [(given, "it has a value")]
    if c.kind in ("integer", "number"):
        usual = commonest(c.numbers[given])
        signs.append((given & (c.numbers != usual), f"it is not {usual:g}"))
    elif c.kind == "text" and given.any():
        most = max(pc.value_counts(cells.drop_null()).to_pylist(), key=lambda own: own["counts"])["values"]
        signs.append((given & ~one_of(cells, (most,)), f"it is not {shown(most)}"))
    for sign, what in signs:
        for of, one in ((ones, 1), (~ones, 0)):
            if not (sign & ~of).any() and chance(int(sign.sum()), of) < CHANCE:
                return f"{what} only where {name} is {one}"
    if c.kind not in ("integer", "number") or c.odd.count or is_named_id(case) or is_code(case):
        return ""
    where, other = (numbers[np.isfinite(numbers)] for numbers in (c.numbers[ones], c.numbers[~ones]))
    if min(len(where), len(other)) < 2 * FEWEST_UNIQUE or not (where.min() > other.max() or where.max() < other.min()):
        return ""
    return f"its numbers are larger, or smaller, in all rows where {name} is 1"


TOLD: dict[str, Callable[[Case], str]] = {  # what the reasons of rules name
    "type": lambda k: k.c.type,
    "typed": lambda k: k.typed,
    "label": lambda k: k.label.text,
    "odd": odd_of,
    "odd_time": lambda k: f"; {odd_of(k)}" if odd_of(k) else "",
    "clock": clock_of,
    "stem": lambda k: stem_of(k.c),
    "distinct": lambda k: f"{k.c.distinct:,}",
    "items": lambda k: "text" if k.c.kind == "text" else "whole numbers",
    "fractions": lambda k: f"{k.c.fractions.of(k.c.num_cells, 'no integer')}; correct it",
    "tale": tale_of,
    "weighted": lambda k: weighted_by(k),
}


def weighted_by(case: Case) -> str:
    """The lists of ids whose weights are the case's lists; "" if none are."""
    ids = case.data.named(case.name.removesuffix(WEIGHTS))
    is_pair = case.c.is_list and case.c.kind in ("integer", "number") and ids is not case.c
    return ids.name if is_pair and ids is not None and ids.is_list else ""


def commonest(numbers: F64) -> float:
    values, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
    return float(values[np.argmax(counts)]) if len(values) else math.nan


def chance(count: int, of: Bools) -> float:
    """That `count` rows drawn from all lie within those of `of`."""
    within = range(int(of.sum()), int(of.sum()) - count, -1)
    return math.prod(number / (len(of) - at) for at, number in enumerate(within)) if count else 1.0


def measured(c: ColumnFacts) -> F64:
    """Numbers of the sample; -1 means missing where others are codes."""
    numbers: F64 = c.numbers[np.isfinite(c.numbers) & (c.numbers != -1)]
    return numbers


def is_numbered(c: ColumnFacts) -> bool:
    """Whether integers fill their range from 0 on, as numbered things do."""
    return c.low >= 0 and c.distinct >= FILLED * (c.high + 1)


def is_count(c: ColumnFacts) -> bool:
    """Whether 0 or 1 is the commonest, and each next quarter of the values up to the 90th percentile is rarer."""
    numbers = measured(c)
    if not len(numbers) or numbers.min() < 0 or commonest(numbers) > 1 or c.distinct < FEWEST_COUNTS:
        return False
    values = np.arange(numbers.min(), max(np.percentile(numbers, 90), numbers.min() + FEWEST_COUNTS - 1) + 1)
    quarters = np.array_split(np.bincount((numbers - numbers.min()).astype(np.int64))[: len(values)], 4)
    return all(after.mean() < before.mean() for before, after in pairwise(quarters))


def crowding(c: ColumnFacts) -> float:
    """How much more often two rows share a number than if neighbouring numbers were alike: about 1 for measures, more
    for codes; 0 if numbers hardly come again. The commonest one does not count, and where most numbers are round, they
    alone do, in steps of 1."""
    numbers = measured(c)
    numbers = numbers[numbers != commonest(numbers)].astype(np.int64)
    numbers = (
        next((numbers[numbers % step == 0] for step in ROUND if (numbers % step == 0).mean() >= 0.5), numbers)
        if len(numbers)
        else numbers
    )
    if len(numbers) < LEAST_REPEATS * len(np.unique(numbers)) or not len(numbers):
        return 0.0
    numbers = numbers - numbers.min()
    numbers = np.sort(numbers // max(1, int(np.gcd.reduce(numbers))))
    pairs = np.unique(numbers, return_counts=True)[1].astype(np.float64)
    edges = np.unique(numbers[:: max(1, len(numbers) // BINS)])
    inside = np.histogram(numbers, [*edges, numbers[-1] + 1])[0].astype(np.float64)
    alike = (inside * inside / np.diff([*edges, numbers[-1] + 1])).sum()
    return float((pairs * pairs).sum() / alike)


def stem_of(c: ColumnFacts) -> str:
    return re.sub(r"\d+", "*", c.name)


def shared_numbering(case: Case) -> list[str]:
    """The columns of one name but for its number, if their ranges are disjoint and they are three or more."""
    stem = stem_of(case.c)
    columns = [c for c in case.data.columns if stem_of(c) == stem and c.kind == "integer" and "*" in stem]
    columns.sort(key=lambda c: c.low)
    apart = all(after.low > before.high for before, after in pairwise(columns))
    return [c.name for c in columns] if len(columns) > 2 and apart else []


def is_hashed(c: ColumnFacts) -> bool:
    """Integers from 0 up that leave few gaps are rows; everything else is hashed."""
    sparse = c.distinct < FILLED / 5 * (c.high + 1) and c.high >= 1000
    rows = (
        c.kind == "integer" and c.plain and not (c.missing.count or c.absent.count or c.padded or c.low < 0 or sparse)
    )
    return not rows


def prepare_of(c: ColumnFacts) -> Prepare:
    """What its cells mean, and how the feature gets a mean of 0 and a deviation of 1; 0 and 1 stay."""
    words = {word: float(word in TRUE) for word in c.values if word in (*TRUE, *FALSE)} if c.words else {}
    meaning = Prepare(missing=c.absent_texts, map=words, number=c.mark_of_text)
    numbers = c.numbers[np.isfinite(c.numbers)]
    if c.is_flag:
        return replace(meaning, fill=0.0)
    middle, most = np.percentile(numbers, [50, 99])
    heavy = bool(c.low >= -FEW * max(most, 1) and most > HEAVY * (max(middle, 0) + 1))
    fill = 0.0 if heavy else short(float(middle))
    filled = np.append(numbers, np.full(len(c.numbers) - len(numbers), fill))
    scaled = np.log1p(np.maximum(filled, 0)) if heavy else filled
    mean, spread = float(scaled.mean()), float(scaled.std())
    return replace(
        meaning,
        fill=fill,
        least=0.0 if heavy else None,
        log1p=heavy,
        standardize=(round(mean, 3 - math.floor(math.log10(spread))), short(spread)) if spread else None,
    )


def bucketed(data: DataSet, prepare: Prepare, c: ColumnFacts) -> Prepare:
    """With bounds at quantiles of the prepared numbers: a model learns thresholds poorly from one number."""
    if data.num_rows >= MOST_BUCKETED:
        return prepare
    numbers = prepared(data.sample[c.name].combine_chunks(), {c.name: prepare}, c.name, lambda i: data.path)
    values, usual = np.unique(numbers), commonest(numbers)
    if len(values) < FEWEST_BUCKETS:
        return prepare
    quantiles = np.quantile(numbers[numbers != usual], np.linspace(0, 1, BUCKETS + 1)[:-1], method="higher")
    bounds = np.unique([float(f"{bound:.6g}") for bound in (*quantiles, usual, *values[values > usual][:1])])
    return replace(prepare, buckets=bounds[bounds > values[0]].tolist())


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
