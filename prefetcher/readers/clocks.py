"""Makes numbers of times, for `data.columns.prepare.NAME.clock`: the hour, the weekday, or days since a date.

Times are seconds since 1970 in UTC, in fp64. A text with an offset is converted, one without is taken as written.

    Arrow's timestamps and dates      as they are
    numbers, also as text             seconds, milliseconds, microseconds or nanoseconds, by their size
    text                              ISO 8601
    any of text and numbers           `time`, a format, such as "%Y%m%d" for 20240301
"""

import re
from contextlib import suppress
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowcast.job.formats import Prepare
from rowcast.job.times import MONTHS, time_pattern
from rowcast.prefetcher.readers.hashed_ids import is_text
from rowcast.prefetcher.readers.id_check import Location
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import DataError

DAY = 86400
THURSDAY = 3  # 1970-01-01
NUMBER, ZONED = rb"\s*\d+(?:\.\d*)?\s*", re.compile(rb":.*[Zz+-]")  # in text
# (limit, units in a second): a number below 1e11 counts seconds, one below 1e14 milliseconds, and so on
UNITS = ((1e11, 1), (1e14, 1e3), (1e17, 1e6), (np.inf, 1e9))


def is_time(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold times."""
    tests = (is_text, pa.types.is_integer, pa.types.is_floating, pa.types.is_timestamp, pa.types.is_date)
    return any(test(kind) for test in tests)


def clock_numbers(values: Any, rule: Prepare, name: str, location: Location) -> F64:
    """Returns f64 [n] of a pyarrow array [n] of times, NaN for a missing one and for empty text. Raises DataError for a
    value that is not a time."""
    if is_text(values.type):
        texts = values.cast(pa.binary())
        values = pc.if_else(pc.equal(pc.binary_length(texts), 0), None, texts)
    seconds = seconds_of(values, rule.time)
    wrong = np.isnan(seconds) & values.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(values.type):
        wrong &= ~np.isnan(values.to_numpy(zero_copy_only=False))
    if wrong.any():
        at, form = int(np.argmax(wrong)), rule.time or "2024-03-01 17:05:00"
        value = values[at].as_py()
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        raise DataError(
            f"{location(at)}, column {rule.of or name}: {text[:40]!r} is no time such as {form}; correct it, or set "
            f"data.columns.prepare.{name}.time or .missing"
        )
    if rule.clock == "hour":
        return np.floor(seconds / 3600) % 24
    days = np.floor(seconds / DAY)
    if rule.clock == "weekday":
        return (days + THURSDAY) % 7
    return days - (date.fromisoformat(rule.since) - date(1970, 1, 1)).days


def seconds_of(values: Any, form: str) -> F64:
    """Returns f64 [n]; NaN for a missing value, and for one that is not a time of this form."""
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return of_timestamps(values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False))
    if is_text(values.type):
        texts = values.cast(pa.binary())
        return of_texts(texts, form) if form else of_iso(texts)
    if form:
        wide = values.cast(pa.float64(), safe=False)
        return of_texts(whole(wide).cast(pa.string()).cast(pa.binary()), form)
    return of_numbers(np.array(values.cast(pa.float64(), safe=False), np.float64))


def whole(numbers: Any) -> Any:
    """Returns int64; null for a fraction and for values beyond int64."""
    fits = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), 2.0**63))
    return pc.if_else(fits, numbers, None).cast(pa.int64(), safe=False)


def of_timestamps(values: Any) -> F64:
    missing = values.is_null().to_numpy(zero_copy_only=False)
    micros = values.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return np.where(missing, np.nan, micros / 1e6)


def of_numbers(numbers: F64) -> F64:
    size, seconds = np.abs(numbers), np.full(len(numbers), np.nan)
    for below, unit in reversed(UNITS):
        seconds = np.where(size < below, numbers / unit, seconds)
    return seconds


def of_iso(texts: Any) -> F64:
    """Reads arrays of one form at once by Arrow. What that refuses is read by the format, to the same seconds."""
    first = next((text for at in range(len(texts)) if (text := texts[at].as_py()) is not None), b"")
    kind = pa.float64() if re.fullmatch(NUMBER, first) else pa.timestamp("us", "UTC" if ZONED.search(first) else None)
    with suppress(pa.ArrowInvalid):
        read = texts.cast(pa.string()).cast(kind)
        return of_numbers(np.array(read, np.float64)) if kind == pa.float64() else of_timestamps(read)
    is_number = pc.match_substring_regex(texts, f"^{NUMBER.decode()}$").fill_null(False)
    numbers = pc.utf8_trim_whitespace(pc.if_else(is_number, texts, None).cast(pa.string())).cast(pa.float64())
    return np.where(np.array(is_number), of_numbers(np.array(numbers, np.float64)), of_texts(texts, ""))


def of_texts(texts: Any, form: str) -> F64:
    """`texts`: binaries."""
    pattern = time_pattern(form)
    fields = pc.extract_regex(pc.replace_substring_regex(texts, r"^\s*(\d+)\.0*\s*$", r"\1"), pattern)
    wrong = fields.is_null().to_numpy(zero_copy_only=False)
    known = set(re.findall(r"\?P<(\w)>", pattern))

    def number(name: str) -> F64:
        if name not in known:
            return np.zeros(len(texts))
        given = fields.field(name)
        given = pc.if_else(pc.equal(pc.binary_length(given), 0), None, given).cast(pa.string())
        return np.array(given.cast(pa.float64()).fill_null(0.0), np.float64)

    year = number("Y") if "Y" in known else np.where(number("y") < 69, 2000, 1900) + number("y")
    month = number("m") - 1
    if "b" in known:
        names = pc.utf8_slice_codeunits(pc.utf8_lower(fields.field("b").cast(pa.string())), 0, 3)
        month = np.array(pc.index_in(names, pa.array(MONTHS)).fill_null(0), np.float64)
    months = np.where(wrong, 0, (year - 1970) * 12 + month).astype(np.int64).view("datetime64[M]")
    days = months.astype("datetime64[D]") + (number("d").astype(np.int64) - 1)
    wrong |= days.astype("datetime64[M]") != months  # the 30th of February
    hour = number("H")
    if "p" in known:
        is_after = pc.equal(pc.utf8_lower(fields.field("p").cast(pa.string())), "p").fill_null(False)
        hour = hour % 12 + 12 * np.array(is_after, np.float64)
    seconds = days.astype(np.int64) * float(DAY) + hour * 3600 + number("M") * 60 + number("S")
    if "z" in known:
        seconds -= offsets_of(fields.field("z"))
    return np.where(wrong, np.nan, seconds)


def offsets_of(zones: Any) -> F64:
    """Returns the seconds of +0530, -08:00 and +01; 0 for Z, UTC and none."""
    parts = pc.extract_regex(zones.cast(pa.string()), r"^(?P<sign>[+-])(?P<hour>\d\d):?(?P<minute>\d*)$")
    hour, minute = (
        np.array(pc.if_else(pc.equal(own, ""), "0", own).cast(pa.float64()).fill_null(0.0), np.float64)
        for own in (parts.field("hour"), parts.field("minute"))
    )
    sign = np.where(np.array(pc.equal(parts.field("sign"), "-").fill_null(False)), -1.0, 1.0)
    return sign * (hour * 3600 + minute * 60)
