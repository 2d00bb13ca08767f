"""Checks a run's surroundings: installed versions, run directory, model. They change nothing and disturb no run."""

import ast
import fcntl
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from itertools import product
from pathlib import Path

from rowcast.analysis.check.findings import Finding, error, ok, warning
from rowcast.job.models import BUILT_IN_MODELS
from rowcast.job.schema import Job
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, readable
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import threads_of_run, usable_cores
from rowcast.runtime.run_directory import RunDirectory, pair_folder
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.runtime.telemetry.logs import get_logger

DISTRIBUTION = "rowcast"
# the others are still compared with their bounds
SHOWN = ("rowcast", "python", "torch", "triton", "numpy", "numba", "pyarrow", "pyzmq")
# what CI and `make compat` were run with; nothing is known against others
TRIED = {
    "python": ("3.11", "3.12", "3.15"),
    "torch": ("2.11", "2.13", "2.15"),
    "triton": ("3.6", "3.7", "3.9"),
    "numpy": ("2.4", "2.5"),
}


# versions


def check_versions(installed: Callable[[str], metadata.Distribution] = metadata.distribution) -> Iterator[Finding]:
    """Compares Python and packages with the lower bounds of the installed rowcast, and reports untested versions.
    `installed` is for tests."""
    try:
        rowcast = installed(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield warning(
            "rowcast is not installed, so its required versions are unknown; run `pip install .` in its folder"
        )
        return
    bounds = lower_bounds([f"python{rowcast.metadata['Requires-Python']}", *(rowcast.requires or [])])
    found, faults = {"rowcast": rowcast.version}, list[Finding]()
    for name, least in bounds.items():
        try:
            found[name] = platform.python_version() if name == "python" else installed(name).version
        except metadata.PackageNotFoundError:
            faults.append(error(f"{name} is not installed; run `pip install '{name}>={least}'`"))
        else:
            if release(found[name]) < release(least):
                faults.append(error(f"{name} {found[name]} is older than {least}; install '{name}>={least}'"))
    with suppress(metadata.PackageNotFoundError):  # no run needs it on a CPU
        found["triton"] = installed("triton").version
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    yield from faults or [ok("; ".join([shown, *untried(found)]))]


def untried(found: dict[str, str]) -> Iterator[str]:
    for name, tried in TRIED.items():
        if name in found and release(found[name])[:2] not in map(release, tried):
            yield f"{name} {found[name]} was not tried ({', '.join(tried)} were)"


def lower_bounds(requirements: list[str]) -> dict[str, str]:
    """`numpy<3,>=1.26` -> {"numpy": "1.26"}; requirements of extras are omitted."""
    matches = (re.match(r"([\w.-]+)[^;]*?>=\s*([\w.]+)", text) for text in requirements if "extra ==" not in text)
    return {match[1]: match[2] for match in matches if match}


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


# run directory


def check_run_directory(job: Job) -> Iterator[Finding]:
    path = job.run_dir
    folders = [path, *(pair_folder(path, rank, job.ranks.count) for rank in range(job.ranks.count))]
    for folder, role in product(dict.fromkeys(folders), ("prefetcher", "trainer")):
        holder = holder_of(folder / f"{role}.lock")
        if holder is not None:
            yield error(f"{folder} is held by a {role} with process id {holder}; end it or set another job.run_dir")
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield error(f"job.run_dir = {str(path)!r} cannot be made or written in {place}; choose another")
        return
    used = used_by(job)
    if used is not None:
        yield warning(used)
        return
    newest = Checkpoints(path, Disk()).newest_valid(get_logger())
    where = "is free to use" if newest is None else f"holds a run that continues after {newest.train_steps} train steps"
    yield ok(f"{path} {where}")


def check_threads(job: Job) -> Iterator[Finding]:
    """Finds the trainer's number of threads, on this host. Raises ConfigError if a run there has another."""
    newest, cores = newest_checkpoint(job.run_dir), max(1, usable_cores() // job.ranks.on_host)
    was = None if newest is None else readable(newest)
    first, recorded = job.first_threads(cores), 0 if was is None else was.machine.threads
    found = plural(threads_of_run(job.trainer.threads, first, recorded, trains=True), "thread")
    idle = f"; {plural(cores, 'core')} for each trainer" if first == 1 < cores else ""
    yield ok(f"{found}, as the run in {job.run_dir}" if recorded else f"{found}, which the run keeps{idle}")


def used_by(job: Job) -> str | None:
    try:
        RunDirectory(job.run_dir, "prefetcher").refuse_complete(job.data.epochs)
    except ConfigError as refusal:
        return str(refusal)
    if (job.run_dir / "report.json").exists() and not any((job.run_dir / "checkpoints").glob("step-*")):
        return (
            f"{job.run_dir} holds the report of an earlier run; add --fresh to replace it, or set another job.run_dir"
        )
    return None


def holder_of(lock: Path) -> str | None:
    """The process id in the lock file of a running process; None if no process holds the lock."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode() or "unknown"
    finally:
        os.close(descriptor)
    return None


# model


def check_model(job: Job) -> Iterator[Finding]:
    """Whether the trainer can find model.kind = "package.module:factory" by name. It is not imported, because it
    imports torch."""
    kind = job.model.kind
    if kind in BUILT_IN_MODELS:
        yield ok(kind)
        return
    module, _, factory = kind.partition(":")
    spec = find_module(module, [*sys.path, str(Path.cwd())])
    if spec is None:
        yield error(
            f"model.kind = {kind!r}: there is no module {module} in the working folder or on PYTHONPATH; correct either"
        )
    elif spec.origin and spec.origin.endswith(".py") and not defines(Path(spec.origin), factory):
        yield error(f"model.kind = {kind!r}: {spec.origin} does not define {factory}; correct the name")
    else:
        yield ok(f"{kind} in {spec.origin or 'a built-in module'}; it is not called before the trainer starts")


def find_module(name: str, path: list[str]) -> ModuleSpec | None:
    """Finds a module package by package without importing any; `importlib.util.find_spec` imports the packages."""
    places: list[str] | None = path
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def defines(source: Path, name: str) -> bool:
    """Whether a module binds a name at its top level, judging by its source; a star import or a __getattr__ may."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bool(bound & {name, "*", "__getattr__"})
