"""Makes docs/job-file.md from the sections' structs, and the comments above and beside their keys.

python -m benchmarks.job_page > docs/job-file.md
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from inspect import getsource
from textwrap import dedent

from msgspec import inspect

from rowcast.job.schema import EVICTION_POLICIES, Job
from rowcast.job.section import Section, default_of, keys_of, section_type
from rowcast.job.types import described, notation

BEGINNING = """# The job file

Both processes read the same TOML file. An unknown key, a wrong type or an impossible value ends them with one
sentence. `--set section.key=value` on the command line of both overrides a key. Sizes take units (`"64MiB"`), and so
do durations (`"60s"`, `"500ms"`, `"5m"`). `examples/` has complete files. A relative path, of data or of `job.run_dir`,
begins in the folder in which the command is started, wherever the job file is.

A key that names kinds in front of its meaning exists only for these. `python -m benchmarks.job_page` makes this page
from `job/`.
"""


def page() -> str:
    return "\n".join([BEGINNING, *sections(Job, "")])


def sections(struct: type[Section], path: str) -> Iterator[str]:
    for name, field in keys_of(struct).items():
        inner = section_type(field.type)
        if inner is None:
            continue
        rows = [*own_rows(inner), *rows_of_kinds(inner)]
        if rows:
            is_list, each = isinstance(field.type, inspect.ListType), isinstance(field.type, inspect.DictType)
            yield f"## `[[{path}{name}]]`\n" if is_list else f"## `[{path}{name}{'.NAME' * each}]`\n"
            yield from [f"{inner.__doc__}\n"] if inner.__doc__ else []
            yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
        yield from sections(inner, f"{path}{name}.")


def own_rows(struct: type[Section]) -> list[str]:
    values = (name for name, key in keys_of(struct).items() if section_type(key.type) is None)
    return [row(struct, name, meanings(struct)[name]) for name in values]


def rows_of_kinds(struct: type[Section]) -> list[str]:
    """Returns one row per key and meaning, for all kinds that have it."""
    kinds: dict[tuple[str, str], list[str]] = {}
    structs = {} if struct.kinds is None else struct.kinds.structs()
    for kind, own in structs.items():
        for name in keys_of(own):
            if name not in keys_of(struct):
                kinds.setdefault((name, meanings(own)[name]), []).append(kind)
    return [
        row(structs[homes[0]], name, f"{', '.join(f'`{home}`' for home in homes)}: {meaning}")
        for (name, meaning), homes in kinds.items()
    ]


def row(struct: type[Section], name: str, meaning: str) -> str:
    key = keys_of(struct)[name]
    default = default_of(key)
    said = "required" if key.required else "" if default is None else f"`{notation(default)}`"
    is_kind = struct.kinds is not None and struct.kinds.key == name
    return f"| `{name}` | {'text in quotes' if is_kind else described(key.type)} | {said} | {meaning} |"


@cache
def meanings(struct: type[Section]) -> dict[str, str]:
    """Key -> the comments above and beside it, in the class that declares it."""
    if struct is Section:
        return {}
    source = dedent(getsource(struct))
    [declared] = ast.parse(source).body
    assert isinstance(declared, ast.ClassDef)
    lines, found = source.splitlines(), dict(meanings(struct.__base__))
    for field in declared.body:
        if isinstance(field, ast.AnnAssign):
            above: list[str] = []
            number = field.lineno - 2  # the line above; `lines` counts from 0, `lineno` from 1
            while lines[number].strip().startswith("#"):
                above.insert(0, lines[number].strip().removeprefix("#").strip())
                number -= 1
            _, _, beside = lines[field.lineno - 1].partition("  # ")
            text = " ".join([*above, beside]).strip()
            found[ast.unparse(field.target)] = text.replace("{kinds}", names_of_kinds(struct))
    return found


def names_of_kinds(struct: type[Section]) -> str:
    """The registry's names with their notes, such as `criteo-npy` (the torchrec day layout), `parquet`."""
    registry = EVICTION_POLICIES if struct.kinds is None else struct.kinds.registry
    notes = {name: own.note for name, own in registry.items()}
    return ", ".join(f"`{name}` ({note})" if note else f"`{name}`" for name, note in notes.items())


if __name__ == "__main__":
    sys.stdout.write(page())
