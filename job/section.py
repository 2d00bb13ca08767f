"""Decodes sections of a job file into frozen structs. A section may have kinds, and a kind may have separate keys.

@Section            keys, their types and ranges as annotations, and `check` for what these cannot say
Section.kinds       the registry of a section's kinds: an entry names the struct with the keys of its kind
decode              content -> the struct of its kind, or a ValueError with one sentence
REMOVED             keys, kinds and options of earlier versions. Whoever removes one adds its line here:

    "store.kind = mapped"      a value of a key
    "prefetcher.background"    a key, or a section with its keys
    "run --verify"             an option of a subcommand
    "verify"                   a subcommand
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import inspect

from rowcast.job.types import check_value, described, example_in, is_factory, notation, shown
from rowcast.runtime.errors import closest

LAST_COMMIT = "4c36c62"  # has all of them but these
LATER = {
    "advise --cold-rows-s": "beef195",
    "timeline --steps": "3f10acb",
    "simulate --plot": "3f10acb",
}  # name -> a commit that has it
NO_VERIFY = "checksums cover rows on disk and on Redis, and `make exact` tests a machine"
NO_TRACES = "the data is read again, which gives the same batches"
PERFETTO = "open timeline.json at https://ui.perfetto.dev, where any steps can be selected"
NO_HOT_ROWS = "look-ahead keeps the rows that are needed next, whichever are hot (docs/orders.md)"
REMOVED = {  # name -> what replaces it
    "simulate --rates": "`simulate --ranks` counts rows and bytes, and `rowcast estimate` models a step's time",
    "run --verify": NO_VERIFY,
    "run --verify-share": NO_VERIFY,
    "train --verify": NO_VERIFY,
    "timeline --plot": PERFETTO,
    "timeline --steps": PERFETTO,
    "simulate --plot": "`rowcast simulate --json` has the numbers",
    "profile": f"{NO_HOT_ROWS}; `simulate` tells the hit ratios, and `advise` the curve",
    "data.order": NO_HOT_ROWS,
    "data.hot": NO_HOT_ROWS,
    "cache.pin": NO_HOT_ROWS,
    "advise --samples": "--max-steps reads the first steps, and the whole run is surer",
    "advise --cold-rows-s": "`rowcast simulate --store-memory` counts the cold tier's rows (docs/tiers.md)",
    "estimate --plot": "the line of the bottleneck names the critical path's tasks",
    "estimate --advised": "`rowcast advise` prints the sections; put them into the job file or give them by --vary",
    "estimate --compare": "`rowcast estimate --run` prints the same ms of each task as `--rates`",
    "store.kind = mapped": 'store.kind = "tiered" keeps the rows of coming steps in store.memory, the others on disk',
    "run --save-trace": NO_TRACES,
    "simulate --save-trace": NO_TRACES,
    "simulate --trace": NO_TRACES,
}


def gone(names: Iterable[str]) -> str | None:
    """Returns a sentence for the first of the names that is gone, or None."""
    name_gone = next((name for name in names if name in REMOVED), None)
    if name_gone is None:
        return None
    return f"{name_gone} is gone: {REMOVED[name_gone]}; commit {LATER.get(name_gone, LAST_COMMIT)} has it"


def removed_option(subcommand: str, arguments: Iterable[str]) -> str | None:
    """Returns the sentence for a command line with a subcommand or an option that is gone, or None."""
    options = (argument.partition("=")[0] for argument in arguments)
    return gone((subcommand, *(f"{subcommand} {option}" for option in options)))


def without_removed(content: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The job of an earlier version's manifest. A section whose kind is gone is left out, so it has its defaults."""
    kept = {}
    for key, value in content.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            if gone(f"{name}.{inner} = {setting}" for inner, setting in value.items()):
                continue
            value = without_removed(value, name)
        if name not in REMOVED:
            kept[key] = value
    return kept


@dataclass(frozen=True, slots=True)
class Kinds:
    registry: Mapping[str, Any]  # of entries with `settings`, a struct, and a `note` for docs/job-file.md
    key: str = "kind"  # names the kind
    custom: "type[Section] | None" = None  # the struct for "package.module:factory"; None if there must be an entry

    def structs(self) -> "dict[str, type[Section]]":
        named: dict[str, type[Section]] = {name: entry.settings for name, entry in self.registry.items()}
        return named if self.custom is None else named | {"package.module:factory": self.custom}


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kinds: ClassVar[Kinds | None] = None

    def __post_init__(self) -> None:
        for name, key in keys_of(type(self)).items():
            if section_type(key.type) is None:
                check_value(key.type, getattr(self, name), name, default_of(key))
        self.check()

    def check(self) -> None:
        """Raises ValueError for rules beyond types and ranges."""


S = TypeVar("S", bound=Section)


@cache
def keys_of(section: type[Section]) -> dict[str, inspect.Field]:
    struct = inspect.type_info(section)
    assert isinstance(struct, inspect.StructType), f"{section.__name__} is a struct"
    keys = {field.name: field for field in struct.fields}
    kinds = section.kinds
    if kinds is not None and kinds.custom is None:
        one_of = inspect.LiteralType(values=tuple(sorted(kinds.registry)))
        keys[kinds.key] = msgspec.structs.replace(keys[kinds.key], type=one_of)
    return keys


def default_of(key: inspect.Field) -> Any:
    """None for a key that is required."""
    if key.default is not msgspec.NODEFAULT:
        return key.default
    return None if key.default_factory is msgspec.NODEFAULT else key.default_factory()


@cache
def keys_of_kinds(section: type[Section]) -> dict[str, dict[str, inspect.Field]]:
    """Key -> the kinds that have it, each with its own field; without those that every kind has."""
    homes_by_key: dict[str, dict[str, inspect.Field]] = {}
    structs = {} if section.kinds is None else section.kinds.structs()
    for kind, struct in structs.items():
        for name, key in keys_of(struct).items():
            homes_by_key.setdefault(name, {})[kind] = key
    return {name: homes for name, homes in homes_by_key.items() if len(homes) < len(structs)}


def defaults_of_other_kinds(section: Section) -> dict[str, Any]:
    """Returns the defaults of keys that only other kinds of the section have."""
    own_keys = keys_of(type(section))
    homes = keys_of_kinds(type(section))
    return {name: default_of(next(iter(keys.values()))) for name, keys in homes.items() if name not in own_keys}


def decode(section: type[S], content: Any, path: str = "") -> S:
    """Raises ValueError with one sentence for the first unknown or missing key, or refused value."""
    return cast(S, Decoder(section).section(section, content, path))


class Decoder:
    def __init__(self, whole: type[Section]) -> None:
        self._homes: dict[str, list[str]] = {}  # key -> sections that have it
        for path, section in sections_of(whole, ""):
            for key in {**keys_of(section), **keys_of_kinds(section)}:
                self._homes.setdefault(key, []).append(path)

    def section(self, section: type[Section], content: Any, path: str) -> Section:
        if not isinstance(content, Mapping):
            keys = keys_of(struct_for(section, {}, path))
            raise ValueError(
                f"{path} = {shown(content)} must be a section: write {heading(path)}, and its keys below it: "
                f"{', '.join(keys)}"
            )
        for key, value in content.items():
            name = f"{path}.{key}" if path else key
            if sentence := gone((name, f"{name} = {value}")):
                raise ValueError(sentence)
        struct = struct_for(section, content, path)
        keys = keys_of(struct)
        for name in content:
            if name not in keys:
                self._refuse(name, content[name], struct, content, path)
        values = {}
        for field in msgspec.structs.fields(struct):
            key, name = keys[field.name], field.name
            if name in content:
                values[name] = self._value(key, field.type, content[name], f"{path}.{name}" if path else name)
            elif key.required:
                raise ValueError(prefixed(path, missing(key, path)))
        try:
            return struct(**values)
        except ValueError as error:
            raise ValueError(prefixed(path, str(error))) from None

    def _value(self, key: inspect.Field, type: Any, value: Any, path: str) -> Any:
        section = section_type(key.type)
        if section is None:
            check_value(key.type, value, path, default_of(key))
            return msgspec.convert(value, type)
        if isinstance(key.type, inspect.ListType):
            if not isinstance(value, list | tuple):
                raise ValueError(
                    f"{path} = {shown(value)} must be a list of sections: write [[{path}]], with two brackets, "
                    "above each one"
                )
            return [self.section(section, item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(key.type, inspect.DictType):
            if not isinstance(value, Mapping):
                raise ValueError(f"{path} = {shown(value)} must be a table of sections: write [{path}.NAME] above each")
            return {name: self.section(section, item, f"{path}.{name}") for name, item in value.items()}
        is_optional = isinstance(key.type, inspect.UnionType)
        return None if value is None and is_optional else self.section(section, value, path)  # null, in JSON

    def _refuse(self, key: str, value: Any, struct: type[Section], content: Mapping[str, Any], path: str) -> None:
        """Refuses a key that only other kinds have, unless it has its default, which has no effect."""
        homes = keys_of_kinds(struct).get(key)
        if homes is None:
            raise ValueError(prefixed(path, self._unknown(key, list(keys_of(struct)), path)))
        for other in homes.values():
            default = default_of(other)
            if type(value) is type(default) and value == default:
                return
            check_value(other.type, value, f"{path}.{key}", default)
        assert struct.kinds is not None, "only sections with kinds have keys of other kinds"
        kind = struct.kinds.key
        chosen = content.get(kind, default_of(keys_of(struct)[kind]))
        names = " or ".join(f'"{name}"' for name in homes)
        raise ValueError(prefixed(path, f"{key} belongs to {kind} = {names}, not {chosen!r}; remove it"))

    def _unknown(self, key: str, known: list[str], path: str) -> str:
        near, homes = closest(key, known), self._homes.get(key, [])
        homes = [home for home in homes if home.startswith(f"{path}.")] or homes
        if 0 < len(homes) <= 3:
            home = " or ".join(heading(home) if home else "the file, above every section" for home in homes)
            return f"unknown key {key}; it belongs to {home}" + (f", and the nearest here is {near}" if near else "")
        return f"unknown key {key}; " + (
            f"the nearest is {near}" if near else f"remove it, or use one of {', '.join(known)}"
        )


def struct_for(section: type[Section], content: Mapping[str, Any], path: str) -> type[Section]:
    """The struct of the content's kind. Raises ValueError for a kind that does not exist."""
    if section.kinds is None:
        return section
    key = keys_of(section)[section.kinds.key]
    if key.name not in content and key.required:
        return section  # to be refused without it
    name, structs = content.get(key.name, default_of(key)), section.kinds.structs()
    check_value(key.type, name, f"{path}.{key.name}", default_of(key))
    if name not in section.kinds.registry and not is_factory(name):
        raise ValueError(prefixed(path, f"{key.name} = {name!r} is not one of {', '.join(structs)}"))
    return structs.get(name, section.kinds.custom or section)


def prefixed(path: str, sentence: str) -> str:
    return f"{path}: {sentence}" if path else sentence


def sections_of(section: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Each section with its name in a job file; the whole file comes first, named ""."""
    yield path, section
    for name, key in keys_of(section).items():
        inner = section_type(key.type)
        if inner is not None:
            inner_path = f"{path}.{name}" if path else name
            among = {inspect.ListType: "[]", inspect.DictType: ".NAME"}.get(type(key.type), "")
            yield from sections_of(inner, f"{inner_path}{among}")


def heading(path: str) -> str:
    name, is_list, _ = path.partition("[")
    return f"[[{name}]]" if is_list else f"[{name}]"


def section_type(type: inspect.Type) -> "type[Section] | None":
    if isinstance(type, inspect.UnionType):
        return next((inner for one in type.types if (inner := section_type(one)) is not None), None)
    if isinstance(type, inspect.ListType):
        return section_type(type.item_type)
    if isinstance(type, inspect.DictType):
        return section_type(type.value_type)
    return cast(Any, type.cls) if isinstance(type, inspect.StructType) else None


def missing(key: inspect.Field, path: str) -> str:
    section, name = section_type(key.type), key.name
    if section is None:
        example = example_in(key.type)
        such = "" if example is None else f", such as {name} = {notation(example)}"
        return f"key {name} is missing; give {described(key.type)}{such}"
    needed = [field.name for field in keys_of(section).values() if field.required]
    return (
        f"section {heading(f'{path}.{name}' if path else name)} is missing; it needs {' and '.join(needed) or 'no key'}"
    )
