"""`prefetcher new`: looks at files and writes a job for them, which runs as it stands."""

import sys
import tomllib
from dataclasses import dataclass

from rowcast.analysis.advise.advise import Request, advise_job
from rowcast.analysis.advise.reading import Sample
from rowcast.analysis.machine_facts import free_memory
from rowcast.analysis.new.choice import Chosen, Wish, choose
from rowcast.analysis.new.columns import DataSet, look_at
from rowcast.analysis.new.job_text import job_text
from rowcast.analysis.progress import Progress, ProgressBar
from rowcast.job.file import parse_job
from rowcast.job.schema import parse_bytes
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.format_numbers import plural

WHOLE_RUN_ROWS = 1_000_000  # of larger data the capacity is advised by a stretch of so many
MEMORY_SHARE = 0.25
FIRST_CAPACITY = "64MiB"  # while the capacity is sought
LEAST_CAPACITY = "1MiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOptions:
    """As typed; names are separated by commas."""

    data: str
    label: str | None = None
    dense: str | None = None
    ids: str | None = None


def run_new(options: NewOptions) -> None:
    """The job file goes to stdout, what was chosen to stderr. Raises ConfigError and DataError."""
    wish = Wish(label=options.label, dense=split(options.dense), ids=split(options.ids))
    with ProgressBar() as progress:
        data = look_at(options.data, progress)
        chosen = choose(data, wish)
        capacity, why = advised_capacity(data, chosen, progress)
    sys.stdout.write(job_text(data, chosen, capacity, why))
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in summary(data, chosen)))


def split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def advised_capacity(data: DataSet, chosen: Chosen, progress: Progress) -> tuple[str, str]:
    """What `prefetcher advise` recommends, and what to say of it."""
    job = parse_job(tomllib.loads(job_text(data, chosen, FIRST_CAPACITY, "")), "the new job")
    samples = None if data.num_rows <= WHOLE_RUN_ROWS else WHOLE_RUN_ROWS
    try:
        advice = advise_job(
            job,
            Request(
                sample=Sample(share=1.0, samples=samples), memory_bytes=MEMORY_SHARE * free_memory(), progress=progress
            ),
        )
    except RowcastError as error:
        return FIRST_CAPACITY, f"a guess, as `prefetcher advise` failed: {' '.join(str(error).split())}"
    if parse_bytes(advice.recommended.capacity) < parse_bytes(LEAST_CAPACITY):
        return (
            LEAST_CAPACITY,
            f"`prefetcher advise` asks for {advice.recommended.capacity}; this leaves room for larger batches",
        )
    return advice.recommended.capacity, "by `prefetcher advise`, which shows what more or less would do"


def summary(data: DataSet, chosen: Chosen) -> list[str]:
    ids = (
        f"{ids.column.name} ({ids.num_embeddings:,} rows{', hashed' if ids.hashed else ''}{', lists' if ids.column.is_list else ''})"
        for ids in chosen.ids
    )
    lines = [
        f"{plural(data.num_rows, 'row')} in {plural(data.num_files, 'file')}",
        f"label     {chosen.label.name}, 1 in {100 * chosen.label.mean:.3g} % of the rows",
        f"dense     {', '.join(column.name for column in chosen.dense) or 'none'}",
        f"ids       {', '.join(ids)}",
    ]
    lines += [f"left out  {name}: {why}" for name, why in chosen.left_out.items()]
    return [
        *lines,
        "--label, --dense and --ids choose otherwise. With the output in job.toml, go on with",
        "  prefetcher check --config job.toml",
        "  python -m rowcast.deploy.local --config job.toml",
    ]
