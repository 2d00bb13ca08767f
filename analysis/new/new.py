"""`prefetcher new`: looks at files and writes a job for them that runs as it is, with a comment for every choice."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from rowcast.analysis.advise.advise import AdviseOptions, advise_job
from rowcast.analysis.new.columns import LIST_SEPARATOR, DataSet, look_at
from rowcast.analysis.new.roles import ChosenRoles, Ids, Wish, choose
from rowcast.analysis.progress import AnalysisProgress, ProgressBar
from rowcast.analysis.simulate.grid import with_values
from rowcast.job.file import parse_job
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.readers.data_files import listed_files
from rowcast.runtime.errors import RowcastError, printable
from rowcast.runtime.telemetry.format_numbers import plural

WHOLE_RUN_ROWS = 1_000_000  # of larger data, as many from the start decide the capacity
MEMORY_SHARE = 0.25
FIRST_CAPACITY = "64MiB"  # until the capacity is known
LEAST_CAPACITY = "1MiB"
EMBEDDING_DIM = 16
LEAST_STEPS = 100  # per epoch, if batches of at least 32 allow it
LARGEST_BATCH, SMALLEST_BATCH = 2048, 32
LARGE = 100.0  # a dense value this large is better scaled


def new(
    data: Annotated[str, Option(help="A file, folder or glob of CSV with a header, or Parquet.", metavar="PATH")],
    label: Annotated[
        str | None, Option(help="The column of the label.", show_default="by name, or the only 0/1 column")
    ] = None,
    dense: Annotated[str | None, Option(help="Columns that are dense features.", metavar="A,B,...")] = None,
    ids: Annotated[str | None, Option(help="Columns that are ids.", metavar="A,B,...")] = None,
) -> None:
    """Writes the job file to stdout and the choices to stderr. Raises ConfigError and DataError."""
    wish = Wish(label=label, dense=split(dense), ids=split(ids))
    with ProgressBar() as progress:
        found = look_at(data, progress)
        chosen = choose(found, wish)
        capacity, why = advised_capacity(found, chosen, progress)
    sys.stdout.write(job_text(found, chosen, capacity, why))
    sys.stdout.flush()
    sys.stderr.write("".join(f"{printable(line)}\n" for line in summary(found, chosen)))


def split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def advised_capacity(data: DataSet, chosen: ChosenRoles, progress: AnalysisProgress) -> tuple[str, str]:
    job = parse_job(tomllib.loads(job_text(data, chosen, FIRST_CAPACITY, "")), "the new job")
    max_steps = None
    if data.num_rows > WHOLE_RUN_ROWS:
        job, max_steps = with_values(job, {"data": {"eval_fraction": 0.0}}), WHOLE_RUN_ROWS // batch_size(data)
    try:
        advice = advise_job(job, AdviseOptions(sample=1.0, max_steps=max_steps), progress, MEMORY_SHARE)
    except RowcastError as error:
        return FIRST_CAPACITY, f"a guess, because `prefetcher advise` failed: {' '.join(str(error).split())}"
    if parse_bytes(advice.recommended.capacity) < parse_bytes(LEAST_CAPACITY):
        return (
            LEAST_CAPACITY,
            f"`prefetcher advise` recommends {advice.recommended.capacity}; this leaves room for larger batches",
        )
    return advice.recommended.capacity, "by `prefetcher advise`, which also shows larger and smaller capacities"


def summary(data: DataSet, chosen: ChosenRoles) -> list[str]:
    ids = (
        f"{ids.column.name} ({ids.num_embeddings:,} "
        f"rows{', hashed' if ids.hashed else ''}{', lists' if ids.column.is_list else ''})"
        for ids in chosen.ids
    )
    lines = [
        f"{plural(data.num_rows, 'row')} in {listed_files(data.path, data.files, '')}",
        f"label     {chosen.label.name}, 1 in {100 * chosen.label.mean:.3g} % of the rows",
        f"dense     {', '.join(column.name for column in chosen.dense) or 'none'}",
        f"ids       {', '.join(ids)}",
    ]
    lines += [f"note      {name}: {why}" for name, why in chosen.notes.items()]
    lines += [f"left out  {name}: {why}" for name, why in chosen.left_out.items()]
    return [
        *lines,
        "Change these with --label, --dense and --ids. With the output in job.toml, continue with",
        "  rowcast check --config job.toml",
        "  rowcast train --config job.toml",
    ]


def job_text(data: DataSet, chosen: ChosenRoles, capacity: str, why_capacity: str) -> str:
    return (
        "\n".join([*head(data), *columns(data, chosen), *tables(chosen), *rest(chosen, capacity, why_capacity)]) + "\n"
    )


def name_of(data: DataSet) -> str:
    """`data/clicks-*.csv.gz` -> clicks"""
    path = Path(data.path)
    stem = re.sub(r"(?i)\.(csv|tsv|parquet|pq)(\.gz)?$", "", path.name)
    return (
        re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_")
        or re.sub(r"[^A-Za-z0-9]+", "_", path.absolute().parent.name).strip("_")
        or "job"
    )


def batch_size(data: DataSet) -> int:
    fitting = max(1, int(0.9 * data.num_rows) // LEAST_STEPS)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, 1 << (fitting.bit_length() - 1)))


def head(data: DataSet) -> Iterator[str]:
    looked_at = f"{plural(data.num_rows, 'row')} in {plural(len(data.files), 'file')}"
    pages = "Every key: docs/job-file.md; columns: docs/data.md."
    yield f"# Written by `prefetcher new` after a look at {looked_at}. {pages}"
    yield "[job]"
    yield f"name = {quoted(name_of(data))}"
    yield f"run_dir = {quoted(f'runs/{name_of(data)}')}"
    yield ""
    yield "[data]"
    yield f"format = {quoted(data.format)}"
    yield f"path = {quoted(data.path)}"
    yield f"batch_size = {batch_size(data)}"
    yield "epochs = 1"
    yield "eval_fraction = 0.1  # the last tenth of the rows, in the files' order, is for evaluation"
    yield 'shuffle = "window:65536"  # the other rows are shuffled within blocks of this many'
    yield ""


def columns(data: DataSet, chosen: ChosenRoles) -> Iterator[str]:
    yield "[data.columns]"
    yield f"label = {quoted(chosen.label.name)}  # {100 * chosen.label.mean:.3g} % are 1"
    yield f"dense = {names([column.name for column in chosen.dense])}"
    for column in chosen.dense:
        reach = max(abs(column.low), abs(column.high))
        if reach > LARGE:
            span = f"from {column.low:g} to {column.high:g}"
            advice = "its logarithm or a scaled value gives a better model"
            yield f"# {printable(column.name)} ranges {span} and is used as it is; {advice}"
    hashed = [ids.column.name for ids in chosen.ids if ids.hashed]
    if hashed:
        yield f"hash = {names(hashed)}  # text, and integers with gaps or missing values; a missing one is row 0"
    for name, note in chosen.notes.items():
        yield f"# {printable(name)}: {printable(note)}"
    lists = [ids.column.name for ids in chosen.ids if ids.column.is_list]
    if lists and data.format == "csv":
        yield f"lists = {{ {', '.join(f'{key(name)} = {quoted(LIST_SEPARATOR)}' for name in lists)} }}"
    if data.delimiter != ",":
        yield f"delimiter = {quoted(data.delimiter)}"
    for name, why in chosen.left_out.items():
        yield f"# left out: {printable(name)} ({printable(why)})"
    yield ""


def tables(chosen: ChosenRoles) -> Iterator[str]:
    taken: set[str] = set()
    for ids in chosen.ids:
        yield "[[tables]]"
        yield f"name = {quoted(table_name(ids.column.name, taken))}"
        yield f"num_embeddings = {ids.num_embeddings}  # {size_reason(ids)}"
        yield f"embedding_dim = {EMBEDDING_DIM}"
        yield f"features = {names([ids.column.name])}"
        if ids.column.is_list:
            yield 'pooling = "sum"  # of the rows of one list'
        yield ""


def rest(chosen: ChosenRoles, capacity: str, why_capacity: str) -> Iterator[str]:
    yield "[model]"
    yield 'kind = "dlrm"'
    yield f"bottom_mlp = [64, {EMBEDDING_DIM}]" + (
        "" if chosen.dense else "  # a learned vector, because there are no dense features"
    )
    yield "top_mlp = [128, 64, 1]"
    yield ""
    yield "[optimizer]"
    yield 'sparse = { kind = "adagrad", lr = 0.02 }'
    yield 'dense = { kind = "adam", lr = 0.001 }'
    yield ""
    yield "[cache]"
    yield f"capacity = {quoted(capacity)}  # {why_capacity}"


def size_reason(ids: Ids) -> str:
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
