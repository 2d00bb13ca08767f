"""`rowcast check`: compares a job file with its data and this machine before anything is trained.

Every check runs, whatever the others found; checks of the data are silent if it does not open. An error would prevent
a run or end it; a warning might.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from rowcast.analysis.check.data import (
    ALL,
    SAMPLE,
    Seen,
    check_capacity,
    check_opens,
    check_ranks,
    check_samples,
    check_start,
)
from rowcast.analysis.check.machine import (
    Device,
    ask_trainer,
    check_device,
    check_keys,
    check_memlock,
    check_model,
    check_ports,
    check_rings,
    check_run_directory,
    check_threads,
    check_versions,
)
from rowcast.analysis.check.memory import check_disk, check_memory, check_row_numbers, check_tier
from rowcast.analysis.show import Finding, Level, error, findings_of, ok, warning
from rowcast.job.file import load_job, parse_manifest_job, refuse_script
from rowcast.job.named_code import JobFromFile, code_of, is_below, places, search_here
from rowcast.job.schema import MIN_RING_BYTES, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.run.sizing import Sizes, staging_bytes
from rowcast.runtime.command_options import AsJson, Overrides
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_memory
from rowcast.runtime.telemetry.format_numbers import plural, print_json, stdout_console

STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
SUBJECT_WIDTH = 13


Ask = Callable[[Job, int | None], Device]


def check_file(config: Path, overrides: tuple[str, ...], *, whole: bool, ask: Ask = ask_trainer) -> Iterator[Finding]:
    """Yields findings as they come. `whole`: every sample is read instead of a part."""
    jobs: list[Job] = []

    def load() -> Iterator[Finding]:
        jobs.append(load_job(config, overrides))
        yield ok(f"{config}: {len(jobs[0].tables)} tables, {jobs[0].data.format} data, {jobs[0].model.kind}")

    yield from findings_of("job file", load)
    for job in jobs:
        yield from findings_of("imports", partial(list_imports, job))
        yield from check_job(job, whole=whole, ask=ask)


def check_run(run: Path) -> Iterator[Finding]:
    """Yields the code that scoring with a run would import; imports nothing."""

    def load() -> Iterator[Finding]:
        content = {**Checkpoints(run, Disk()).choose(None).job}
        refuse_script(content, str(run))
        content["job"] = content["job"] | {"run_dir": str(run)}
        yield from list_imports(parse_manifest_job(content, str(run)))

    yield from findings_of("imports", load)


def list_imports(job: Job) -> Iterator[Finding]:
    search_here(job)
    for key, name in code_of(job).items():
        top = name.partition(":")[0].partition(".")[0]
        at = [*places(top)]
        where = f"{top} is {', '.join(map(str, at)) or 'not to be found'}"
        if any(is_below(place, job.run_dir) for place in at):
            yield error(f"{key} = {name!r} is never imported: {where}, below the run directory")
        elif isinstance(job, JobFromFile):
            yield warning(f"{key} = {name!r} is imported and run only with --trust={name}; {where}")
        else:
            yield ok(f"{key} = {name!r} is imported and run; {where}")
    yield ok("nothing else but rowcast's modules")


def check_job(job: Job, *, whole: bool, ask: Ask) -> Iterator[Finding]:
    """Runs first the code by which both processes decide and refuse at their start, then checks of what may go wrong
    later."""
    yield from findings_of("versions", check_versions)
    newest = cache(Checkpoints(job.run_dir, Disk()).newest_valid)  # it reads every file of a checkpoint
    yield from findings_of("run directory", lambda: check_run_directory(job, newest))
    yield from findings_of("ports", lambda: check_ports(job))
    yield from findings_of("threads", lambda: check_threads(job))
    seen = Seen(groups=group_specs(job), count=job.ranks.count)
    yield from findings_of("ranks", lambda: check_ranks(job, seen.groups))
    opened = findings_of("data", lambda: check_opens(job, seen))
    yield from opened
    if all(finding.level == "ok" for finding in opened):
        yield from findings_of("start", lambda: check_start(job, seen, newest))
        yield from findings_of("data", lambda: check_samples(job, seen, ALL if whole else SAMPLE))
    if seen.start is not None:
        yield from findings_of("capacity", lambda: check_capacity(job, seen))
    yield from check_room(job, seen, ask(job, None if seen.reader is None else len(seen.reader.dense_names)))


def check_room(job: Job, seen: Seen, device: Device) -> Iterator[Finding]:
    transport, slots = job.transport, () if seen.start is None else seen.start.slots
    ring_sizes = Sizes(ring_bytes=MIN_RING_BYTES, staging_bytes=staging_bytes(0, MIN_RING_BYTES))
    ring_sizes = ring_sizes if seen.start is None else seen.start.sizes
    ring_bytes, staged = ring_sizes.ring_bytes, 2 * ring_sizes.staging_bytes
    cache_bytes = sum(n * group.record_bytes for n, group in zip(slots, seen.groups, strict=True)) if slots else None
    of_trainer = (cache_bytes or 0) + staged if device.free_bytes is None else 0
    dense = device.dense_bytes
    if transport.is_tcp:
        yield from findings_of("keys", lambda: check_keys(transport))
    else:
        yield from findings_of("shared memory", lambda: check_rings(ring_bytes, job.ranks.on_host))
    yield from findings_of("device", lambda: check_device(device, job, cache_bytes, staged))
    yield from findings_of("model", lambda: check_model(job, device))
    yield from findings_of("pinning", lambda: check_memlock(device, ring_bytes))
    yield from findings_of(
        "memory", lambda: check_memory(job, seen, slots, free_memory(), ring_bytes, of_trainer, dense)
    )
    yield from findings_of("tables", lambda: check_row_numbers(job, seen))
    yield from findings_of("disk", lambda: check_disk(job, seen, dense))
    yield from findings_of("store", lambda: check_tier(job, seen, free_memory()))


def check(
    config: Annotated[Path | None, Option("--config", help="The job file.", metavar="job.toml")] = None,
    run: Annotated[
        Path | None, Option(help="Instead: list the code that a run would import.", metavar="DIR", show_default=False)
    ] = None,
    overrides: Overrides = None,
    whole: Annotated[bool, Option("--all", help="Read every sample, not a twentieth of them.")] = False,
    json: AsJson = False,
) -> int:
    """Returns the exit code: 0 without errors, otherwise that of a refused job."""
    if config is not None and run is None:
        findings = check_file(config, tuple(overrides or ()), whole=whole)
    elif run is not None and config is None:
        findings = check_run(run)
    else:
        raise ConfigError("give --config for a job, or --run for what a run would import")
    if json:
        everything = list(findings)
        counts = {f"{level}s": count(everything, level) for level in ("error", "warning")}
        print_json({**counts, "findings": everything})
    else:
        everything = print_findings(findings, stdout_console())
    return ConfigError.exit_code if count(everything, "error") else 0


def print_findings(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Prints each finding at once: folded under its column on a terminal, otherwise on one line."""
    printed = []
    for finding in findings:
        printed.append(finding)
        words = (
            Text(f"{finding.level:7}", STYLES[finding.level]),
            Text(f"{finding.subject:{SUBJECT_WIDTH}}"),
            Text(finding.sentence),
        )
        if console.is_terminal:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row(*words)
            console.print(grid)
        else:
            console.print(Text(" ").join(words), soft_wrap=True)
    console.print(f"{plural(count(printed, 'error'), 'error')}, {plural(count(printed, 'warning'), 'warning')}")
    return printed


def count(findings: Iterable[Finding], level: str) -> int:
    return sum(finding.level == level for finding in findings)
