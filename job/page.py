"""Makes docs/job-file.md from the schema's structs, types, defaults, and the comments above and beside its keys.

python -m rowcast.job.page > docs/job-file.md
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.formats import FORMATS
from rowcast.job.models import BUILT_IN_MODELS
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.stores import STORES
from rowcast.job.types import notation

SCHEMA = Path(__file__).with_name("schema.py")
REGISTRIES: dict[str, Mapping[str, Any]] = {  # a comment's {FORMATS} becomes the names in FORMATS
    "BUILT_IN_MODELS": BUILT_IN_MODELS,
    "EVICTION_POLICIES": EVICTION_POLICIES,
    "FORMATS": FORMATS,
    "ROW_OPTIMIZERS": ROW_OPTIMIZERS,
    "STORES": STORES,
}
BEGINNING = """# The job file

Both processes read the same TOML file. An unknown key, a wrong type or an impossible value ends them with one
sentence. `--set section.key=value` on the command line of both overrides a key. Sizes take units (`"64MiB"`), and so
do durations (`"60s"`, `"500ms"`, `"5m"`). `examples/` has complete files.

`python -m rowcast.job.page` makes this page from `job/schema.py`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    type: str
    default: str
    meaning: str


def page() -> str:
    source = SCHEMA.read_text(encoding="utf-8")
    structs = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = source.splitlines()
    return "\n".join([BEGINNING, *sections(structs, lines, "Job", "")])


def sections(structs: dict[str, ast.ClassDef], lines: list[str], struct: str, path: str) -> Iterator[str]:
    for field in fields(structs[struct]):
        kind = section_of(field, structs)
        if kind is None:
            continue
        section = f"{path}{name_of(field)}"
        keys = [key(field, lines) for field in fields(structs[kind]) if section_of(field, structs) is None]
        if keys:
            yield f"## `[[{section}]]`\n" if "list[" in ast.unparse(field.annotation) else f"## `[{section}]`\n"
            explained = ast.get_docstring(structs[kind])
            yield from [f"{explained}\n"] if explained else []
            yield table(keys)
        yield from sections(structs, lines, kind, f"{section}.")


def fields(struct: ast.ClassDef) -> list[ast.AnnAssign]:
    return [node for node in struct.body if isinstance(node, ast.AnnAssign)]


def name_of(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)


def section_of(field: ast.AnnAssign, structs: dict[str, ast.ClassDef]) -> str | None:
    """The struct of a field that is a section; None for a key."""
    names = [name.id for name in ast.walk(field.annotation) if isinstance(name, ast.Name)]
    return next((name for name in names if name in structs), None)


def key(field: ast.AnnAssign, lines: list[str]) -> Key:
    above: list[str] = []
    number = field.lineno - 2  # the line above; `lines` counts from 0, `lineno` from 1
    while lines[number].strip().startswith("#"):
        above.insert(0, lines[number].strip().removeprefix("#").strip())
        number -= 1
    _, _, beside = lines[field.lineno - 1].partition("  # ")
    meaning = re.sub(r"\{([A-Z_]+)\}", lambda match: names_of(match[1]), " ".join([*above, beside]).strip())
    return Key(name_of(field), type_of(field.annotation), default_of(field), meaning)


def names_of(registry: str) -> str:
    """The registry's names with their notes, such as `criteo-npy` (the torchrec day layout), `parquet`."""
    notes = {name: own.note for name, own in REGISTRIES[registry].items()}
    return ", ".join(f"`{name}` ({note})" if note else f"`{name}`" for name, note in notes.items())


def type_of(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.BinOp):
        return " or ".join(part for side in (annotation.left, annotation.right) if (part := type_of(side)))
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return ", ".join(f"`{toml(value)}`" for value in values)
    text = ast.unparse(annotation)
    known = {
        "None": "",
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "`true`, `false`",
        "Policy": "text",
        "RowOptimizerKind": "text",
        "StoreName": "text",
        "Size": "text or whole number",
        "OptionalSize": "text or whole number",
    }
    if text in known:
        return known[text]
    return "table" if text.startswith("dict") else "list"


def default_of(field: ast.AnnAssign) -> str:
    if field.value is None:
        return "required"
    text = toml(field.value)
    return f"`{text}`" if text else ""


def toml(value: ast.expr) -> str:
    """A Python literal in TOML's notation; empty for None, which TOML writes by omitting the key."""
    content = ast.literal_eval(value)
    return "" if content is None else notation(content)


def table(keys: list[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key.name}` | {key.type} | {key.default} | {key.meaning} |" for key in keys]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
