"""Checks the types of a job file's keys against its structs, and says in one sentence what a wrong key should be."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from rowcast.runtime.name_lists import closest

SHOWN = 60  # characters of a value in a sentence


def check_types(content: Any, struct: type[msgspec.Struct]) -> None:
    """Raises ValueError with one sentence for the first unknown key, missing key, or value of a wrong type."""
    job = inspect.type_info(struct)
    assert isinstance(job, inspect.StructType), f"{struct.__name__} is a struct"
    Checker(job).section(job, content, "")


class Checker:
    def __init__(self, job: inspect.StructType) -> None:
        self._homes: dict[str, list[str]] = {}  # key -> sections that have it
        for section, own in sections_of(job, ""):
            for field in own.fields:
                self._homes.setdefault(field.encode_name, []).append(section)

    def section(self, struct: inspect.StructType, content: Any, path: str) -> None:
        fields = {field.encode_name: field for field in struct.fields}
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{path} = {shown(content)} must be a section: write {heading(path)}, and its keys below it: "
                f"{', '.join(fields)}"
            )
        for key in content:
            if key not in fields:
                raise ValueError(f"{f'{path}: ' if path else ''}{self._unknown(str(key), list(fields), path)}")
        for name, field in fields.items():
            if name in content:
                self._value(field, content[name], f"{path}.{name}" if path else name)
            elif field.required:
                raise ValueError(f"{f'{path}: ' if path else ''}{missing(field, path)}")

    def _value(self, field: inspect.Field, value: Any, path: str) -> None:
        struct = section_type(field.type)
        if struct is None:
            check_value(field.type, value, path, default_of(field))
        elif isinstance(field.type, inspect.ListType):
            if not isinstance(value, list | tuple):
                raise ValueError(
                    f"{path} = {shown(value)} must be a list of sections: write [[{path}]], with two brackets, "
                    "above each one"
                )
            for i, item in enumerate(value):
                self.section(struct, item, f"{path}[{i}]")
        elif value is not None or field.type is struct:  # in JSON, null may replace an optional section
            self.section(struct, value, path)

    def _unknown(self, key: str, known: list[str], path: str) -> str:
        near, homes = closest(key, known), self._homes.get(key, [])
        homes = [home for home in homes if home.startswith(f"{path}.")] or homes
        if 0 < len(homes) <= 3:
            home = " or ".join(heading(home) if home else "the file, above every section" for home in homes)
            return f"unknown key {key}; it belongs to {home}" + (f", and the nearest here is {near}" if near else "")
        return f"unknown key {key}; " + (
            f"the nearest is {near}" if near else f"remove it, or use one of {', '.join(known)}"
        )


def sections_of(struct: inspect.StructType, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    """Each section with its name in a job file; the whole file comes first, named ""."""
    yield path, struct
    for field in struct.fields:
        inner = section_type(field.type)
        if inner is not None:
            name = f"{path}.{field.encode_name}" if path else field.encode_name
            yield from sections_of(inner, f"{name}[]" if isinstance(field.type, inspect.ListType) else name)


def heading(path: str) -> str:
    name, is_list, _ = path.partition("[")
    return f"[[{name}]]" if is_list else f"[{name}]"


def section_type(type: inspect.Type) -> inspect.StructType | None:
    if isinstance(type, inspect.UnionType):
        return next((own for one in type.types if (own := section_type(one)) is not None), None)
    if isinstance(type, inspect.ListType):
        return section_type(type.item_type)
    return type if isinstance(type, inspect.StructType) else None


def check_value(type: inspect.Type, value: Any, path: str, default: Any = None) -> None:
    """Raises ValueError if the key does not take `value`; `default` is the key's, None without one."""
    if accepts(type, value):
        return
    for one in alternatives(type):  # a wrong item of a list or table is named itself
        if isinstance(one, inspect.ListType) and isinstance(value, list | tuple):
            for i, item in enumerate(value):
                check_value(one.item_type, item, f"{path}[{i}]")
        if isinstance(one, inspect.DictType) and isinstance(value, Mapping):
            for key, item in value.items():
                check_value(one.value_type, item, f"{path}.{key}")
    choices = [
        own
        for one in alternatives(type)
        if isinstance(one, inspect.LiteralType)
        for own in one.values
        if isinstance(own, str)
    ]
    near, wanted, hint = closest(str(value), choices), described(type), ""
    if near is not None and wanted != notation(near):
        hint = f"; the nearest is {notation(near)}"
    elif (example := notation(example_of(type, value, default))) not in wanted:
        hint = f", such as {example}" if path.endswith("]") else f", such as {path.rpartition('.')[2]} = {example}"
    raise ValueError(f"{path} = {shown(value)} must be {wanted}{hint}")


def accepts(type: inspect.Type, value: Any) -> bool:
    match bare(type):
        case inspect.AnyType():
            return True
        case inspect.UnionType(types=types):
            return any(accepts(one, value) for one in types)
        case inspect.LiteralType(values=values):
            return isinstance(value, str | int) and not isinstance(value, bool) and value in values
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.ListType(item_type=item):
            return isinstance(value, list | tuple) and all(accepts(item, own) for own in value)
        case inspect.TupleType(item_types=items):
            return isinstance(value, list | tuple) and len(value) == len(items) and all(map(accepts, items, value))
        case inspect.DictType(key_type=key, value_type=item):
            return isinstance(value, Mapping) and all(
                accepts(key, name) and accepts(item, own) for name, own in value.items()
            )
    raise NotImplementedError(f"a job file has no keys of {type}")


def alternatives(type: inspect.Type) -> list[inspect.Type]:
    """The members of a union without None, which TOML cannot express."""
    type = bare(type)
    types = type.types if isinstance(type, inspect.UnionType) else (type,)
    return [one for one in types if not isinstance(one, inspect.NoneType)]


def bare(type: inspect.Type) -> inspect.Type:
    """The type without metadata; `Meta(extra={"one_of": registry})` becomes a Literal of the registry's names."""
    match type:
        case inspect.Metadata(extra={"one_of": names}):
            return inspect.LiteralType(values=tuple(sorted(names)))
        case inspect.Metadata(type=inner):
            return inner
    return type


def described(type: inspect.Type) -> str:
    """What a key takes, in words: `a whole number or "auto"`."""
    return " or ".join(
        described_one(one) for one in sorted(alternatives(type), key=lambda one: isinstance(one, inspect.LiteralType))
    )


def described_one(type: inspect.Type) -> str:
    match type:
        case inspect.LiteralType(values=values):
            *others, last = map(notation, values)
            return f"{', '.join(others)} or {last}" if others else last
        case inspect.ListType(item_type=item):
            return f"a list of {plural(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)} {plural(items[0])}"
        case inspect.DictType(value_type=item):
            return "a table" if isinstance(item, inspect.AnyType) else f"a table of {plural(item)}"
        case inspect.BoolType():
            return "true or false"
    return {inspect.IntType: "a whole number", inspect.FloatType: "a number", inspect.StrType: "text in quotes"}[
        type.__class__
    ]


def plural(type: inspect.Type) -> str:
    words = {inspect.IntType: "whole numbers", inspect.FloatType: "numbers", inspect.StrType: "texts"}
    return " or ".join(words[one.__class__] for one in alternatives(type))


def example_of(type: inspect.Type, value: Any, default: Any) -> Any:
    tries = [[value], number_of(value), *([default] if default else [])]
    return next((own for own in tries if own is not None and accepts(type, own)), any_of(type))


def any_of(type: inspect.Type) -> Any:
    match type:
        case inspect.Metadata(extra_json_schema={"examples": [example, *_]}):
            return example
        case inspect.UnionType():
            return any_of(alternatives(type)[0])
        case inspect.LiteralType(values=[first, *_]):
            return first
        case inspect.ListType(item_type=item):
            return [any_of(item)]
        case inspect.TupleType(item_types=items):
            return [any_of(item) for item in items]
        case inspect.DictType(value_type=item):
            return {"name": any_of(item)}
    return {inspect.IntType: 16, inspect.FloatType: 0.1, inspect.BoolType: True}.get(type.__class__, "...")


def number_of(value: Any) -> int | float | None:
    """The number in a text or float: `"0.1"` -> 0.1, `512.0` -> 512; None if there is none."""
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        return None
    return int(number) if number is not None and number.is_integer() else number


def missing(field: inspect.Field, path: str) -> str:
    struct, name = section_type(field.type), field.encode_name
    if struct is None:
        return f"key {name} is missing; give {described(field.type)}"
    needed = [own.encode_name for own in struct.fields if own.required]
    return (
        f"section {heading(f'{path}.{name}' if path else name)} is missing; it needs {' and '.join(needed) or 'no key'}"
    )


def default_of(field: inspect.Field) -> Any:
    return None if field.default is msgspec.NODEFAULT else field.default


def notation(value: Any) -> str:
    """A value in TOML's notation; None as JSON's null."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int():
            return f"{value:_}" if value >= 10_000 else str(value)
        case list() | tuple():
            return f"[{', '.join(map(notation, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{key} = {notation(own)}' for key, own in value.items())}}}"
        case _:
            return str(value)


def shown(value: Any) -> str:
    text = notation(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
