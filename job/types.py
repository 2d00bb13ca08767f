"""Checks a value of a job file against the type and range of its key, and explains in one sentence what it should
be."""

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import inspect

from rowcast.runtime.errors import closest

SHOWN = 60  # characters of a value in a sentence


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
        choice
        for one in alternatives(type)
        if isinstance(one, inspect.LiteralType)
        for choice in one.values
        if isinstance(choice, str)
    ]
    near, wanted, hint = closest(str(value), choices), described(type), ""
    if any(map(partial(is_number, value), alternatives(type))):
        pass  # only its range is wrong
    elif near is not None and wanted != notation(near):
        hint = f"; the nearest is {notation(near)}"
    elif (example := notation(example_of(type, value, default))) not in wanted:
        hint = f", such as {example}" if path.endswith("]") else f", such as {path.rpartition('.')[2]} = {example}"
    raise ValueError(f"{path} = {shown(value)} must be {wanted}{hint}")


def is_number(value: Any, type: inspect.Type) -> bool:
    """Whether it is one of that type, in its range or not."""
    kinds = int if isinstance(type, inspect.IntType) else int | float if isinstance(type, inspect.FloatType) else ()
    return isinstance(value, kinds) and not isinstance(value, bool)


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
        case inspect.IntType() | inspect.FloatType() as number:
            return is_number(value, number) and is_within(number, value)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.ListType(item_type=item):
            return isinstance(value, list | tuple) and all(accepts(item, element) for element in value)
        case inspect.TupleType(item_types=items):
            return isinstance(value, list | tuple) and len(value) == len(items) and all(map(accepts, items, value))
        case inspect.DictType(key_type=key, value_type=item):
            return isinstance(value, Mapping) and all(
                accepts(key, name) and accepts(item, element) for name, element in value.items()
            )
    raise NotImplementedError(f"a job file has no keys of {type}")


def is_within(number: inspect.IntType | inspect.FloatType, value: float) -> bool:
    """A number with any bound is finite."""
    if not has_bounds(number):
        return True
    return (
        (isinstance(value, int) or math.isfinite(value))
        and (number.ge is None or value >= number.ge)
        and (number.gt is None or value > number.gt)
        and (number.le is None or value <= number.le)
        and (number.lt is None or value < number.lt)
    )


def has_bounds(number: inspect.IntType | inspect.FloatType) -> bool:
    return any(bound is not None for bound in (number.ge, number.gt, number.le, number.lt))


def bounds(number: inspect.IntType | inspect.FloatType) -> str:
    """In words, with a space before them: ` from 1 to 64`, ` of at least 0 and below 1`; empty without bounds."""
    if number.ge is not None and number.le is not None:
        return f" from {bound(number.ge)} to {bound(number.le)}"
    words = (("of at least", number.ge), ("above", number.gt), ("at most", number.le), ("below", number.lt))
    said = " and ".join(f"{word} {bound(value)}" for word, value in words if value is not None)
    return f" {said}" if said else ""


def bound(value: float) -> str:
    """Large powers of two as such: `2**31 - 1`."""
    for less, text in ((0, ""), (1, " - 1")):
        power = int(value) + less
        if power > 2**16 and power & (power - 1) == 0:
            return f"2**{power.bit_length() - 1}{text}"
    return notation(int(value) if value == int(value) else value)


def alternatives(type: inspect.Type) -> list[inspect.Type]:
    """The members of a union without None, which TOML cannot express."""
    type = bare(type)
    if isinstance(type, inspect.UnionType):
        return [alternative for one in type.types for alternative in alternatives(one)]
    return [] if isinstance(type, inspect.NoneType) else [type]


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
        case inspect.IntType():
            return f"a whole number{bounds(type)}"
        case inspect.FloatType():
            is_open = has_bounds(type) and type.le is None and type.lt is None
            return f"a {'finite ' if is_open else ''}number{bounds(type)}"
        case inspect.StrType():
            return "text in quotes"
    raise NotImplementedError(f"a job file has no keys of {type}")


def plural(type: inspect.Type) -> str:
    return " or ".join(plural_one(one) for one in alternatives(type))


def plural_one(type: inspect.Type) -> str:
    match type:
        case inspect.IntType():
            return f"whole numbers{bounds(type)}"
        case inspect.FloatType():
            return f"numbers{bounds(type)}"
    return "texts"


def example_of(type: inspect.Type, value: Any, default: Any) -> Any:
    tries = [[value], number_of(value), *([default] if default else [])]
    return next((example for example in tries if example is not None and accepts(type, example)), any_of(type))


def any_of(type: inspect.Type) -> Any:
    if (example := example_in(type)) is not None:
        return example
    match type:
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


def example_in(type: inspect.Type) -> Any:
    """The one that `Meta(examples=[...])` gives; None without."""
    match type:
        case inspect.Metadata(extra_json_schema={"examples": [example, *_]}):
            return example
    return None


def number_of(value: Any) -> int | float | None:
    """The number in a text or float: `"0.1"` -> 0.1, `512.0` -> 512; None if there is none."""
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        return None
    return int(number) if number is not None and number.is_integer() else number


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
            return f"{{{', '.join(f'{key} = {notation(element)}' for key, element in value.items())}}}"
        case _:
            return str(value)


def shown(value: Any) -> str:
    text = notation(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_factory(name: str) -> bool:
    return re.fullmatch(r"[^:\s]+:[^:\s]+", name) is not None
