"""The label: which column it is, what makes 0 and 1 of it, and the option to write if no column is one as it is.

Patterns of column names, of features too. A name is without spaces around it and without RecBole's type; its words are
those of `user_id`, `userId` and `C14` (c, 14).
"""

import re
import shlex
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.new.columns import FEW, NUMBER, ColumnFacts
from rowcast.analysis.new.files import DataSet
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS, prepared
from rowcast.prefetcher.readers.formats.csv import TRUE
from rowcast.runtime.arrays import Bools
from rowcast.runtime.errors import ConfigError, listed, nearest
from rowcast.runtime.telemetry.format_numbers import plural

ID = r"(?i:.*ids?\W*)"
NO_ID = r"(?i:(|.*[_\W])(un|pre|in)?(bid|paid|valid|void|aid|kid|solid|liquid|fluid|acid|covid)s?)"
ROW = r"(?i:id|row|index|idx|uuid|guid|(request|impression|event|sample|row|log|record|instance)_?id)"
INDEX = r"|Unnamed: \d+|__index_level_\d+__"  # that pandas writes
CODE = r"(?i:C\d+|\d+|(cat|sparse|categorical)_?\d+)"
MEASURE = r"(?i:(I|int|dense|num|numerical|numeric|float|cont|continuous)_?\d+)"
TIME = r"(?i:.*(time|date|epoch|stamp)(_?(s|sec|ms|us|ns|utc|unix))?|(.*[_\W])?(ts|at|dt|day|hour|created|updated))"

# a whole word: the last one that is no number
CODE_WORD = (
    r"cat|category|categorical|code|type|class|segment|group|level|brand|customer|user|item|product|sku|gender|sex|job"
    r"|occupation|zip|zipcode|postal|postcode|city|country|region|state|province|device|os|browser|channel|campaign|ad"
    r"|advertiser|adgroup|pos|position|site|domain|app|shop|store|seller|vendor|slot|tag|genre|key|hash|version|status|model"
    r"|publisher|author|artist|album|visitor|session|network|carrier|biz|business|merchant|movie|film|song|track|video"
    r"|article|news|book|hotel|query|topic|ip|host|role|resource|agent|company"
)
MEASURE_WORD = (
    r"count|cnt|num|number|qty|quantity|amount|amt|price|cost|fee|fare|tax|income|salary|wage|revenue|stock|balance|budget"
    r"|gain|loss|age|year|yr|duration|dur|length|len|size|width|height|weight|distance|dist|depth|area|rate|ratio|pct"
    r"|percent|percentage|avg|average|mean|sum|total|min|max|std|rating|score|ms|dwell|lat|lon|latitude|longitude"
    r"|temperature|probability|prob|popularity|time|elapsed|delay|children|(?!news|series|.*(ss|us|is)$)[a-z]{3,}s"
)
FIRST_OF_MEASURE = (  # the first word
    r"n|num|nb|nr|number|count|cnt|total|sum|avg|mean|max|min|log|std|days|weeks|months|years|hours|minutes|seconds"
)
SECOND_LABEL = (  # any word
    r"click|clicked|clk|purchased?|conversion|converted|conv|cvr|buy|bought|order|ordered|pay|payment|liked?"
    r"|follow|followed|shared?|cart|install|installed|labels?|viewed|watched|played|downloaded|saved|commented|reposted"
    r"|forwarded|returned|refund|refunded|redeemed|cancell?ed|attributed|churn|churned|exited|fraud|fraudulent|dislike|disliked"
)

# whole numbers that are dates; whether only a name of a time makes them so
MMDD, HH = r"(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3])"
CLOCKS = (
    ("a date, YYYYMMDD", rf"(19|20)\d\d{MMDD}", False),
    ("a time, YYMMDDHH", rf"[0-4]\d{MMDD}{HH}", False),
    ("a time, YYYYMMDDHH", rf"(19|20)\d\d{MMDD}{HH}([0-5]\d){{0,2}}", False),
    ("a date, YYMMDD", rf"[0-4]\d{MMDD}", True),
    ("a month, YYYYMM", r"(19|20)\d\d(0[1-9]|1[0-2])", True),
    ("seconds since 1970", r"[1-9]\d{8,9}(\.\d+)?", True),
    ("milliseconds since 1970", r"[1-9]\d{11,12}(\.\d+)?", True),
    ("microseconds or nanoseconds since 1970", r"[1-9]\d{14,18}", True),
    ("serial days of a spreadsheet", r"[2-6]\d{4}(\.\d+)?", True),
)

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "clk", "target", "y", "ctr", "income")
# that features have, too: a column of these alone decides nothing unless it is the first or the last one
LIKELY_NAMES = (
    r"(?i)(is_?|has_?)?(class|churn(ed)?|exited|left|default(ed)?|defaulter|response|outcome|conver(sion|ted?)|attributed"
    r"|purchased?|bought|approved|survived|subscribed|deposit|fraud(ulent)?|spam|result|diagnosis|labels?|targets?|attrition"
    r"|no[_\W]?show|readmitted|reordered|satisfaction|sentiment|winner|species)\W*"
)
# words of a label among others, and names of what happened: these decide nothing alone
SPOKEN_NAMES = (
    r"(?i)(.*[_\W])?(churn(ed)?|default(ed)?|defaulter|outcome|conver(sion|ted?)|fraud(ulent)?|spam|claim|cancell?ed|failure)"
    r"([_\W].*)?|(loan|order|account|booking|payment|application)?[_\W]?status|event([_\W]?type)?|action|behaviou?r"
)
HAPPENED = r"(?i:\s*(buy|purchased?|transaction|churned|fraud|spam|charged off|successful|malignant|positive)\s*)"
# names of numbers that people predict
MEASURE_NAMES = (
    r"(?i)(.*[_\W]|average|avg|sale|selling|total|unit|median)?(prices?|charges|costs?|sales|salary|medv|revenue|value)"
    r"|(watch|play)_?time|target_?\w*|demand|points"
)
RATING_NAMES = ("rating", "ratings", "stars", "score", "overall", "review_score", "quality")
YES = rf"{HAPPENED}|(?i:\s*(yes|y|true|t|pos|click|clicked|won|win|good|like|acc|accept(ed)?|satisfied|>.*)\.?\s*)"
MOST_CLASSES = 20
FEWEST_MEASURED = 10  # different numbers
LONG = 1e8  # a column whose numbers all reach this holds times or ids
FEWEST = 10  # rows of each class, for an evaluation that says something
TAIL = 0.1  # of the rows, for evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    column: ColumnFacts
    text: str  # as in --label
    prepare: Prepare
    why: str
    ones: Bools  # rows of the sample whose label is 1; for a regression, those above the median
    target: tuple[float, float] = (0.0, 0.0)  # mean and deviation of the numbers that a regression predicts

    @property
    def is_number(self) -> bool:
        return self.target[1] > 0

    @property
    def share(self) -> str:
        if self.is_number:
            return f"a number, {self.column.low:g} to {self.column.high:g}"
        return f"1 in {100 * self.ones.mean():.3g} % of the rows"

    @property
    def name(self) -> str:
        return self.column.name


def label_of(data: DataSet, wish: str) -> Label:
    """`wish`: as in --label; "" for none. Raises ConfigError if it cannot be met, or no column is a label."""
    if wish and data.named(wish) is None and (match := re.fullmatch(r"(.*?)\s*(>=|==?)(.*)", wish)):
        return made_label(data, *match.groups())
    if wish:
        column = known(data, "--label", wish)
        if is_measure(column):
            return number_label(column)
        if not column.is_binary:
            held = f"a label is 0 or 1 in every row, and this column holds {no_label(column)}"
            raise ConfigError(f"--label {column.name}: {held}{otherwise(column)}")
        return as_it_is(data, column, "by --label")
    columns = [column for column in data.columns if column.num_values and not column.is_list]
    binary = [column for column in columns if column.is_binary]
    named = [column for name in LABEL_NAMES for column in columns if bare(column) == name]
    if sure := [column for column in named if column.is_binary]:
        return as_it_is(data, sure[0], "by its name")
    likely = [column for column in columns if re.fullmatch(LIKELY_NAMES, bare(column))]
    named += sorted(likely, key=lambda column: len(column.values) != 2)
    named += [column for column in columns if bare(column) in RATING_NAMES and expression(column)]
    named = [column for column in named if column.is_binary or not is_measure(column)] or named
    ends = [column for column in (columns[-1:] + columns[:1]) if column.is_binary]
    if len(named) == 1 and named[0] in ends:
        return as_it_is(data, named[0], f"by its name, as the {place(columns, named[0])} column")
    if len(named) == len(binary) == 1 and named[0].is_binary:
        return as_it_is(data, named[0], "by its name, as the only column of 0 and 1")
    raise ConfigError(
        f"{data.path}: {asked(data, columns, named, [*ends, *(column for column in binary if column not in ends)])}"
    )


def place(columns: list[ColumnFacts], column: ColumnFacts) -> str:
    return "last" if column is columns[-1] else "first"


def asked(data: DataSet, columns: list[ColumnFacts], named: list[ColumnFacts], flags: list[ColumnFacts]) -> str:
    """Why no column is taken as the label, and what --label may be: by names first, then by values and place, then of
    `flags`, of 0 and 1."""
    none = "no column holds 0 and 1 in every row, as a label does"
    last, is_log = columns[-1], all(map(is_id_or_time, columns))
    spoken = [column for column in columns if is_spoken(column)]
    spoken += [column for column in (last, columns[0]) if len(column.values) == 2 and not is_id_or_time(column)]
    if named and not named[0].is_binary:
        held = f"{named[0].name} holds {no_label(named[0])}"
        made = "" if is_measure(named[0]) and bare(named[0]) not in RATING_NAMES else expression(named[0])
        is_sure = bare(named[0]) in (*LABEL_NAMES, *RATING_NAMES) or len(named[0].values) == 2
        if made and (is_sure or set(map(id, spoken)) <= set(map(id, named))):
            return f"{held if flags else f'{none} ({held})'}; {option('--label', made)} makes one"
        if named[0].missing.count + named[0].absent.count:
            return f"{held}; remove these rows, or name another label with --label"
        if not flags and not is_measure(named[0]):
            return f"{none} ({held}); add rows with another value, or --label names another column"
    likely = list(dict.fromkeys(filter(None, map(expression, (*filter(is_class, named), *spoken, *flags)))))
    targets = [column for column in columns if re.fullmatch(MEASURE_NAMES, bare(column))]
    measures = [column for column in (*named, *targets) if is_measure(column)]
    regression = f"; {option('--label', measures[0].name)}, a measure, trains a regression" if measures else ""
    if not measures and is_measure(last) and not is_id_or_time(last):
        regression = f"; a measure, such as {last.name}, trains a regression"
    if likely:
        others = (
            "" if "=" in "".join(likely) else "; 'NAME=VALUE' takes a class" + ", NAME a measure" * (not regression)
        )
        said = listed([shlex.quote(text) for text in likely])
        return f"no name alone tells the label; name it with --label: {said}{regression}{others}"
    if measures:
        return f"{none}{regression}"
    alone = "; to learn from a log of clicks alone, add rows without a click" * is_log
    return f"{none}, and no name tells one; --label NAME, 'NAME=VALUE' or 'NAME>=4' makes one{regression}{alone}"


def is_class(column: ColumnFacts) -> bool:
    return column.is_binary or (0 < len(column.values) <= MOST_CLASSES and not is_measure(column))


def is_spoken(column: ColumnFacts) -> bool:
    """Whether words of the name, or a value, are of something that happened, such as `buy`."""
    happened = any(re.fullmatch(HAPPENED, value) for value in column.values)
    name = bare(column)
    named = re.fullmatch(SPOKEN_NAMES, name) and not re.fullmatch(f"{ID}|{TIME}", name)
    return is_class(column) and (happened or named is not None)


def known(data: DataSet, given: str, name: str) -> ColumnFacts:
    """Raises ConfigError for a name that no column has."""
    column = data.named(name)
    if column is None:
        names = [column.name for column in data.columns]
        raise ConfigError(
            f"{given} {name}: {data.path} has no such column{nearest(name, names)}; it has {listed(names)}"
        )
    return column


def bare(column: ColumnFacts) -> str:
    return column.name.strip().partition(":")[0].lower()


def as_it_is(data: DataSet, column: ColumnFacts, why: str) -> Label:
    words = {word: float(word in (*TRUE, "1")) for word in column.values}
    prepare = Prepare(map=words) if column.is_text or column.words else AS_IT_IS
    return Label(column=column, text=column.name, prepare=prepare, why=why, ones=column.numbers == 1)


def is_id_or_time(column: ColumnFacts) -> bool:
    name = bare(column)
    words = rf"(.*[_\W])?({CODE_WORD})[_\d]*"
    return any(re.fullmatch(pattern, name) for pattern in (ID, TIME, CODE, words))


def is_measure(column: ColumnFacts) -> bool:
    whole = not (column.is_list or column.padded or column.odd.count or column.missing.count or column.absent.count)
    return (
        column.kind in ("integer", "number")
        and whole
        and column.low < LONG
        and column.distinct >= FEWEST_MEASURED // (1 if column.whole else 2)
    )


def number_label(column: ColumnFacts) -> Label:
    numbers = column.numbers[np.isfinite(column.numbers)]
    target = float(f"{numbers.mean():.6g}"), float(f"{numbers.std():.6g}")
    ones, why = column.numbers > np.median(numbers), "by --label; a regression, because it is a measure"
    return Label(
        column=column, text=column.name, prepare=Prepare(number=column.mark_of_text), why=why, ones=ones, target=target
    )


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
        ones = [value for value in column.values if value.strip() == wanted]
        if not ones:
            held = listed(list(column.values)) or f"{column.distinct:,} values, too many to list"
            raise ConfigError(f"--label {text}: {column.name} never is {value.strip()}; it holds {held}")
        prepare = Prepare(map={value: float(value in ones) for value in column.values})
    numbers = prepared(
        data.sample[column.name].combine_chunks(), {column.name: prepare}, column.name, lambda i: data.path
    )
    if numbers.all() or not numbers.any():
        raise ConfigError(f"--label {text}: it is {numbers[0]:g} in every row; {column.name} holds {contents(column)}")
    return Label(column=column, text=text, prepare=prepare, why="by --label", ones=numbers == 1)


def number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"--label {text}: {value} is no number; >= needs one, and = takes any value") from None


def otherwise(column: ColumnFacts) -> str:
    """The option that makes a label of the column."""
    made = expression(column)
    return f"; {option('--label', made)} makes one" if made else ""


def expression(column: ColumnFacts) -> str:
    """What makes a label of a column; "" if nothing does."""
    if column.is_binary:
        return column.name.strip()
    lacks = column.missing.count or column.absent.count
    if lacks or column.is_list or column.kind not in ("integer", "number", "text"):
        return ""
    if len(column.values) == 2:
        rare = min(column.values, key=lambda value: column.values[value])
        yes = next((value for value in column.values if re.fullmatch(YES, value)), rare)
        one = yes if column.kind == "text" or column.odd.count else f"{column.high:g}"
        return f"{column.name}={one}"
    if is_nearly_binary(column):
        return f"{column.name}=1" * ("1" in column.values)
    if column.kind == "text" and 2 < len(column.values) <= MOST_CLASSES:
        return f"{column.name}={one_class(column)}"
    if column.odd.count or column.kind == "text" or not column.high > column.low:
        return ""
    graded = bare(column) in (*RATING_NAMES, *LABEL_NAMES)
    if column.whole and column.low == 0 and not graded:
        return f"{column.name}>=1"
    if column.whole and column.low > 0 and column.distinct < FEWEST_MEASURED and not graded:
        return f"{column.name}={one_class(column)}"
    bound = 0.75 * column.high if column.low >= 0 else 0.5 * (column.low + column.high)
    return f"{column.name}>={np.ceil(bound) if column.whole or column.high > 2 else 0.5 * (column.low + column.high):g}"


def one_class(column: ColumnFacts) -> str:
    """The class to learn of several: one that another denies (acc, unacc), one that says yes, or the commonest."""
    words = {value.strip().lower(): value for value in column.values}
    denied = [
        value
        for word, value in words.items()
        if any(no + word in words for no in ("un", "in", "non", "non-", "not ", "no "))
    ]
    yes = [value for value in column.values if re.fullmatch(YES, value)]
    return [*denied, *yes, max(column.values, key=lambda value: column.values[value])][0]


def option(name: str, value: str) -> str:
    return f"{name} {shlex.quote(value)}"


def is_nearly_binary(column: ColumnFacts) -> bool:
    """Whether the column is meant as the label: two values, or few others than 0 and 1."""
    return column.distinct == 2 or column.not_binary.count + column.missing.count <= FEW * column.num_cells


def no_label(column: ColumnFacts) -> str:
    """What the column holds, and the first cells that are no label."""
    told = [contents(column)]
    is_nearly = is_nearly_binary(column)
    if column.kind == "text" and 2 < len(column.values) <= MOST_CLASSES and not is_nearly:
        told[0] = f"{len(column.values)} classes, and one is learned at a time"
    if column.absent.count:
        told.append(column.absent.of(column.num_cells, "missing"))
    if column.missing.count:
        told.append(column.missing.of(column.num_cells, "missing"))
    if 0 < column.not_binary.count < column.num_cells and (is_nearly or column.kind != "text") and not column.words:
        repeats = column.not_binary.value == column.name
        told.append(
            column.not_binary.of(column.num_cells, f"neither {column.binary}")
            + (", which repeats the header: remove such lines" if repeats else "")
        )
    return "; ".join(told)


def contents(column: ColumnFacts) -> str:
    if column.kind in ("integer", "number"):
        return f"{'lists of ' if column.is_list else ''}values from {column.low:g} to {column.high:g}"
    return {"text": "text", "time": "timestamps"}.get(column.kind, column.type)


def poor_evaluation(data: DataSet, label: Label) -> str:
    """What is wrong with the last rows as an evaluation; "" if nothing is."""
    if label.is_number:
        return ""
    first = data.num_rows - int(TAIL * data.num_rows)
    tail = label.ones[-(-first // data.step) :]
    rarer = min(tail.sum(), (~tail).sum()) * data.step
    if not len(tail) or rarer >= FEWEST:
        return ""
    rows = f"only {'about ' * (data.step > 1)}{plural(int(rarer), 'row')}" if rarer else "no row"
    return (
        f"the last tenth, {data.num_rows - first:,} rows, is for evaluation and has {rows} with {label.text} = "
        f"{int(tail.sum() <= (~tail).sum())}: its AUC says {'little' if rarer else 'nothing'}; shuffle the rows of the "
        "file, or name other rows with data.eval_path"
    )
