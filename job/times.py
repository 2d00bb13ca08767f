"""How times are written in text and in numbers: the formats of `data.columns.prepare.NAME.time`."""

import re
from functools import cache

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
ZONE = r"(?P<z>[Zz]|UTC|GMT|[+-]\d{2}(?::?\d{2})?)"
CLOCK = r"(?P<H>[01]?\d|2[0-3])(?::(?P<M>[0-5]\d)(?::(?P<S>[0-5]\d|60)(?:[.,]\d+)?)?)?"
ISO = (
    r"(?P<Y>\d{4})[-/.](?P<m>0?[1-9]|1[0-2])[-/.](?P<d>0?[1-9]|[12]\d|3[01])"
    rf"(?:(?:[Tt]|\s+){CLOCK}(?:\s*{ZONE})?)?"
)
DIRECTIVES = {  # one or two digits; two where digits touch
    "Y": r"(?P<Y>\d{4})",
    "y": r"(?P<y>\d{2})",
    "m": r"(?P<m>0[1-9]|1[0-2]|[1-9])",
    "d": r"(?P<d>0[1-9]|[12]\d|3[01]|[1-9])",
    "H": r"(?P<H>[01]\d|2[0-3]|\d)",
    "M": r"(?P<M>[0-5]\d)",
    "S": r"(?P<S>[0-5]\d|60)(?:[.,]\d+)?",
    "b": rf"(?i:(?P<b>{'|'.join(MONTHS)})[a-z]*)",
    "a": r"[A-Za-z]+",
    "p": r"(?P<p>[AaPp])\.?[Mm]\.?",
    "z": ZONE,
}
TOUCHING = {"m": r"(?P<m>0[1-9]|1[0-2])", "d": r"(?P<d>0[1-9]|[12]\d|3[01])", "H": r"(?P<H>[01]\d|2[0-3])"}


@cache
def time_pattern(form: str) -> str:
    """Returns the regular expression of a format; "" is ISO 8601. Its groups have the names of the directives.

    Raises ValueError for a directive that is not known or given twice, and for a format without a date."""
    if not form:
        return rf"^\s*{ISO}\s*$"
    parts = re.findall(r"%.|\s+|.", form, re.DOTALL)
    names = [part[1:] if part.startswith("%") else "" for part in parts]
    pattern = ""
    for at, (part, name) in enumerate(zip(parts, names, strict=True)):
        touches = any(names[max(at - 1, 0) : at]) or any(names[at + 1 : at + 2])
        if name and name not in DIRECTIVES:
            known = " ".join(f"%{own}" for own in DIRECTIVES)
            raise ValueError(f"time = {form!r} holds {part}, and a time is made of {known}; correct it")
        if name:
            pattern += TOUCHING.get(name, DIRECTIVES[name]) if touches else DIRECTIVES[name]
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    if any(names.count(name) > 1 for name in names if name) or not all(map(set(names).intersection, ("Yy", "mb", "d"))):
        raise ValueError(f"time = {form!r} must hold a year (%Y or %y), a month (%m or %b) and a day (%d), each once")
    return rf"^\s*{pattern}\s*$"
