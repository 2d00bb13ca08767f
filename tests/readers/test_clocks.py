"""Hour, weekday and days of a time are one number, however the time is written and in whatever format."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowcast.deploy.frames import open_frame
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.clocks import clock_numbers
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import make_job, same_array, table

SINCE = "2020-02-29"
FIRST, LAST = datetime(2003, 1, 1, tzinfo=UTC), datetime(2049, 12, 31, tzinfo=UTC)
INDIA, NEWFOUNDLAND = timezone(timedelta(hours=5.5)), timezone(timedelta(hours=-3.5))
WAYS: dict[str, tuple[str, Callable[[datetime], Any]]] = {  # format, what is written
    "as ISO": ("", lambda own: own.strftime("%Y-%m-%d %H:%M:%S")),
    "with fractions": ("", lambda own: own.strftime("%Y-%m-%dT%H:%M:%S.250")),
    "loosely": ("", lambda own: f" {own.year}/{own.month}/{own.day} {own.hour}:{own.minute:02} "),
    "in UTC": ("", lambda own: own.strftime("%Y-%m-%dT%H:%M:%SZ")),
    "in India": ("", lambda own: own.astimezone(INDIA).isoformat()),
    "in Newfoundland": ("", lambda own: own.astimezone(NEWFOUNDLAND).strftime("%Y-%m-%d %H:%M:%S %z")),
    "seconds": ("", lambda own: int(own.timestamp())),
    "seconds as text": ("", lambda own: str(int(own.timestamp()))),
    "milliseconds": ("", lambda own: int(own.timestamp()) * 10**3),
    "microseconds": ("", lambda own: int(own.timestamp()) * 10**6),
    "nanoseconds": ("", lambda own: int(own.timestamp()) * 10**9),
    "fractions of seconds": ("", lambda own: int(own.timestamp()) + 0.25),
    "timestamps": ("", lambda own: own.replace(tzinfo=None)),
    "timestamps of a zone": ("", lambda own: own),
    "Twitter": ("%a %b %d %H:%M:%S %z %Y", lambda own: own.astimezone(INDIA).strftime("%a %b %d %H:%M:%S %z %Y")),
    "a log": ("[%d/%b/%Y:%H:%M:%S %z]", lambda own: own.astimezone(NEWFOUNDLAND).strftime("[%d/%b/%Y:%H:%M:%S %z]")),
    "American": ("%m/%d/%Y %H:%M %p", lambda own: own.strftime("%m/%d/%Y %I:%M %p")),
    "YYMMDDHH": ("%y%m%d%H", lambda own: own.strftime("%y%m%d%H")),
    "a number": ("%Y%m%d%H%M", lambda own: int(own.strftime("%Y%m%d%H%M"))),
    "a number with a fraction": ("%Y%m%d%H%M", lambda own: float(own.strftime("%Y%m%d%H%M"))),
}
MOMENTS = st.datetimes(FIRST.replace(tzinfo=None), LAST.replace(tzinfo=None)).map(
    lambda own: own.replace(microsecond=0, tzinfo=UTC)
)


def numbers_of(moments: list[datetime]) -> dict[str, list[float]]:
    first = date.fromisoformat(SINCE)
    return {
        "hour": [own.hour for own in moments],
        "weekday": [own.weekday() for own in moments],
        "days": [(own.date() - first).days for own in moments],
    }


def read(values: list[Any], clock: Any, form: str = "") -> list[float]:
    given = pa.array([*values, None])
    numbers = clock_numbers(given, Prepare(clock=clock, time=form, since=SINCE if clock == "days" else "1970-01-01"),
                            "time", lambda i: f"row {i}")  # fmt: skip
    assert np.isnan(numbers[-1]), "a missing time is a missing number"
    return [float(number) for number in numbers[:-1]]


@pytest.mark.parametrize("way", WAYS)
@given(moments=st.lists(MOMENTS, min_size=1, max_size=5))
def test_a_time_has_the_hour_weekday_and_days_of_the_calendar(way: str, moments: list[datetime]) -> None:
    form, written = WAYS[way]
    for clock, expected in numbers_of(moments).items():
        assert read([written(own) for own in moments], clock, form) == expected


def test_texts_of_several_kinds_may_be_in_one_column() -> None:
    moment = datetime(2024, 3, 1, 23, 30, tzinfo=UTC)
    texts = [str(WAYS[way][1](moment)) for way in WAYS if not WAYS[way][0]]
    assert read([*texts, "2024-03-01", ""][:-1], "weekday") == [4] * (len(texts) + 1)


@pytest.mark.parametrize(
    ("value", "form"),
    [("2023-02-29", ""), ("yesterday", ""), ("2024-13-01", ""), ("01/03/2024", ""), ("12:30", ""),
     ("2024-03-01 24:00", ""), (20230229, "%Y%m%d"), (2024.5, "%Y%m%d"), ("2024-03-01", "%d.%m.%Y"),
     ("é", ""), (float("inf"), "")],
)  # fmt: skip
def test_what_is_no_time_is_named(value: Any, form: str) -> None:
    good = WAYS["a number"][1](FIRST) // 10**4 if isinstance(value, int) else value
    if isinstance(value, str):
        good = FIRST.strftime(form or "%Y-%m-%d")
    rule = Prepare(clock="weekday", time=form, of="seen")
    rows = pa.array([good, value] if good != value else [value])
    with pytest.raises(DataError, match=rf"row {len(rows) - 1}, column seen: '.+' is no time such as .+; correct it"):
        clock_numbers(rows, rule, "weekday", lambda i: f"row {i}")


PREPARE = {
    "hour": {"of": "time", "clock": "hour"},
    "day": {"of": "time", "clock": "weekday", "missing": ["?"]},
    "age": {"of": "time", "clock": "days", "since": "2024-01-01", "fill": -1, "standardize": [50, 10]},
    "phase": {"of": "time", "clock": "hour", "buckets": [6, 12, 18]},
}
COLUMNS = {"dense": ["age"], "prepare": PREPARE, "hash": ["user"], "hash_by_value": True}
TABLES = [
    table("hours", 25, "hour"),
    table("weekdays", 8, "day"),
    table("phases", 5, "phase"),
    table("users", 90, "user"),
]
NUM_ROWS = 60
FORMATS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "parquet": lambda frame, path: frame.to_parquet(path, index=False),
    "arrow": lambda frame, path: frame.to_feather(path, compression="uncompressed"),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, date_format="iso"),
}


@pytest.mark.parametrize("way", ["as ISO", "in India", "seconds", "timestamps", "timestamps of a zone"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_any_format_and_its_frame_have_the_numbers_of_the_calendar(
    kind: str, way: str, tmp_path: Path
) -> None:
    moments = [FIRST + timedelta(hours=at * 7123) for at in range(NUM_ROWS)]
    frame = pd.DataFrame({"label": 1, "time": [WAYS[way][1](own) for own in moments], "user": range(NUM_ROWS)})
    frame.loc[7, "time"] = None
    FORMATS[kind](frame, path := tmp_path / f"data.{kind}")
    job = make_job(kind, TABLES, path=str(path), eval_fraction=0.0, columns=COLUMNS, batch_size=NUM_ROWS)
    [batch] = open_reader(job).batches("train", 0)
    [of_frame] = open_frame(job, frame).batches("train", 0)
    hour, day, phase, _ = batch.ids.reshape(4, NUM_ROWS)
    is_given = np.arange(NUM_ROWS) != 7
    assert hour[is_given].tolist() == [1 + own.hour for own in moments if own != moments[7]]
    assert day[is_given].tolist() == [1 + own.weekday() for own in moments if own != moments[7]]
    assert (phase[is_given] == 1 + (hour[is_given] - 1) // 6).all()
    assert (hour[7], day[7], phase[7]) == (0, 0, 0)
    days = [-1 if at == 7 else (own.date() - date(2024, 1, 1)).days for at, own in enumerate(moments)]
    assert same_array(batch.dense, ((np.array(days, np.float64)[:, None] - 50) / 10).astype(np.float32))
    assert same_array(batch.ids, of_frame.ids)
    assert same_array(batch.dense, of_frame.dense)


@pytest.mark.parametrize(
    ("rules", "columns", "sentence"),
    [
        ({"hour": {"of": "time"}}, {}, "of, time and since belong to clock"),
        ({"hour": {"clock": "hour", "map": {"a": 1}}}, {}, 'clock = "hour" reads times, and map and number do not'),
        ({"hour": {"clock": "hour", "time": "%Y%m%d"}}, {}, "has no hour"),
        ({"hour": {"clock": "hour", "time": "%H:%M"}}, {}, "must hold a year"),
        ({"hour": {"clock": "hour", "time": "%Y-%m-%d %k"}}, {}, "holds %k, and a time is made of %Y %y"),
        ({"age": {"clock": "days", "since": "1.3.2024"}}, {}, "since = '1.3.2024' is no date; write it as 2024-03-01"),
        ({"hour": {"of": "time", "clock": "days"}}, {}, "hour is a feature, and ids need buckets"),
        ({"label": {"clock": "hour"}}, {}, "clock makes a feature or a dense feature, and label is neither"),
        ({"age": {"clock": "hour", "buckets": [6]}}, {}, "age is no feature; give it a table"),
        ({"hour": {"of": "user", "clock": "hour"}}, {}, "makes ids of user; give one of them a column of its own"),
        ({"hour": {"of": "tim", "clock": "hour"}}, {}, "prepare.hour: {} has no column tim, the nearest is time"),
        ({"user": {"of": "time", "clock": "hour"}}, {}, "clock makes ids, and data.columns.hash would hash them"),
        ({"age": {"of": "flag", "clock": "days"}}, {}, "column flag: the type is bool"),
    ],
)  # fmt: skip
def test_a_clock_that_makes_no_sense_is_refused(
    rules: dict[str, Any], columns: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.parquet"
    pd.DataFrame({"label": 1, "time": ["2024-03-01"], "user": 1, "flag": True}).to_parquet(path)
    given = COLUMNS | {"prepare": PREPARE | rules} | columns
    with pytest.raises((ConfigError, DataError)) as refused:
        open_reader(make_job("parquet", TABLES, path=str(path), columns=given))
    assert sentence.format(path) in str(refused.value)
