"""`rowcast new`: looks at files and writes a job for them that runs as it is, with a reason for every choice."""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from rich.console import Console
from typer import Option

from rowcast.analysis.advise.advise import AdviseOptions, advise_job
from rowcast.analysis.new.files import DataSet, look_at
from rowcast.analysis.new.labels import TAIL, poor_evaluation
from rowcast.analysis.new.roles import WEIGHTS, ChosenRoles, RoleChoice, Wish, choose
from rowcast.analysis.show import AnalysisProgress, Part, ProgressBar, table_of, tell
from rowcast.job.file import parse_job, with_values
from rowcast.job.formats import Prepare
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS
from rowcast.prefetcher.readers.data_files import listed_files
from rowcast.prefetcher.readers.text_files import open_text, whole_lines
from rowcast.runtime.errors import ConfigError, RowcastError, printable
from rowcast.runtime.telemetry.format_numbers import plural

WHOLE_RUN_ROWS = 1_000_000  # of larger data, as many from the start decide the capacity
TEXT = ("csv", "criteo-tsv", "jsonl")
HEADS = ("column", "role", "becomes", "because")
NUMBERS = re.compile(r"\d+(,\d{3})*(\.\d+)?")
CONTINUE = (
    "Change these with --label, --dense, --ids and --lists. With the output in job.toml, continue with",
    "  rowcast check --config job.toml",
    "  rowcast train --config job.toml",
)
MEMORY_SHARE = 0.25
FIRST_CAPACITY = "64MiB"  # until the capacity is known
LEAST_CAPACITY = "1MiB"
EMBEDDING_DIM, SMALL_DIM, SMALL_ROWS = 16, 8, 20_000  # rows that are too few to train wide vectors
FEW_ROWS, SMALL_EPOCHS = 100_000, 10
LEAST_STEPS = 100  # per epoch, if batches of at least 32 allow it
LARGEST_BATCH, SMALLEST_BATCH = 2048, 32


Row = tuple[str, str, str, str]


def new(
    data: Annotated[
        str, Option(help="A file, folder or glob: text with columns, JSON lines, or Parquet.", metavar="PATH")
    ],
    label: Annotated[
        str,
        Option(help="The label: a column of 0 and 1, 'rating>=4', or 'label=2'.", show_default="by names and values"),
    ] = "",
    dense: Annotated[str, Option(help="Columns that are dense features.", metavar="A,B,...")] = "",
    ids: Annotated[str, Option(help="Columns that are ids.", metavar="A,B,...")] = "",
    names: Annotated[
        str, Option(help="The names of all columns, for a file without a header.", metavar="A,B,...")
    ] = "",
    lists: Annotated[
        list[str] | None,
        Option(help="A column of lists and the separator of their items; '[]' for [1, 2].", metavar="NAME=SEP"),
    ] = None,
) -> None:
    """Writes the job file to stdout and the choices to stderr. Raises ConfigError and DataError."""
    wish = Wish(label=label, dense=split(dense), ids=split(ids))
    with ProgressBar() as progress:
        text, summary = proposed(data, wish, split(names), dict(map(separator, lists or [])), progress)
    sys.stdout.write(text)
    sys.stdout.flush()
    sys.stderr.write(written([*summary, *CONTINUE], Console(stderr=True, highlight=False)))


def written(parts: Iterable[Part], console: Console) -> str:
    """Returns what `tell` prints, without spaces at the ends of lines."""
    with console.capture() as shown:
        tell(parts, console)
    return "".join(f"{line.rstrip()}\n" for line in shown.get().splitlines())


def proposed(
    path: str, wish: Wish, names: Sequence[str], lists: dict[str, str], progress: AnalysisProgress
) -> tuple[str, list[Part]]:
    """Returns the job file for the files of `path`, and what to show of it. `lists`: separators of some columns' items.
    Raises ConfigError and DataError."""
    data = look_at(path, names, lists, progress)
    chosen = choose(data, wish)
    capacity, why = advised_capacity(data, chosen)
    return job_text(data, chosen, capacity, why), [*summary_of(data, chosen)]


def split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def separator(given: str) -> tuple[str, str]:
    name, is_given, mark = given.rpartition("=") if not given.endswith("==") else (given[:-2], "=", "=")
    if not is_given:
        raise ConfigError(f"--lists {given}: give a column and a separator, such as --lists 'genres=|'")
    return name, mark


def advised_capacity(data: DataSet, chosen: ChosenRoles) -> tuple[str, str]:
    job = parse_job(tomllib.loads(job_text(data, chosen, FIRST_CAPACITY, "")), "the new job")
    max_steps = None
    if data.num_rows > WHOLE_RUN_ROWS:
        job, max_steps = with_values(job, {"data": {"eval_fraction": 0.0}}), WHOLE_RUN_ROWS // batch_size(data)
    try:
        with TemporaryDirectory() as folder:
            job = with_values(job, {"data": {"copies": folder, "epochs": 1}})
            if max_steps is not None and data.shape.kind in TEXT:
                job = with_values(job, {"data": {"path": first_rows(data, Path(folder))}})
            advice = advise_job(job, AdviseOptions(sample=1.0, max_steps=max_steps), AnalysisProgress(), MEMORY_SHARE)
    except RowcastError as error:
        return FIRST_CAPACITY, f"a guess, because `rowcast advise` failed: {' '.join(str(error).split())}"
    if parse_bytes(advice.recommended.capacity) < parse_bytes(LEAST_CAPACITY):
        return (
            LEAST_CAPACITY,
            f"`rowcast advise` recommends {advice.recommended.capacity}; this leaves room for larger batches",
        )
    return advice.recommended.capacity, "by `rowcast advise`, which also shows larger and smaller capacities"


def first_rows(data: DataSet, folder: Path) -> str:
    """Copies the first WHOLE_RUN_ROWS rows, because a text file is read as a whole. Returns where they are."""
    rows, left = folder / "rows", WHOLE_RUN_ROWS
    rows.mkdir()
    for number, file in enumerate(data.files):
        with open_text(file) as stream, (rows / f"{number:06}").open("wb") as copy:
            for block in whole_lines(stream, file):
                copy.write(block)
                left -= block.count(b"\n")
                if left <= 0:
                    return f"{rows}/*"
    return f"{rows}/*"


def summary_of(data: DataSet, chosen: ChosenRoles) -> Iterator[Part]:
    yield printable(f"{plural(data.num_rows, 'row')} in {listed_files(data.path, data.files, '')}")
    label = chosen.label
    doubtful = [row_of(choice) for choice in chosen.choices if choice.instead]
    others = [row_of(choice) for choice in chosen.choices if not choice.instead]
    rows = [*joined(doubtful), (label.name, "label", label.share, label.why), *joined(others)]
    heads = {head: lambda row, place=place: printable(row[place]) for place, head in enumerate(HEADS)}
    yield table_of(rows, heads, left=HEADS)
    if poor := poor_evaluation(data, label):
        yield printable(f"Before you train: {poor}")


def joined(rows: Iterable[Row]) -> Iterator[Row]:
    """Three columns or more in turn that differ only in numbers are one line: C1 ... C26."""
    for _, group in groupby(rows, key=lambda row: [NUMBERS.sub("#", cell) for cell in row]):
        same = [*group]
        if len(same) < 3:
            yield from same
            continue
        _, *cells = zip(*same, strict=True)
        role, size, why = map(with_ranges, cells)
        yield f"{same[0][0]} ... {same[-1][0]}", role, size, why


def with_ranges(cells: Sequence[str]) -> str:
    """Cells that differ only in numbers as one, with the least and the largest of each: 12 to 1,000 rows."""
    every = [[float(number[0].replace(",", "")) for number in NUMBERS.finditer(cell)] for cell in cells]
    spans = [(f"{min(numbers):,.10g}", f"{max(numbers):,.10g}") for numbers in zip(*every, strict=True)]
    ranges = iter([low if low == high else f"{low} to {high}" for low, high in spans])
    return NUMBERS.sub(lambda _: next(ranges), cells[0]) if len(set(cells)) > 1 else cells[0]


def row_of(choice: RoleChoice) -> Row:
    why = f"{choice.why}; {choice.instead} decides otherwise" if choice.instead else choice.why
    return choice.column.name, choice.role, becomes(choice), why


def becomes(choice: RoleChoice) -> str:
    if choice.role == "ids":
        return f"{choice.num_embeddings:,} rows{', hashed' * choice.hashed}{', lists' * choice.column.is_list}"
    prepare = choice.prepare
    said = (
        (f"missing {prepare.fill or 0:g}", prepare.fill is not None),
        ("log(1 + x)", prepare.log1p),
        ("scaled", prepare.standardize),
        ("buckets", prepare.buckets),
    )
    return ", ".join(text for text, is_so in said if is_so)


def given_rules(prepare: Prepare) -> dict[str, str]:
    """The keys that differ from the default, as TOML."""
    rules = {name: value for name, value in msgspec.structs.asdict(prepare).items() if value != getattr(AS_IT_IS, name)}
    return {
        name: f"{{ {', '.join(f'{key(one)} = {value:g}' for one, value in own.items())} }}"
        if isinstance(own, dict)
        else json.dumps(own)
        for name, own in rules.items()
    }


def job_text(data: DataSet, chosen: ChosenRoles, capacity: str, why_capacity: str) -> str:
    shape = [] if data.shape.kind == "criteo-tsv" else [*columns(data, chosen)]
    return (
        "\n".join([*head(data, chosen), *shape, *tables(data, chosen), *rest(data, chosen, capacity, why_capacity)])
        + "\n"
    )


def name_of(data: DataSet) -> str:
    """`data/clicks-*.csv.gz` -> clicks"""
    path = Path(data.path)
    stem = re.sub(r"(?i)\.[a-z]+(\.gz)?$", "", path.name)
    return (
        re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_")
        or re.sub(r"[^A-Za-z0-9]+", "_", path.absolute().parent.name).strip("_")
        or "job"
    )


def batch_size(data: DataSet) -> int:
    fitting = max(1, int(0.9 * data.num_rows) // LEAST_STEPS)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, 1 << (fitting.bit_length() - 1)))


def is_small(data: DataSet) -> bool:
    """Whether one epoch has too few steps."""
    return data.num_rows < FEW_ROWS


def embedding_dim(data: DataSet) -> int:
    return SMALL_DIM if data.num_rows < SMALL_ROWS else EMBEDDING_DIM


def head(data: DataSet, chosen: ChosenRoles) -> Iterator[str]:
    looked_at = f"{plural(data.num_rows, 'row')} in {plural(len(data.files), 'file')}"
    pages = "Every key: docs/job-file.md; columns: docs/data.md."
    yield f"# Written by `rowcast new` after a look at {looked_at}. {pages}"
    yield "[job]"
    yield f"name = {quoted(name_of(data))}"
    yield f"run_dir = {quoted(f'runs/{name_of(data)}')}"
    yield ""
    yield "[data]"
    yield f"format = {quoted(data.shape.kind)}"
    yield f"path = {quoted(data.path)}"
    yield f"batch_size = {batch_size(data)}"
    if is_small(data):
        yield f"epochs = {SMALL_EPOCHS}  # at most, with [eval]"
    else:
        yield 'epochs = 1  # for more, add [eval] with patience = 1 and keep = "best": it ends training in time'
    yield "eval_fraction = 0.1  # the last tenth of the rows, in the files' order, is for evaluation"
    yield 'shuffle = "window:65536"  # the other rows are shuffled within blocks of this many'
    if data.shape.kind != "criteo-tsv" and not all(choice.hashed for choice in chosen.of("ids")):
        yield 'on_invalid_id = "zero"  # an id beyond its table, such as a new one, uses row 0; "error" ends the run'
    yield ""


def columns(data: DataSet, chosen: ChosenRoles) -> Iterator[str]:
    shape, ids, label = data.shape, chosen.of("ids"), chosen.label
    yield "[data.columns]"
    if shape.names:
        yield f"names = {names(list(shape.names))}  # the file has no header"
    if shape.delimiter != ",":
        yield f"delimiter = {quoted(shape.delimiter)}"
    yield f"label = {quoted(label.name)}  # {label.text}: {label.share}"
    if label.is_number:
        yield 'label_values = "real"'
    yield f"dense = {names([choice.column.name for choice in chosen.of('dense')])}"
    if hashed := [choice.column.name for choice in ids if choice.hashed]:
        yield f"hash = {names(hashed)}  # a missing id is row 0"
        yield "hash_by_value = true  # 35, 35.0 and an integer 35 are one id; 00501 is text"
    if lists := [choice.column for choice in ids if choice.column.separator]:
        yield f"lists = {{ {', '.join(f'{key(column.name)} = {quoted(column.separator)}' for column in lists)} }}"
    if weights := [choice.column.name for choice in chosen.of("weights")]:
        pairs = [f"{key(name.removesuffix(WEIGHTS))} = {quoted(name)}" for name in weights]
        yield f"weights = {{ {', '.join(pairs)} }}"
    for choice in chosen.choices:
        if (
            choice.instead
            or choice.role == "left out"
            or choice.column.odd.count
            or (choice.role == "ids" and choice.column.absent.count)
        ):
            yield (
                f"# {choice.role}: {printable(choice.column.name)} ({printable(choice.why)})"
                + f"; {choice.instead}" * bool(choice.instead)
            )
    yield ""
    prepares = {label.name: label.prepare} | {choice.column.name: choice.prepare for choice in chosen.choices}
    if any(prepare != AS_IT_IS for prepare in prepares.values()):
        yield "[data.columns.prepare]  # in this order: missing, map or number, fill, least, log1p, standardize, ..."
        yield from (
            f"{key(name)} = {{ {', '.join(f'{name} = {value}' for name, value in given_rules(prepare).items())} }}"
            for name, prepare in prepares.items()
            if prepare != AS_IT_IS
        )
        yield ""


def tables(data: DataSet, chosen: ChosenRoles) -> Iterator[str]:
    taken: set[str] = set()
    for ids in chosen.of("ids"):
        yield "[[tables]]"
        yield f"name = {quoted(table_name(ids.column.name, taken))}"
        yield f"num_embeddings = {ids.num_embeddings}  # {size_reason(ids)}"
        yield f"embedding_dim = {embedding_dim(data)}"
        yield f"features = {names([ids.column.name])}"
        if ids.column.is_list:
            yield 'pooling = "sum"  # of the rows of one list'
        yield ""
    for choice in chosen.of("dense"):
        if bounds := choice.prepare.buckets:
            yield "[[tables]]"
            yield f"name = {quoted(table_name(f'{choice.column.name}_buckets', taken))}"
            yield f"num_embeddings = {len(bounds) + 2}  # a row for each range of the dense feature"
            yield f"embedding_dim = {embedding_dim(data)}"
            yield f"features = {names([choice.column.name])}"
            yield ""


def rest(data: DataSet, chosen: ChosenRoles, capacity: str, why_capacity: str) -> Iterator[str]:
    yield "[model]"
    yield 'kind = "dlrm"'
    yield f"bottom_mlp = [64, {embedding_dim(data)}]" + (
        "" if chosen.of("dense") else "  # a learned vector, because there are no dense features"
    )
    yield "top_mlp = [128, 64, 1]"
    if chosen.label.is_number:
        yield 'task = "regression"'
        yield f"target = {list(chosen.label.target)}  # mean and deviation of the label"
    yield ""
    yield "[optimizer]"
    # some hundred steps need a larger rate; where rows are few, a larger sparse one only learns them by heart
    yield f'sparse = {{ kind = "adagrad", lr = {0.05 if SMALL_ROWS <= data.num_rows < WHOLE_RUN_ROWS else 0.02} }}'
    yield f'dense = {{ kind = "adam", lr = {0.003 if data.num_rows < SMALL_ROWS else 0.001} }}'
    yield ""
    if is_small(data) and int(TAIL * data.num_rows):
        yield "[eval]  # two epochs without a lower loss end training, and the best is kept"
        yield "patience = 2"
        yield 'keep = "best"'
        yield ""
    yield "[cache]"
    yield f"capacity = {quoted(capacity)}  # {why_capacity}"


def size_reason(ids: RoleChoice) -> str:
    if ids.hashed:
        return f"{ids.column.distinct:,} distinct values; more rows give fewer collisions"
    return f"ids go up to {ids.column.high:,.0f}"


def table_name(feature: str, taken: set[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", feature)
    name = name if re.match(r"[A-Za-z_]", name) else f"t_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def names(columns: list[str]) -> str:
    return "[" + ", ".join(map(quoted, columns)) + "]"


def key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


def quoted(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped)
