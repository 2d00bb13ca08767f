"""The roles that `rowcast new` gives to the headers of the field's public files, with values made up after their kinds:
one table of expected roles, the same in every format, and each option that it suggests works as it is printed.
"""

import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rowcast.analysis.new import new as new_command
from rowcast.analysis.new.files import look_at
from rowcast.analysis.new.roles import ChosenRoles, Wish, choose
from rowcast.analysis.show import AnalysisProgress
from rowcast.command_line.prefetcher import app
from rowcast.deploy.frames import open_frame
from rowcast.job.file import load_job
from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Samples
from rowcast.protocol.parts import UNDIVIDED
from rowcast.runtime.errors import ConfigError
from tests.support.data_files import same_array, same_batch

NUM_ROWS = 600
DATA_PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
FORMS = ("csv", "tsv", "jsonl", "parquet", "arrow")
RNG = np.random.default_rng(9)
START = RNG.bit_generator.state
Values = Any


def pick(values: Any) -> Values:
    return np.array(values, object)[RNG.integers(0, len(values), NUM_ROWS)]


def flag(share: float = 0.3) -> Values:
    return (RNG.random(NUM_ROWS) < share).astype(int)


def ids(count: int, first: int = 0) -> Values:
    """Integers that leave no gaps."""
    return first + np.concatenate([np.arange(count), RNG.integers(0, count, NUM_ROWS - count)])


def codes(count: int, low: int = 200, high: int = 500_000) -> Values:
    """Integers with gaps, each of which comes again."""
    return pick(np.sort(RNG.choice(np.arange(low, high, 7), count, replace=False)))


def sparse(count: int = 300) -> Values:
    return RNG.choice(10**6, count)[RNG.integers(0, count, NUM_ROWS)]


def counts() -> Values:
    return np.floor(RNG.lognormal(1, 2, NUM_ROWS)).astype(int)


def hexes(count: int) -> Values:
    return pick([f"{number:08x}" for number in RNG.choice(2**32, count)])


def reals() -> Values:
    return RNG.lognormal(1, 1, NUM_ROWS).round(3)


def lists(items: list[str], separator: str) -> Values:
    return [separator.join(RNG.choice(items, 1 + i % 3, replace=False)) for i in range(NUM_ROWS)]


def holed(values: Values, share: float = 0.2) -> Values:
    return pd.Series(np.where(RNG.random(NUM_ROWS) < share, None, values)).astype("Int64")


def times(form: str) -> Values:
    return [own.strftime(form) for own in pd.date_range("2024-03-01", periods=NUM_ROWS, freq="97min")]


def numbers(form: str) -> Values:
    return [int(own) for own in times(form)]


def text(words: int) -> Values:
    """Titles: most words are their own."""
    return [" ".join(f"w{number}" for number in RNG.integers(0, 4000, words)) for _ in range(NUM_ROWS)]


GENRES = ["Drama", "War", "Comedy", "Film-Noir", "Action", "Sci-Fi", "Crime"]


@dataclass(frozen=True, kw_only=True)
class Log:
    columns: dict[str, Values]
    label: str  # as --label has it; the column without an option comes first
    dense: str = ""  # names, between commas
    left_out: str = ""
    option: str = ""
    lists: str = ""


def log(columns: dict[str, Values], **expected: str) -> Log:
    return Log(columns=columns, **expected)


LOGS: dict[str, Callable[[], Log]] = {
    "Criteo": lambda: log(
        {"Id": np.arange(NUM_ROWS) + 10_000_000, "Label": flag(),
         **{f"I{i}": holed(counts()) if i != 8 else counts() - 2 for i in range(1, 14)},
         **{f"C{i}": hexes(3 ** (i % 6 + 1)) for i in range(1, 27)}},
        label="Label", left_out="Id", dense=",".join(f"I{i}" for i in range(1, 14))),
    "Avazu": lambda: log(
        {"id": RNG.integers(10**18, 2**62, NUM_ROWS), "click": flag(), "hour": numbers("%y%m%d%H"),
         "C1": codes(7, 1000, 1100),
         "banner_pos": pick([0, 1, 7]), "site_id": hexes(40), "device_type": pick([0, 1, 4, 5]),
         "C14": codes(90, 300, 9000),
         "C16": pick([50, 90, 250, 480]), "C18": ids(4), "C19": codes(30, 33, 1900),
         "C20": pick([-1, 100084, 100148, 100111])},
        label="click", left_out="id,hour"),
    "label-encoded": lambda: log(
        {"label": flag(), "feat_1": ids(4, 1), "feat_2": codes(9, 5, 100), "feat_3": codes(60, 150, 9000),
         "feat_4": codes(200, 10**4, 10**6), "feat_5": codes(8, 1_541_000, 1_545_000)},
        label="label"),
    "MovieLens": lambda: log(
        {"user_id": sparse(), "movie_id": sparse(), "rating": pick([1, 2, 3, 4, 5]),
         "timestamp": 978_300_000 + RNG.integers(0, 10**7, NUM_ROWS), "title": text(4), "genres": lists(GENRES, "|"),
         "gender": pick(["F", "M"]), "age": pick([1, 18, 25, 35, 45, 50, 56]), "occupation": ids(21),
         "zip": pick([f"{number:05}" for number in range(501, 99_000, 977)] + ["02136-1522", "N4T1A"])},
        label="rating>=4", option="--label 'rating>=4'", left_out="timestamp", dense="age", lists="genres"),
    "census": lambda: log(
        {"age": ids(60, 17), "class of worker": pick([" Private", " Federal", " ?"]),
         "industry code": codes(30, 1, 300),
         "wage per hour": counts() * 10, "sex": flag(0.5), "capital gains": counts(),
         "num persons worked for employer": ids(7),
         "year": pick([94, 95]), "income": flag(0.06)},
        label="income", dense="age,wage per hour,capital gains,num persons worked for employer,year"),
    "Taobao": lambda: log(
        {"clk": flag(0.05), "time_stamp": times("%Y-%m-%d %H:%M:%S"), "userid": sparse(),
         "pid": pick(["430548_1007", "430539_1007"]),
         "customer": codes(90), "brand": holed(codes(60)), "price": reals() * 100, "cms_segid": holed(ids(40)),
         "final_gender_code": holed(pick([1, 2])), "age_level": holed(ids(7)), "occupation": holed(flag()),
         "click_sequence": lists([str(number) for number in RNG.choice(10**6, 400)], "^")},
        label="clk", left_out="time_stamp", dense="price", lists="click_sequence"),
    "AliExpress": lambda: log(
        {"search_id": ids(50), "categorical_4": codes(20, 3, 500), "categorical_7": codes(40, 0, 5000),
         "numerical_1": np.append(21.0, reals()[1:]),
         "numerical_2": counts(), "conversion": flag(0.02), "click": flag()},
        label="click", dense="numerical_1,numerical_2", left_out="conversion"),
    "Ali-CCP": lambda: log(
        {"click": flag(), "purchase": flag(0.05), "101": codes(90), "121": codes(30, 1, 999), "205": codes(90),
         "301": pick([1, 2, 3]),
         "D508": reals()},
        label="click", dense="D508", left_out="purchase"),
    "two labels under other names": lambda: log(
        {"label": flag(), "second": np.zeros(NUM_ROWS, int), "is_new": flag(), "other": flag()},
        label="label", dense="is_new,other", left_out="second"),
    "a rating that made the label": lambda: log(
        {"user": sparse(), "points": pick([1, 2, 3, 4, 5]), "label": flag()}, label="label", left_out="points"),
    "RecBole": lambda: log(
        {"user_id:token": sparse(), "item_id:token": sparse(), "rating:float": pick([1.0, 2.0, 3.5, 4.0, 5.0]),
         "timestamp:float": 881_250_949 + RNG.integers(0, 10**7, NUM_ROWS), "title:token": text(3),
         "class:token_seq": lists(GENRES, " "), "weight:float": reals(), "release_year:token": ids(60, 1930)},
        label="rating:float>=4", option="--label 'rating:float>=4'", left_out="timestamp:float", dense="weight:float",
        lists="class:token_seq"),
    "news with pandas' index": lambda: log(
        {"Unnamed: 0": np.arange(NUM_ROWS), "userId": sparse(), "itemId": np.arange(NUM_ROWS) * 7 % 4001,
         "showTime": 1_624_843_756_147 + RNG.integers(0, 10**10, NUM_ROWS), "showPos": codes(40, 0, 300),
         "click": flag(),
         "deviceName": pick(["DVC-AN20", "V2020A"]), "age0": RNG.random(NUM_ROWS).round(6)},
        label="click", left_out="Unnamed: 0,showTime", dense="age0"),
    "labels 1 and 2": lambda: log(
        {"user_id": sparse(), "item_id": sparse(), "time": RNG.integers(1000, 5000, NUM_ROWS), "label": pick([1, 2])},
        label="label=2", option="--label label=2", dense="time"),
    "Porto Seguro": lambda: log(
        {"id": np.cumsum(RNG.integers(1, 5, NUM_ROWS)), "target": flag(0.1), "ps_ind_01": ids(8),
         "ps_ind_02_cat": pick([-1, 1, 2, 3, 4]),
         "ps_ind_04_cat": pick([-1, 0, 1]), "ps_ind_06_bin": flag(), "ps_reg_01": pick([0.1, 0.3, 0.9]),
         "ps_reg_03": np.where(flag(0.2), -1, reals()), "ps_car_11_cat": codes(60, 1, 900)},
        label="target", left_out="id", dense="ps_ind_06_bin,ps_reg_01,ps_reg_03"),
    "LibRecommender": lambda: log(
        {"user": sparse(), "item": sparse(), "label": pick([1, 2, 3, 4, 5]),
         "time": 970_000_000 + RNG.integers(0, 10**7, NUM_ROWS),
         "sex": pick(["M", "F"]), "age": pick([18, 25, 56]), "occupation": ids(21), "genre1": pick(GENRES)},
        label="label>=4", option="--label 'label>=4'", left_out="time", dense="age"),
    "times of every spelling": lambda: log(
        {"label": flag(), "user_id": ids(50), "a": numbers("%Y%m%d"), "b": numbers("%y%m%d%H"),
         "c": numbers("%Y%m%d%H"),
         "d": times("%d-%b-%y"), "e": times("%d/%m/%Y %H:%M"), "f": times("%b %d, %Y"),
         "g": times("%Y-%m-%dT%H:%M:%SZ"), "h": times("%Y%m%dT%H%M%S"),
         "date": 45_352.5 + np.arange(NUM_ROWS) / 8, "ts": 1_709_251_200 + np.arange(NUM_ROWS) * 97,
         "event_time": (1_709_251_200 + np.arange(NUM_ROWS) * 97) * 1000, "year": ids(70, 1931), "hour": ids(24)},
        label="label", left_out="a,b,c,d,e,f,g,h,date,ts,event_time", dense="year"),
    "lists of every spelling": lambda: log(
        {"label": flag(), "caret": lists(["3", "5", "170301", "99"], "^"), "pipe": lists(GENRES, "|"),
         "semicolon": lists(GENRES, ";"), "comma": lists(GENRES, ","), "space": lists(GENRES, " "),
         "json": ["[" + own + "]" for own in lists(["3", "4", "5"], ", ")],
         "quoted": ["['" + own + "']" for own in lists(GENRES, "', '")],
         "pairs": lists(["3:0.5", "4:0.1", "5:0.2"], "|"), "title": text(4), "city": pick(["San Jose", "New York",
         "Los Angeles", "Rom"])},
        label="label", left_out="pairs", lists="caret,pipe,semicolon,comma,space,json,quoted"),
    "cells with a meaning": lambda: log(
        {"label": pick(["yes", "no"]), "user_id": ids(50), "housing": pick(["yes", "no", "yes"]),
         "is_weekend": flag(), "party": pick(["none", "-", "guarantor"]), "member": pick(["t", "f", ""]),
         "charge": [str(own) if own > 1 else " " for own in reals()],
         "earned": [f"${own:,.2f} " for own in reals() * 900],
         "share": [f"{own} %".replace(".", ",") for own in reals()],
         "balance": pick(["?", "NaN", "-3", "+4.5", "17", "1e2"]),
         "child": [str(own) for own in RNG.geometric(0.4, NUM_ROWS) - 1]},
        label="label", dense="housing,is_weekend,member,charge,earned,share,balance,child"),
    "codes without a telling name": lambda: log(
        {"y": flag(), "resource": RNG.choice(10**6, 3000)[(RNG.zipf(1.3, NUM_ROWS) - 1) % 3000],
         "money": np.floor(RNG.lognormal(8, 1, NUM_ROWS) / 10) * 10, "tenure": RNG.integers(0, 73, NUM_ROWS),
         "area": np.where(flag(0.8), RNG.integers(40, 140, NUM_ROWS) * 10, RNG.integers(400, 1400, NUM_ROWS)),
         "u": hexes(9)},
        label="y", dense="money,tenure,area"),
    "presence tells": lambda: log(
        {"churned": flag(), "user": hexes(60), "plan": pick(["a", "b"])},
        label="churned", left_out="reason,order_value,state"),
    "rows by number and measures by name": lambda: log(
        {"Row Number": np.arange(NUM_ROWS) + 1, "customer": [f"K-{i * 7919 % 99991:05}" for i in range(NUM_ROWS)],
         "days_as_customer": ids(40), "previous_calls": ids(9), "rent": [f"R${own:,.2f}" for own in reals() * 900],
         "play_time_ms": 1_649_347_200_000 + np.arange(NUM_ROWS) * 977, "veil": ["p"] * NUM_ROWS,
         "agent": counts() % 90, "y": flag()},
        label="y", dense="days_as_customer,previous_calls,rent", left_out="Row Number,customer,play_time_ms,veil"),
    "codes and counts without a telling name": lambda: log(
        {"y": flag(), "a": codes(30), "b": counts(), "c": ids(40), "d": RNG.integers(0, 10**7, NUM_ROWS),
         "e": sparse(60), "f": hexes(50)},
        label="y", dense="b,d"),
}  # fmt: skip


def made(name: str) -> tuple[pd.DataFrame, Log]:
    RNG.bit_generator.state = START  # a log does not depend on those before it
    own = LOGS[name]()
    frame = pd.DataFrame(own.columns)
    if name == "two labels under other names":
        frame["second"] = frame["label"] & flag(0.3)
        frame["user"] = hexes(30)
    if name == "presence tells":
        frame["reason"] = pd.Series(lists(GENRES, "/")).where(frame["churned"] == 1)
        frame["state"] = np.where(frame["churned"] == 1, np.where(flag(0.9), "gone", "asleep"), "here")
        frame["order_value"] = np.where(frame["churned"] == 1, reals(), 0.0)
    if name == "a rating that made the label":
        frame["label"] = (frame["points"] >= 4).astype(int)
    return frame, own


def write(frame: pd.DataFrame, folder: Path, form: str) -> Path:
    path = folder / f"log.{form}"
    if form == "parquet":
        frame.to_parquet(path, index=False)
    elif form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif form == "arrow":
        frame.to_feather(path, compression="uncompressed")
    else:
        frame.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    return path


def roles_in(path: Path, option: str) -> ChosenRoles:
    label = shlex.split(option)[1] if option else ""
    return choose(look_at(str(path), [], {}, AnalysisProgress()), Wish(label=label, dense=[], ids=[]))


def meaning(prepare: Prepare) -> Prepare:
    """Text of a format with types has a mark, and empty cells, that its CSV does not need to name."""
    return replace(prepare, number=prepare.number.replace(".", ""), missing=[*filter(None, prepare.missing)])


@pytest.mark.parametrize("name", LOGS)
def test_every_column_has_the_role_that_a_person_would_give(name: str, tmp_path: Path) -> None:
    frame, expected = made(name)
    found = {}
    for form in FORMS:
        path = write(frame, tmp_path, form)
        if expected.option:
            with pytest.raises(ConfigError, match=f"{re.escape(expected.option)} makes one"):
                roles_in(path, "")
        chosen = roles_in(path, expected.option)
        found[form] = {
            own.column.name: (own.role, own.hashed, own.num_embeddings, meaning(own.prepare)) for own in chosen.choices
        }
        roles = {role: [name for name, own in found[form].items() if own[0] == role] for role in ("dense", "left out")}
        assert chosen.label.text == expected.label
        assert roles["dense"] == list(filter(None, expected.dense.split(",")))
        assert sorted(roles["left out"]) == sorted(filter(None, expected.left_out.split(",")))
        lists = {own.column.name for own in chosen.of("ids") if own.column.is_list}
        assert lists == set(filter(None, expected.lists.split(",")))
    for form in FORMS:
        assert found[form] == found["csv"], f"a role depends on values, not on the format: {form}"


@pytest.mark.parametrize("name", ["cells with a meaning", "Taobao", "Porto Seguro"])
def test_a_file_of_any_format_and_its_frame_have_the_same_samples(name: str, tmp_path: Path) -> None:
    frame, _ = made(name)
    dense = {}
    for form in FORMS:
        path = write(frame, tmp_path, form)
        (tmp_path / "job.toml").write_text(new(path).stdout)
        job = load_job(tmp_path / "job.toml", ("data.shuffle=none", "data.eval_fraction=0"))
        read = list(open_reader(job).batches("train", 0))
        text = {"csv": ",", "tsv": "\t"}.get(form)
        given = pd.read_csv(path, sep=text, keep_default_na=False, na_values=[""]) if text else frame
        for batch, own in zip(read, open_frame(job, given).batches("train", 0), strict=True):
            assert same_array(batch.dense, own.dense)
            assert same_array(batch.ids, own.ids)
        dense[form] = np.concatenate([batch.dense for batch in read])
        assert same_array(dense[form], dense["csv"])


@pytest.mark.parametrize("form", FORMS)
def test_ids_alone_without_labels_are_as_many_samples_as_rows(form: str, tmp_path: Path) -> None:
    path = write(pd.DataFrame({"user": [*"abcd"] * 5, "label": [0, 1] * 10}), tmp_path, form)
    (tmp_path / "job.toml").write_text(new(path).stdout)
    job = load_job(tmp_path / "job.toml", ("data.columns.label_values=none", "data.eval_fraction=0"))
    [read] = open_reader(job, "dense").pending("train", 0)
    samples = read(UNDIVIDED)
    assert isinstance(samples, Samples)
    assert (samples.dense.shape, samples.labels.shape) == ((20, 0), (20,))


HEADLESS = {
    "text alone": [["vhigh", "low", "2", "unacc"], ["high", "low", "5more", "acc"], ["low", "vhigh", "2", "unacc"]],
    "41 columns": [[str(i) for i in range(7, 48)], [str(i) for i in range(8, 49)]],
}


@pytest.mark.parametrize("name", HEADLESS)
def test_a_file_without_a_header_is_named_in_three_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("car.data").write_text("\n".join(",".join(row) for row in HEADLESS[name] * 9))
    result = new(Path("car.data"))
    assert "there is no header" in result.stderr
    option = result.stderr.partition("--names ")[2].partition(";")[0]
    shown = subprocess.run(["bash", "-c", f"echo {option}"], capture_output=True, text=True, check=True).stdout
    assert shown.strip().split(",") == [f"column_{i + 1}" for i in range(len(HEADLESS[name][0]))]
    assert len(textwrap.wrap(result.stderr, 80)) <= 3, result.stderr


LABELS: dict[str, tuple[dict[str, Any], str]] = {
    "a flag in the middle": ({"flag": [0, 1] * 8, "cost": range(30, 46)}, "--label: flag; --label cost, a measure,"),
    "two flags": ({"free": [0, 1] * 8, "u": ["a", "b"] * 8, "new": [1, 0] * 8}, "--label: new, free"),
    "a class of two": ({"own": ["yes", "no"] * 8, "class": ["good", "bad"] * 8}, "--label class=good makes one"),
    "several classes": ({"g": ["F", "M"] * 8, "class": ["unacc", "acc", "good", "acc"] * 4},
                        "(class holds 3 classes, and one is learned at a time); --label class=acc makes one"),
    "a label with a missing value": ({"label": [0, 1, None, 1] * 4, "g": ["F", "M"] * 8}, "missing, the first in"),
    "True. and False.": ({"Churn?": ["True.", "False."] * 8, "g": ["F", "M"] * 8}, "--label 'Churn?=True.' makes one"),
    "no name": ({"u": [*"abcd"] * 4, "g": ["F", "M"] * 8, "size": range(16)}, "; a measure, such as size, trains a"),
    "a measure of few rows": ({"flag": [0, 1] * 4, "cost": [own / 3 for own in range(8)]}, "--label cost, a measure,"),
    "a price in the middle": ({"view": [0, 1] * 8, "price": range(16), "lot": range(9, 25)}, "--label price, a"),
    "a log of clicks alone": ({"item": range(16), "timestamp": range(10**9, 10**9 + 16)}, "clicks alone"),
    "an income is no label where one has a name": (
        {"Income": range(16), "Response": [0, 1] * 8, "new": [1, 0] * 8}, "--label: Response, new"),
    "an income is no label where others hold 0 and 1": (
        {"Income": range(16), "a": [0, 1] * 8, "b": [1, 0] * 8}, "--label: b, a; --label Income, a measure,"),
    "a price of two words": ({"AveragePrice": range(16), "v": [*"abcd"] * 4}, "--label AveragePrice, a measure,"),
    "codes of answers": ({"response": [200, 304, 404, 200] * 4, "v": [*"abcd"] * 4}, "--label response=200 makes one"),
    "a flag at the end": (
        {"home": [*"abcd"] * 4, "neutral": [0, 1] * 8}, "--label: neutral; 'NAME=VALUE' takes a class"),
    "a class before the last of two": (
        {"Class": [*"abca"] * 4, "satisfaction": ["satisfied", "not"] * 8}, "--label satisfaction=satisfied makes one"),
    "two classes at the end": ({"a": [0, 1] * 8, "z": ["+", "-", "-"] * 5 + ["-"]}, "--label: z=+, a"),
    "what happened": ({"event": ["view", "cart", "view", "purchase"] * 4, "price": range(16)},
                      "--label: event=purchase; --label price, a measure,"),
    "a value of what happened": (
        {"c": ["pv", "fav", "pv", "buy"] * 4, "e": range(10**9, 10**9 + 16)}, "--label: c=buy"),
    "a status": (
        {"loan_status": ["Paid", "Late", "Paid", "Paid"] * 4, "addr": ["a b"] * 16}, "--label: loan_status=Late"),
    "one flag with a likely name": (
        {"canceled": [0, 1] * 8, "dist": range(16)}, "--label: canceled; a measure, such as dist"),
    "no name and no measure": ({"u": [*"abcd"] * 4, "g": ["F", "M"] * 8, "v": [*"abcd"] * 4}, "no name tells one"),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("form", FORMS)
def test_a_label_is_asked_for(name: str, form: str, tmp_path: Path) -> None:
    columns, said = LABELS[name]
    frame = pd.DataFrame({"user_id": range(7, 7 + len(next(iter(columns.values()))))} | columns)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        roles_in(write(frame, tmp_path, form), "")
    assert "g=F" not in str(refused.value)


@pytest.mark.parametrize("name", [*LABELS, "no header"])
def test_a_refusal_is_at_most_three_lines_of_80_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns, _ = LABELS.get(name, ({"label": [0, 1] * 8, "age": range(16)}, ""))
    frame = pd.DataFrame({"user_id": range(7, 7 + len(next(iter(columns.values()))))} | columns)
    frame.to_csv("log.csv", index=False, header=name != "no header")
    refused = new(Path("log.csv"))
    assert (refused.exit_code, refused.stdout) in ((2, ""), (4, ""))
    assert len(textwrap.wrap(refused.stderr, 80)) <= 3, refused.stderr


@pytest.mark.parametrize("name", ["Criteo", "Taobao", "Porto Seguro", "label-encoded"])
def test_a_round_trip_through_pandas_changes_no_role(name: str, tmp_path: Path) -> None:
    frame, expected = made(name)
    path = write(frame, tmp_path, "csv")
    before = roles_in(path, expected.option)
    pd.read_csv(path).to_csv(path, index=False)
    after = roles_in(path, expected.option)
    assert [(own.column.name, own.role) for own in after.choices] == [
        (own.column.name, own.role) for own in before.choices
    ]


@pytest.mark.parametrize("name", ["Criteo", "Taobao", "AliExpress"])
def test_a_round_trip_through_pandas_changes_no_sample_of_a_job(name: str, tmp_path: Path) -> None:
    path = write(made(name)[0], tmp_path, "csv")
    (tmp_path / "job.toml").write_text(new(path).stdout)
    job = load_job(tmp_path / "job.toml")
    before = list(open_reader(job).batches("train", 0))
    pd.read_csv(path).to_csv(path, index=False)
    assert b".0," in path.read_bytes()
    after = list(open_reader(job).batches("train", 0))
    assert all(map(same_batch, before, after))


def new(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["new", "--data", str(path), *options])


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> None:
        raise ConfigError("not asked here")

    monkeypatch.setattr(new_command, "advise_job", unavailable)


def test_the_table_begins_with_the_doubtful_columns_and_their_options(tmp_path: Path) -> None:
    frame, _ = made("Ali-CCP")
    lines = new(write(frame, tmp_path, "csv")).stderr.splitlines()
    assert [line.split("  ")[0] for line in lines[2:7]] == ["column", "purchase", "click", "101", "121"]
    assert lines[3].endswith("; --dense purchase decides otherwise")
    assert "lookahead" not in "".join(lines)
    result = new(tmp_path / "log.csv", "--dense", "purchase")
    assert 'dense = ["purchase", "D508"]' in result.stdout


@pytest.mark.parametrize(
    ("values", "option", "ones"),
    [([1, 2], "label=2", 2), ([-1, 1], "label=1", 1), (["lost", "won"], "label=won", "won"),
     ([1, 2, 3, 4, 5], "'label>=4'", None),
     ([0.0, 0.2, 0.9], "'label>=0.45'", 0.9), ([" <=50K", " >50K"], "'label= >50K'", " >50K")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_option_that_is_printed_makes_the_label(
    values: list[Any], option: str, ones: Any, form: str, tmp_path: Path
) -> None:
    frame = pd.DataFrame({"user": hexes(20), "label": pick(values)}).infer_objects()
    path = write(frame, tmp_path, form)
    refused = new(path)
    assert refused.exit_code == 2
    [given] = re.findall(r"--label ('[^']*'|\S+)", refused.stderr)
    assert given == option
    made = new(path, *shlex.split(f"--label {given}"))
    assert made.exit_code == 0, made.stderr
    (tmp_path / "job.toml").write_text(made.stdout)
    reader = open_reader(load_job(tmp_path / "job.toml", ("data.shuffle=none",)))
    labels = np.concatenate([batch.labels for split in ("train", "eval") for batch in reader.batches(split, 0)])
    expected = frame["label"] >= 4 if ones is None else frame["label"] == ones
    assert labels.tolist() == expected.astype(float).tolist()


def test_a_tail_of_one_class_is_named_with_what_to_do(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": hexes(20), "click": np.sort(flag())})
    [line] = [own for own in new(write(frame, tmp_path, "csv")).stderr.splitlines() if "evaluation" in own]
    assert line.startswith("Before you train: the last tenth, 60 rows, is for evaluation and has no row with click = 0")
    assert "shuffle the rows" in line
    assert "data.eval_path" in line
    frame["click"] = [0, 1] * (NUM_ROWS // 2)
    assert "evaluation" not in new(write(frame, tmp_path, "csv")).stderr


def test_a_name_is_found_without_the_spaces_around_it_and_without_its_type(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label, user_id, zip\n" + "0, 1, 9\n1, 2, 8\n" * 20)
    assert new(tmp_path / "log.csv", "--ids", "zip", "--dense", "user_id").exit_code == 0
    frame, _ = made("RecBole")
    path = write(frame, tmp_path, "tsv")
    assert new(path, "--label", "rating>=4", "--ids", "weight").exit_code == 0


def test_row_numbers_are_followed_by_a_rule_for_new_ids(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user_id": ids(50), "click": flag()})
    made = new(write(frame, tmp_path, "csv"))
    (tmp_path / "job.toml").write_text(made.stdout)
    assert load_job(tmp_path / "job.toml").data.on_invalid_id == "zero"
    frame["user_id"] += 3000
    frame.to_csv(tmp_path / "log.csv", index=False)
    reader = open_reader(load_job(tmp_path / "job.toml"))
    assert sum(batch.size for batch in reader.batches("train", 0)) == 540


def test_lists_are_split_or_left_whole_as_the_option_says(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": lists(["x y", "z", "y"], "/"), "b": lists(GENRES, "|"), "click": flag()})
    written = new(write(frame, tmp_path, "csv"), "--lists", "a=/", "--lists", "b=").stdout
    assert 'lists = { a = "/" }' in written


def test_a_file_without_a_header_is_read_with_the_names_of_the_option(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": sparse(), "item": sparse(), "rating": pick([1, 2, 3, 4, 5]), "time": 978_300_760})
    (tmp_path / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in frame.to_numpy()))
    refused = new(tmp_path / "ratings.dat")
    assert refused.exit_code == 4
    assert "there is no header; name the 4 columns in their order" in refused.stderr
    [names] = re.findall(r"--names (\S+);", refused.stderr)
    made = new(tmp_path / "ratings.dat", "--names", names, "--label", "rating>=4")
    (tmp_path / "job.toml").write_text(made.stdout)
    job = load_job(tmp_path / "job.toml")
    assert (job.data.columns.names, job.data.columns.delimiter) == (["user", "item", "rating", "timestamp"], "::")
    assert sum(batch.size for batch in open_reader(job).batches("train", 0)) == NUM_ROWS - NUM_ROWS // 10
    assert "--names gives 2 names" in new(tmp_path / "ratings.dat", "--names", "a,b").stderr


def test_a_raw_log_of_criteo_gets_a_job_of_its_own_format(tmp_path: Path) -> None:
    rows = made("Criteo")[0].drop(columns="Id")
    rows.to_csv(tmp_path / "train.txt", sep="\t", header=False, index=False)
    (tmp_path / "job.toml").write_text(new(tmp_path / "train.txt").stdout)
    job = load_job(tmp_path / "job.toml")
    assert (job.data.format, len(job.tables)) == ("criteo-tsv", 26)
    assert next(iter(open_reader(job).batches("train", 0))).dense.shape[1] == 13


OTHER_FILES = {
    "log.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "log.npy": (b"\x93NUMPY", "NumPy"),
    "log.tfrecord": (b"\x20\x00\x00\x00\x00\x00\x00\x00abcd\x0a\x1e", "TFRecord"),
    "log.libsvm": (b"-1 204:1 4798:1\n1 42:1 1572:1\n", "libsvm"),
    "log.libfm": (b"1 0:1 5:1 9:0.5\n0 0:1 6:1\n", "libfm"),
    "log.ffm": (b"1 0:3:1 1:5:0.5\n0 0:4:1\n", "libffm"),
    "log.bz2": (b"BZh91AY&SY", "bzip2"),
    "log.stream": (b"\xff\xff\xff\xff\x10\x01", "a stream of Arrow"),
    "log.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1", "Excel"),
    "log.dta": (b"<stata_dta><header>", "Stata"),
    "log.db": (b"SQLite format 3\x00", "SQLite"),
    "log.arff": (b"% Title: log\n%\n@RELATION log\n@attribute a numeric\n", "ARFF"),
    "log.log": (b'199.72.81.55 - - [01/Jul/1995:00:00:01 -0400] "GET / HTTP/1.0" 200 6245\n', "a log of a web server"),
    "log.pkl": (b"\x80\x04\x95", "pickle"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_of_another_kind_is_named_with_the_python_that_makes_parquet_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, what = OTHER_FILES[name]
    Path(name).write_bytes(content)
    result = new(Path(name))
    assert (result.exit_code, result.stdout) == (4, "")
    assert f"{name}: the file is" in result.stderr
    assert what in result.stderr
    assert (".to_parquet('log.parquet')" in result.stderr) != ("docs/data.md#libsvm has the Python" in result.stderr)
    assert len(textwrap.wrap(result.stderr, 80)) <= 3, result.stderr


def test_the_python_that_is_printed_makes_parquet(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", label=flag(), user=ids(20), seen=np.ones((NUM_ROWS, 3), int))
    _, code = new(tmp_path / "log.npz").stderr.strip().split("in Python: ")
    exec(code, {})
    assert new(tmp_path / "log.parquet").exit_code == 0


@pytest.mark.parametrize("name", ["log.libsvm", "log.libfm", "log.ffm"])
def test_the_values_of_libsvm_are_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = OTHER_FILES[name][0] * 50
    Path("log.libsvm").write_bytes(content)
    [code] = re.findall(r"^```python\n([^`]*log\.libsvm.*?)^```", DATA_PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(code, {})
    result = new(Path("log.parquet"), *(["--label", "label=1"] if name == "log.libsvm" else []))
    assert result.exit_code == 0, result.stderr
    Path("job.toml").write_text(result.stdout)
    job = load_job(Path("job.toml"), ("data.shuffle=none", "data.eval_fraction=0", "eval.patience=0"))
    [batch, *_] = open_reader(job).batches("train", 0)
    pairs = [[pair.split(b":")[-2:] for pair in line.split()[1:]] for line in content.splitlines()[: batch.size]]
    assert batch.weights is not None
    assert batch.weights.tolist() == [float(value) for row in pairs for _, value in row]
    assert len(batch.ids) == sum(map(len, pairs))
