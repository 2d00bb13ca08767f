"""Lists the formats of `data.format` and the settings of the data, without importing the readers.

A new one is a line here and its reader's file; settings of its own are a struct above the line.
"""

import re
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Literal

from msgspec import Meta

from rowcast.job.section import Kinds, Section
from rowcast.job.times import time_pattern
from rowcast.job.units import Size, parse_bytes

READERS = "rowcast.prefetcher.readers.formats"
MAX_LABELS = 64  # per sample; an evaluation counts 4 MiB for each
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BATCH = "batch"


DecimalMark = Literal["", ".", ","]

Clock = Literal["", "hour", "weekday", "days"]
# a feature of a clock has an id for each hour or weekday: these are the borders between two ids
CLOCK_BOUNDS = {"hour": [*map(float, range(1, 24))], "weekday": [*map(float, range(1, 7))]}

LabelValues = Literal["binary", "real", "none"]


class Prepare(Section, frozen=True, kw_only=True):
    """What becomes of the values of a column, in the order of these keys. See [data.md](data.md#prepared-columns)."""

    of: str = ""  # with `clock`, the column of times; by default the column of this name
    missing: list[str] = []  # texts that mean a missing value, without the spaces around them, such as `"?"` and `""`
    # the decimal mark of numbers that are text, `"."` or `","`; currency signs, `%` and the separators of thousands
    # are left out: `$1,234.50`, `12,5 %`
    number: DecimalMark = ""
    # texts or numbers -> the numbers that they become; other values are refused, and missing ones stay missing
    map: dict[str, float] = {}
    # a number of a time in UTC: `hour` of the day, 0 to 23; `weekday`, Monday is 0; `days` since the date `since`. A
    # feature needs no `buckets` for hour (25 ids) and weekday (8 ids): 0 is a missing time, 1 is hour 0 or Monday
    clock: Clock = ""
    # how times are written, such as `"%d/%b/%Y:%H:%M:%S %z"`; by default as in ISO 8601, or as the seconds,
    # milliseconds, microseconds or nanoseconds since 1970
    time: str = ""
    since: str = "1970-01-01"  # the date that `days` count from
    fill: float | None = None  # the number for a missing value
    least: float | None = None  # a smaller number becomes this
    log1p: bool = False  # log(1 + x), of numbers above -1
    standardize: tuple[float, float] | None = None  # mean and deviation: (x - mean) / deviation
    at_least: float | None = None  # 1 for this number and larger ones, else 0: a label of a rating
    # ascending bounds that make ids of numbers, for a feature: 0 for a missing one, 1 below the first bound, and so on
    buckets: list[float] = []

    def check(self) -> None:
        deviation = [] if self.standardize is None else self.standardize[1:]
        given = (self.fill, self.least, self.at_least, *(self.standardize or ()), *self.buckets, *self.map.values())
        if not all(number is None or isfinite(number) for number in given) or any(own <= 0 for own in deviation):
            raise ValueError("its numbers must be finite, and the deviation of standardize above 0; correct them")
        if not self.clock and (self.of or self.time or self.since != "1970-01-01"):
            raise ValueError('of, time and since belong to clock = "hour", "weekday" or "days"; add it, or remove them')
        if self.clock and (self.map or self.number):
            raise ValueError(f'clock = "{self.clock}" reads times, and map and number do not; remove one of them')
        time_pattern(self.time)
        if self.clock == "hour" and self.time and "%H" not in self.time:
            raise ValueError(f'time = {self.time!r} has no hour, and clock = "hour" needs one; add %H')
        try:
            date.fromisoformat(self.since)
        except ValueError:
            raise ValueError(f"since = {self.since!r} is no date; write it as 2024-03-01") from None
        if self.map and self.number:
            raise ValueError(f'map and number = "{self.number}" both make numbers of text; remove one of them')
        if any(after <= before for before, after in pairwise(self.buckets)):
            raise ValueError(f"buckets = {self.buckets} must ascend")

    @property
    def takes_text(self) -> bool:
        return bool(self.missing or self.number or self.map or self.clock)

    @property
    def bounds(self) -> list[float]:
        """Between the ids of a feature; empty if the rule makes no ids."""
        return self.buckets or CLOCK_BOUNDS.get(self.clock, [])


class Columns(Section, frozen=True, kw_only=True):
    """The columns of Parquet and CSV files: see [data.md](data.md). A feature is the column of the same name."""

    label: str = "label"  # the column that holds the label
    # several labels per sample instead of `label`, for a model with a logit for each of them (see
    # [models.md](models.md#several-labels)): their columns, or their names in formats without column names; a missing
    # one (null, an empty cell, NaN) is unknown
    labels: list[str] = []
    # `binary`: labels are 0 or 1; `real`: any finite numbers, for a model with a custom `loss`; `none`: there are no
    # labels, and samples can only be scored (`rowcast score` sets this)
    label_values: LabelValues = "binary"
    # the columns that hold dense features; by default all columns named `int_<n>`, in order of n; `[]` means none
    dense: list[str] | None = None
    weights: dict[str, str] = {}  # maps a feature to the column that holds a weight for each of its look-ups
    # other columns that the model gets as arrays ([models.md](models.md#arrays)); a feature without pooling gives
    # the rows of its look-ups, as the array `<feature>.id`
    inputs: list[str] = []
    # `true`, or a list of features: their ids (strings, or integers of any size) are hashed into their tables; row 0
    # is reserved for a missing id
    hash: bool | list[str] = False
    # with `hash`, a whole number gets one row however it is written: 35, 35.0 and an integer of Parquet; `00501` stays
    # text. `false`: the bytes of a cell count
    hash_by_value: bool = False
    # the rule of `hash_by_value` ([data.md](data.md#strings-and-large-integers-hash)), 1 in earlier versions; a run
    # keeps the rule with which it has begun
    value_rule: Annotated[int, Meta(ge=1, le=2)] = 2
    # maps a feature to the separator between the ids in a cell of text (in CSV and between their weights), such as
    # `";"`; `"[]"` for cells such as `[1, 2]` or `['a', 'b']`
    lists: dict[str, str] = {}
    # CSV: the separator between cells, one character or several, such as `"::"`; `" "`: runs of spaces
    delimiter: str = ","
    names: list[str] = []  # CSV without a header: the names of all its columns; the first line is a row
    prepare: dict[str, Prepare] = {}  # what becomes of the values of a column

    def check(self) -> None:
        if not self.delimiter or not self.delimiter.isascii() or set(self.delimiter) & set('"\r\n'):
            raise ValueError(
                f"delimiter = {self.delimiter!r} must be ASCII characters, at least one, without quotes and line breaks"
            )
        for feature, separator in self.lists.items():
            if not separator:
                raise ValueError(f'lists.{feature} is empty; give the separator between the ids of a cell, such as "|"')
        if len(self.labels) == 1:
            raise ValueError(f'labels names one column; write label = "{self.labels[0]}"')
        if self.labels and self.label != "label":
            raise ValueError(f'give either label = "{self.label}" or labels, not both')
        if len(self.labels) > MAX_LABELS:
            raise ValueError(f"labels names {len(self.labels)} columns, more than {MAX_LABELS}")
        for key, names in (("labels", self.labels), ("inputs", self.inputs), ("names", self.names)):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{key} names {name} twice")

    @property
    def label_names(self) -> list[str]:
        return self.labels or [self.label]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a sample's labels: () for one, (T,) for several."""
        return (len(self.labels),) if self.labels else ()

    @property
    def sources(self) -> dict[str, str]:
        """Maps each label, dense feature or feature that is made of times to their column."""
        return {name: rule.of or name for name, rule in self.prepare.items() if rule.clock}

    def is_hashed(self, feature: str) -> bool:
        return self.hash if isinstance(self.hash, bool) else feature in self.hash


class Synthetic(Section, frozen=True, kw_only=True):
    samples: Annotated[int, Meta(ge=1)] = 1_000_000  # samples in an epoch
    preset: Literal["criteo-kaggle"] | None = None  # provides `tables_from.cardinalities` when they are not given
    # multiplies the preset's cardinalities; every table keeps at least 1 row
    scale: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    # the skew of the ids: the exponent of their Zipf distribution; 0 makes all ids equally frequent
    zipf: Annotated[float, Meta(ge=0, le=10)] = 1.05


class Negatives(Section, frozen=True, kw_only=True):
    """A feature that is in no file: its ids are drawn, as a function of job.seed, split, epoch and batch.

    The model gets the arrays `<feature>.id` and `<feature>.log_q`."""

    feature: str  # a feature of a table with `pooling = "none"`
    number: Count  # ids drawn for a batch, or for each look-up of `per`
    # `batch`: they are the batch's, and whole in each part of it; or a feature of the files, each of whose look-ups has
    # its own
    per: str = BATCH
    # `uniform`; `log-uniform`, for rows in order of their frequency; or an `.npy` file with a count for each row, i64
    by: str = "uniform"
    avoid: str | None = None  # the feature of `per`: none of its look-ups gets its own row; needs `uniform`

    def check(self) -> None:
        if self.by not in ("uniform", "log-uniform") and not self.by.endswith(".npy"):
            raise ValueError(f"by = {self.by!r} is not uniform, log-uniform or an .npy file")
        if self.avoid is not None and (self.avoid != self.per or self.by != "uniform"):
            raise ValueError(
                f'avoid = {self.avoid!r} needs per = {self.avoid!r} and by = "uniform"; set these, or remove avoid'
            )


class Data(Section, frozen=True, kw_only=True):
    format: str  # {kinds}, or `package.module:factory`
    path: str | None = None  # a file, a folder or a glob: see [data.md](data.md#which-files-are-read)
    # files are read in the order of their names, `day_10` before `day_2`, instead of their numbers; a run keeps the
    # order in which it has begun
    by_name: bool = False
    # `true`: files that arrive in the folder later are read too, until one of the name `END` is there; see
    # [streams.md](streams.md)
    follow: bool = False
    eval_path: str | None = None  # separate evaluation data, used instead of `eval_fraction`
    # the folder for the columns that text files become once ([data.md](data.md#text-is-read-once)); by default
    # `columns` beside `job.run_dir`, which runs share
    copies: str | None = None
    # the most bytes of the columns of one text file; `"auto"` is 100 times its bytes on the disk, at least 1 GiB
    copies_limit: Size = "auto"
    batch_size: Count = 2048  # samples in a batch; the last batch of an epoch may be shorter and is trained too
    epochs: Count = 1  # passes over the training data
    # the fraction of the data, from its end before any shuffle, used to evaluate
    eval_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    # `none`, `window:65536` (within blocks of 65536 rows) or `full` (not for Parquet); the order depends
    # on the seed and the epoch, see [orders.md](orders.md)
    shuffle: str = "none"
    # what happens to an id that is outside its table or missing (null in Parquet, an empty cell in CSV): `error` stops
    # the run and names file, line, column and id; `zero` uses row 0; `modulo` uses the remainder, and row 0 for a
    # missing id; `zero` and `modulo` count such ids. A missing hash in Criteo TSV is always row 0
    on_invalid_id: Literal["error", "modulo", "zero"] = "error"
    hash: bool = False  # criteo-npy: reads int32 ids as unsigned and takes them modulo the table's rows
    # what an array or a feature belongs to, if not to samples: `time = "history"` has an entry per look-up of the
    # feature `history`, and all look-ups of `negative = "batch"` are in every part of a batch
    of: dict[str, str] = {}
    negatives: list[Negatives] = []
    columns: Columns = Columns()
    synthetic: Synthetic = Synthetic()
    options: dict[str, Any] = {}  # passed to the `package.module:factory`

    def check(self) -> None:
        known = format_of(self.format)
        if self.copies_limit != "auto":
            try:
                parse_bytes(self.copies_limit)
            except ValueError as error:
                raise ValueError(f"copies_limit = {error}") from None
        if self.path is None and known.has_files:
            raise ValueError(f'format = {self.format!r} needs path = "..."')
        if not re.fullmatch(r"none|full|window:[1-9]\d*", self.shuffle):
            raise ValueError(f"shuffle = {self.shuffle!r} is not one of none, full, window:ROWS")
        if self.shuffle == "full" and not known.random_access:
            raise ValueError(
                f'shuffle = "full" needs random access, which {self.format} does not have; use "window:65536"'
            )
        if self.follow:
            self._check_followed(known)
        for key in () if known.named_columns else ("hash", "prepare", "inputs", "lists"):
            if getattr(self.columns, key):
                raise ValueError(
                    f"columns.{key} belongs to format = {formats_with('named_columns')}, not {self.format!r}; remove it"
                    + (": every key of a batch is an array" if key == "inputs" and known is CUSTOM else "")
                )
        if (self.columns.delimiter != "," or self.columns.names) and not known.text_cells:
            belongs = f"belong to format = {formats_with('text_cells')}"
            raise ValueError(f"columns.delimiter and columns.names {belongs}, not {self.format!r}; remove them")
        if (self.columns.labels or self.columns.label_values != "binary") and known.one_label:
            raise ValueError(
                f"columns.labels and columns.label_values: {self.format} has one label of 0 or 1 a sample; remove them"
            )

    def _check_followed(self, known: "Format") -> None:
        if not known.one_by_one:
            raise ValueError(f"follow = true needs format = {formats_with('one_by_one')}, not {self.format!r}")
        for key, value, change in (
            ("epochs", self.epochs > 1 and self.epochs, "a log that never ends is read once; set epochs = 1"),
            ("shuffle", self.shuffle == "full" and '"full"', 'it needs all rows; set "none", or "window:ROWS"'),
            ("eval_fraction", self.eval_fraction, "the last rows are not known; set eval_path"),
            ("eval_path", self.eval_path == self.path and repr(self.path), "it is followed; name other files"),
        ):
            if value:
                raise ValueError(f"follow = true does not go with {key} = {value}: {change}")

    @property
    def batch_features(self) -> frozenset[str]:
        """The features whose look-ups are the batch's."""
        named = {name for name, of in self.of.items() if of == BATCH}
        return frozenset(named | {own.feature for own in self.negatives if own.per == BATCH})

    @property
    def lookup_arrays(self) -> dict[str, str]:
        """Maps each array of look-ups to its feature; of data.columns.inputs only those that data.of names."""
        drawn = {f"{own.feature}.{name}": own.feature for own in self.negatives for name in ("id", "log_q")}
        return {name: of for name, of in self.of.items() if of != BATCH} | drawn

    @property
    def shuffle_window(self) -> int | None:
        """Rows in a shuffled block; 0 for the whole data set; None without a shuffle."""
        if self.shuffle == "none":
            return None
        return 0 if self.shuffle == "full" else int(self.shuffle.removeprefix("window:"))


@dataclass(frozen=True, slots=True)
class Format:
    # has open_reader(job), or open_reader(job, columns) with `in_columns`; imported only when the format is used
    module: str
    note: str = ""  # for docs/job-file.md
    settings: type[Data] = Data  # the keys of [data]
    has_files: bool = True  # data.path names them
    file_names: str = ".*"  # regular expression: which files of a folder are read
    random_access: bool = False  # any row can be read at any time, which shuffle = "full" needs
    in_columns: bool = False  # ids can be read without dense features and labels
    draws: bool = True  # data.negatives adds features to it
    named_columns: bool = False  # data.columns names the columns, including weights and hashed ids
    text_cells: bool = False  # it has cells of text, which data.columns.delimiter separates
    one_by_one: bool = False  # files may arrive during a run
    one_label: bool = False  # the format itself has one label of 0 or 1 per sample


Named = partial(Format, in_columns=True, named_columns=True, one_by_one=True)  # files whose columns have names
FORMATS = {
    "criteo-tsv": Format(
        f"{READERS}.criteo_tsv",
        one_by_one=True,
        file_names=r"(.*\.(tsv|txt)|day_\d+)(\.gz)?",
        random_access=True,
        in_columns=True,
        one_label=True,
    ),
    "criteo-npy": Format(
        f"{READERS}.criteo_npy",
        note="the torchrec day layout",
        file_names=r"(day_\d+)_(dense|sparse|labels)\.npy",
        random_access=True,
        in_columns=True,
    ),
    "parquet": Named(f"{READERS}.parquet", file_names=r".*\.(parquet|pq)"),
    "csv": Named(f"{READERS}.csv", file_names=r".*\.csv(\.gz)?", random_access=True, text_cells=True),
    "jsonl": Named(f"{READERS}.jsonl", note="JSON lines", file_names=r".*\.(jsonl|ndjson)(\.gz)?", random_access=True),
    "arrow": Named(f"{READERS}.arrow", note="uncompressed", file_names=r".*\.(arrow|feather)", random_access=True),
    "synthetic": Format(f"{READERS}.synthetic", has_files=False, random_access=True),
}
# data.format = "package.module:factory"; the factory decides the order of the batches
CUSTOM = Format(f"{READERS}.custom", has_files=False, random_access=True, draws=False)
Data.kinds = Kinds(FORMATS, key="format", custom=Data)


def format_of(name: str) -> Format:
    return FORMATS.get(name, CUSTOM)


def formats_with(trait: str) -> str:
    """The names of the formats with a trait, such as `"parquet" or "csv"`."""
    return " or ".join(f'"{name}"' for name, own in FORMATS.items() if getattr(own, trait))
