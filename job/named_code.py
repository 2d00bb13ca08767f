"""Code that a job names as `package.module:factory`: who named it, and its import.

    a job file, rowcast.train(), --set, --trust    the caller has, so it is imported
    a manifest, a version                          anybody may have: `JobFromFile`, refused unless the caller does, too

Nobody's code is imported from below the run directory.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from rowcast.job.models import NO_MODEL
from rowcast.job.schema import Job
from rowcast.job.types import is_factory
from rowcast.runtime.errors import ConfigError, printable

# every key of a job file whose text is imported
CODE: dict[str, Callable[[Job], str]] = {
    "model.kind": lambda job: job.model.kind,
    "data.format": lambda job: job.data.format,
}


class JobFromFile(Job, frozen=True, kw_only=True):
    """A job that names code, and that was read from a manifest or a version: anybody may have written it."""


def code_in(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the code that the content of a job file names, by key; without rowcast's."""
    named = {key: content.get(key.partition(".")[0], {}).get(key.partition(".")[2], "") for key in CODE}
    return {key: name for key, name in named.items() if is_factory(str(name)) and name != NO_MODEL}


def code_of(job: Job) -> dict[str, str]:
    return code_in(job.content())


def from_file(job: Job) -> Job:
    """Marks a job that was read from a file, if it names code."""
    return as_type(JobFromFile, job) if code_of(job) else job


def trusted(job: Job, names: Collection[str], line: Callable[[list[str]], str], *keys: str) -> Job:
    """Returns the job with its code trusted, of these keys or of all. Raises ConfigError for code of a `JobFromFile`
    that is not among `names`. `line`: what to type to trust such names."""
    if not isinstance(job, JobFromFile):
        return job
    named = {key: name for key, name in code_of(job).items() if key in (keys or CODE) and name not in names}
    if named:
        raise ConfigError(
            f"a file of {printable(str(job.run_dir))} names code, which would be run: "
            f"{printable(', '.join(f'{key} = {name!r}' for key, name in named.items()))}; if you know and trust it: "
            f"{printable(line(sorted({*named.values()})))}"
        )
    return as_type(Job, job)


def as_type(kind: type[Job], job: Job) -> Job:
    return kind(**{name: getattr(job, name) for name in job.__struct_fields__})


def import_code(job: Job, key: str) -> Callable[..., Any]:
    """Imports the `package.module:factory` of a key; those of the working folder come first. Raises
    ConfigError."""
    trusted(job, (), lambda names: f"trusted(job, {names}, ...) of rowcast.job.named_code", key)
    name = CODE[key](job)
    if name == NO_MODEL:
        raise ConfigError(
            f"{key}: the model of this run is in a training script of its own; run that script, or take its tables and "
            "weights by `rowcast export`"
        )
    module_name, _, attribute = name.partition(":")
    search_here(job)
    try:
        for package in accumulate(module_name.split("."), "{}.{}".format):
            for place in places(package):  # before it is imported, which the search for the next one does
                if is_below(place, job.run_dir):
                    raise ConfigError(
                        f"{key} = {name!r} is {place}, below the run directory {job.run_dir}, from which nothing is "
                        "imported; move the code elsewhere"
                    )
        factory = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key} = {name!r}: cannot import it ({error}); correct the name or PYTHONPATH") from error
    if not callable(factory):
        raise ConfigError(f"{key} = {name!r} is not callable; name a function")
    return factory  # type: ignore[no-any-return]


def search_here(job: Job) -> None:
    """Searches modules in the working folder, unless it is in the run directory."""
    here = Path.cwd()
    if str(here) not in sys.path and not is_below(here, job.run_dir):
        sys.path.insert(0, str(here))


def places(module: str) -> Iterator[Path]:
    """Yields a module's file, or a package's folders. Imports the packages above it. Raises ImportError, ValueError."""
    spec = find_spec(module)
    if spec is not None:
        files = [spec.origin] if spec.has_location and spec.origin else []
        yield from map(Path, [*files, *(spec.submodule_search_locations or ())])


def is_below(path: Path, folder: Path) -> bool:
    """Whether it is in the folder, by its name or as links lead."""
    return path.absolute().is_relative_to(folder.absolute()) or path.resolve().is_relative_to(folder.resolve())
