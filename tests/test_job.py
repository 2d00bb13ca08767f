"""A job file that cannot be trained is refused as it is read, with one sentence that names the key."""

import json
import re
import tomllib
from collections.abc import Iterator
from inspect import isclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import pytest
from typer.testing import CliRunner

from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job, parse_job, parse_manifest_job
from rowcast.job.schema import Job
from rowcast.job.section import LAST_COMMIT, LATER, REMOVED, Section
from rowcast.runtime.errors import ConfigError
from tests.support.jobs import TABLES, job_content, write_job

TABLE = TABLES[0]
SGD = {"kind": "sgd", "lr": 0.1}


def table(**keys: Any) -> dict[str, Any]:
    return {"tables": [TABLE | keys]}


def sparse(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"sparse": SGD | keys}}


def dense(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"dense": SGD | keys}}


def pair(*others: dict[str, Any]) -> dict[str, Any]:
    """A table of two sequences, and others."""
    return {"tables": [TABLE | {"pooling": "none"}, *others]}


DIN = {"kind": "din", "targets": {"cat_1": "cat_0"}, "bottom_mlp": None, "top_mlp": [1]}
TOWERS = {
    **{"kind": "two-tower", "bottom_mlp": None, "top_mlp": None},
    **{"item_features": ["cat_0"], "user_mlp": [2], "item_mlp": [2]},
}
WIDE = {"kind": "wide-deep", "bottom_mlp": None, "top_mlp": [1]}
TBSM = {"kind": "tbsm", "final_mlp": [1]}
BAD_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section": (
        {"nosuch": {"key": 1}},
        "unknown key nosuch; remove it, or use one of job, data, tables, tables_from, model,",
    ),
    "unknown key": ({"job": {"seeed": 1}}, "job: unknown key seeed; the nearest is seed"),
    "unknown key of a table": (table(precision="fp16"), "tables[0]: unknown key precision; it belongs to [model]"),
    "missing section": ({"cache": None}, "section [cache] is missing; it needs capacity"),
    "missing inner section": (
        {"optimizer": {"sparse": None}},
        "optimizer: section [optimizer.sparse] is missing; it needs kind and lr",
    ),
    "missing key": (
        {"optimizer": {"sparse": {"kind": "sgd"}}},
        "optimizer.sparse: key lr is missing; give a finite number of at least 0",
    ),
    "missing choice": (
        {"optimizer": {"dense": {"lr": 0.1}}},
        'dense: key kind is missing; give "adagrad", "adam", "adamw" or "sgd"',
    ),
    "text for a number": ({"job": {"seed": "one"}}, 'job.seed = "one" must be a whole number'),
    "number for text": (
        {"metrics": {"trainer": 9401}},
        'trainer = 9401 must be text in quotes, such as trainer = "127.0.0.1:9401+"',
    ),
    "value for a section": (
        {"job": 3},
        "job = 3 must be a section: write [job], and its keys below it: name, seed, run_dir",
    ),
    "unknown choice": (sparse(kind="lion"), 'kind = "lion" must be "adagrad", "adam", "rowwise_adagrad" or "sgd"'),
    "seed": ({"job": {"seed": -1}}, "job.seed = -1 must be a whole number from 0 to 2**63 - 1"),
    "run directory": ({"job": {"run_dir": ""}}, "run_dir is empty; name a folder"),
    "format": (
        {"data": {"format": "json"}},
        "format = 'json' is not one of criteo-tsv, criteo-npy, parquet, csv, jsonl, arrow, synthetic",
    ),
    "half a factory": ({"data": {"format": "package:"}}, "format = 'package:' is not one of"),
    "no path": ({"data": {"format": "criteo-tsv"}}, "format = 'criteo-tsv' needs path"),
    "batch size": ({"data": {"batch_size": 0}}, "data.batch_size = 0 must be a whole number from 1 to 2**31 - 1"),
    "eval fraction": (
        {"data": {"eval_fraction": 1.0}},
        "data.eval_fraction = 1.0 must be a number of at least 0 and below 1",
    ),
    "shuffle": ({"data": {"shuffle": "window:0"}}, "shuffle = 'window:0' is not one of none, full, window:ROWS"),
    "shuffle of a stream": (
        {"data": {"format": "parquet", "path": "x", "shuffle": "full"}},
        'shuffle = "full" needs random access, which parquet does not have',
    ),
    "no tables": ({"tables": []}, "no tables; give [[tables]] or [tables_from]"),
    "empty table": (table(num_embeddings=0), "tables[0].num_embeddings = 0 must be a whole number from 1 to 2**48"),
    "endless table": (
        table(num_embeddings=2**60),
        "tables[0].num_embeddings = 1_152_921_504_606_846_976 must be a whole number from 1 to 2**48",
    ),
    "width": (table(embedding_dim=0), "tables[0].embedding_dim = 0 must be a whole number from 1 to 4096"),
    "table without a feature": (table(features=[]), "table t has no feature; list at least one in features = [...]"),
    "feature without a table": (
        {"data": {"columns": {"weights": {"cat_9": "w"}}}},
        "data.columns.weights: feature cat_9 has no table, the nearest is cat_1; add it to a table's features",
    ),
    "feature of two tables": (
        {"tables": [TABLE, TABLE | {"name": "u"}]},
        "feature cat_0 is in table t and in table u, and can be in one; give the ids of one of them under a second",
    ),
    "two tables of a name": (
        {"tables": [TABLE, TABLE | {"features": ["x"]}]},
        "table t appears more than once in [[tables]]",
    ),
    "initial values": (
        table(init="normal:inf"),
        "init = 'normal:inf' is not one of uniform, uniform:lo,hi, normal:std, constant:x",
    ),
    "a value that fp16 has not": (
        table(dtype="fp16", init="constant:-70000"),
        "table t: init = 'constant:-70000' reaches 70000, and fp16 ends at 65504; choose smaller first values",
    ),
    "a tail that fp16 has not": (
        table(dtype="fp16", init="normal:1e4"),
        "init = 'normal:1e4' reaches 66604.4, and fp16 ends at 65504",
    ),
    "master weights of fp32": (
        sparse(master=True),
        "optimizer.sparse.master = true keeps fp32 weights beside rounded ones, but every table",
    ),
    "dtype": (table(dtype="fp8"), 'tables[0].dtype = "fp8" must be "bf16", "fp16" or "fp32"'),
    "widths that do not meet": (
        table(embedding_dim=8),
        "model.bottom_mlp ends in 4, but table t has embedding_dim = 8",
    ),
    "layers": ({"model": {"bottom_mlp": [0, 4]}}, "model.bottom_mlp[0] = 0 must be a whole number from 1 to 2**20"),
    "sequences for dlrm": (
        table(pooling="none"),
        'table t has pooling = "none", but dlrm needs one vector for each feature; use "sum" or "mean"',
    ),
    "sequences for dcnv2": (
        table(pooling="none") | {"model": {"kind": "dcnv2"}},
        'table t has pooling = "none", but dcnv2 needs one',
    ),
    "tbsm without sequences": (
        {"model": TBSM},
        'tbsm needs a table with pooling = "none": the last entry of a sequence is the target',
    ),
    "tbsm without a final layer": (
        table(pooling="none") | {"model": TBSM | {"final_mlp": [4]}},
        "tbsm needs bottom_mlp = [..., embedding",
    ),
    "tbsm of other widths": (
        table(pooling="none", embedding_dim=8) | {"model": TBSM},
        "table t has embedding_dim = 8; tbsm needs them equal",
    ),
    "tbsm without a history": (
        table(pooling="none") | {"model": TBSM | {"history": 0}},
        "model.history = 0 must be a whole number from 1 to 2**20",
    ),
    "tbsm's layers elsewhere": (
        {"model": {"final_mlp": [1]}},
        "final_mlp belongs to kind = \"tbsm\", not 'dlrm'; remove it",
    ),
    "din without targets": (
        pair() | {"model": DIN | {"targets": {}}},
        "din needs model.targets, the target of each history, such as",
    ),
    "din without sequences": (
        {"model": DIN},
        'din needs a table with pooling = "none": a history and its target are features of it',
    ),
    "an unknown history": (
        pair() | {"model": DIN | {"targets": {"cat_9": "cat_0"}}},
        "model.targets: feature cat_9 has no table, the nearest is cat_1; add it to a table's features",
    ),
    "a history in another table": (
        pair({"name": "u", "num_embeddings": 9, "embedding_dim": 4, "features": ["other"], "pooling": "none"})
        | {"model": DIN | {"targets": {"other": "cat_0"}}},
        "model.targets: history other has table u and target cat_0 has t; list them as two features of one table",
    ),
    "a pooled history": (
        pair({"name": "u", "num_embeddings": 9, "embedding_dim": 4, "features": ["a", "b"]})
        | {"model": DIN | {"targets": {"a": "b"}}},
        'model.targets: table u of history a has pooling = "sum"; set "none"',
    ),
    "a sequence without a target": (
        pair({"name": "u", "num_embeddings": 9, "embedding_dim": 4, "features": ["other"], "pooling": "none"})
        | {"model": DIN},
        'feature other is in no pair of model.targets, but table u has pooling = "none"; add it to a pair',
    ),
    "dice in parts": (
        pair() | {"model": DIN, "ranks": {"parts": 2}},
        'model.activation = "dice" keeps running means, which have no one result where a batch is trained in parts '
        '(ranks.parts = 2); set "prelu"',
    ),
    "another model's keys": (
        pair() | {"model": DIN | {"bottom_mlp": [4]}},
        'bottom_mlp belongs to kind = "dlrm" or "dcnv2" or "tbsm" or "package.module:factory", not \'din\'; remove it',
    ),
    "two towers without items": (
        {"model": TOWERS | {"item_features": []}},
        'two-tower needs model.item_features, such as item_features = ["item", "category"]',
    ),
    "two towers with an unknown item": (
        {"model": TOWERS | {"item_features": ["cat_7"]}},
        "model.item_features: feature cat_7 has no table, the nearest is cat_1",
    ),
    "two towers without a tower": (
        {"model": TOWERS | {"item_mlp": []}},
        "two-tower needs user_mlp = [...] and item_mlp = [...]",
    ),
    "towers of two heights": (
        {"model": TOWERS | {"item_mlp": [3]}},
        "user_mlp ends in 2 and item_mlp in 3; two-tower needs them equal",
    ),
    "items that all begin alike": (
        table(init="constant:0") | {"model": TOWERS},
        'model.item_features: all rows of table t begin as init = "constant:0", so that items could not be told apart',
    ),
    "linear weights for dlrm": (
        table(linear=True),
        "table t has linear = true, but dlrm has no use for linear weights; remove it, or set model.kind = "
        '"wide-deep" or "deepfm"',
    ),
    "wide-deep without linear weights": (
        {"model": WIDE},
        "wide-deep needs linear weights; set linear = true in at least one table",
    ),
    "linear weights of sequences": (
        table(linear=True, pooling="none") | {"model": WIDE},
        'table t: linear = true needs pooled look-ups, and pooling is "none"; use "sum" or "mean"',
    ),
    "linear weights in rows with one state": (
        table(linear=True) | {"model": WIDE} | sparse(kind="rowwise_adagrad"),
        "table t has linear = true, but rowwise_adagrad keeps one state for a row as a whole; set",
    ),
    "linear weights in clipped rows": (
        table(linear=True) | {"model": WIDE} | sparse(clip_rows=1.0),
        "table t has linear = true, but optimizer.sparse.clip_rows takes the norm of a row as a whole",
    ),
    "deepfm of two widths": (
        {
            "tables": [TABLE | {"linear": True}, TABLE | {"name": "u", "features": ["other"], "embedding_dim": 8}],
            "model": WIDE | {"kind": "deepfm"},
        },
        "deepfm needs tables of one embedding_dim, but t has 4 and u 8; make them equal",
    ),
    "no temperature": (
        {"model": TOWERS | {"temperature": 0.0}},
        "model.temperature = 0.0 must be a finite number above 0",
    ),
    "a negative dense feature": (
        {"model": TOWERS | {"log_frequency": -1}},
        "model.log_frequency = -1 must be a whole number of at least 0",
    ),
    "weighted mean": (
        table(pooling="mean") | {"data": {"columns": {"weights": {"cat_0": "w"}}}},
        "a weighted mean is refused",
    ),
    "momentum on rows": (
        sparse(momentum=0.9),
        "optimizer.sparse: momentum on rows is refused: it changes rows that no batch touches",
    ),
    "weight decay on rows": (
        sparse(weight_decay=0.1),
        "optimizer.sparse: weight_decay on rows is refused: it changes rows that no batch",
    ),
    "eps of zero": (
        sparse(kind="adagrad", eps=0.0),
        "eps = 0.0 must be above 0: with 0, rows that no batch touches would become NaN",
    ),
    "learning rate": (sparse(lr=-1.0), "optimizer.sparse.lr = -1.0 must be a finite number of at least 0"),
    "momentum of dense": (
        dense(momentum=-1.0),
        "optimizer.dense.momentum = -1.0 must be a finite number of at least 0",
    ),
    "betas of dense": (
        dense(kind="adam", betas=[2.0, 2.0]),
        "optimizer.dense.betas = [2.0, 2.0] must be a list of 2 numbers of at least 0 and below 1",
    ),
    "capacity": ({"cache": {"capacity": "lots"}}, "'lots' is not a size; write bytes with a unit"),
    "no capacity": ({"cache": {"capacity": 0}}, "0 must be more than 0"),
    "capacity without end": ({"cache": {"capacity": "9" * 400 + "MiB"}}, "less than 2**63 bytes"),
    "depth": ({"lookahead": {"depth": 0}}, "lookahead.depth = 0 must be a whole number from 1 to 64"),
    "ring": ({"transport": {"ring": "1KiB"}}, "ring = '1KiB' must be at least 1MiB"),
    "tcp without keys": (
        {"transport": {"endpoint": "tcp://host:1"}},
        "endpoint = 'tcp://host:1' needs keys = \"FOLDER\", even on one host",
    ),
    "endpoint": (
        {"transport": {"endpoint": "tcp://host"}},
        'endpoint = \'tcp://host\' must be "ipc" or "tcp://host:port"',
    ),
    "port": ({"transport": {"endpoint": "tcp://host:65536", "keys": "k"}}, 'must be "ipc" or "tcp://host:port"'),
    "ranks": ({"ranks": {"count": 0}}, "ranks.count = 0 must be a whole number from 1 to 1024"),
    "parts": ({"ranks": {"parts": 0}}, "ranks.parts = 0 must be a whole number from 1 to 4096"),
    "parts of ranks": ({"ranks": {"count": 2, "parts": 6}}, "6 parts cannot be shared by 2 ranks: each needs 1, 2, 4,"),
    "ranks of a host": ({"ranks": {"count": 4, "per_host": 3}}, "per_host = 3 must divide count = 4"),
    "ranks' timeout": ({"ranks": {"timeout": 0}}, "timeout = 0.0 must be more than 0 seconds"),
    "parts of two shapes": (
        {"model": {"compile": True}, "ranks": {"parts": 3}},
        "is not a multiple of ranks.parts = 3, so parts would have two shapes",
    ),
    "silence": ({"transport": {"silence_timeout": "1s"}}, "silence_timeout = '1s' must be at least 2 seconds"),
    "rejoin": ({"transport": {"rejoin_timeout": -1}}, "rejoin_timeout = -1.0 must be 0 seconds or more"),
    "time-out": (
        {"transport": {"connect_timeout": "soon"}},
        "'soon' is not a duration; write a number and ms, s, m or h",
    ),
    "threads": ({"trainer": {"threads": 0}}, 'trainer.threads = 0 must be a whole number from 1 to 4096 or "auto"'),
    "address": ({"metrics": {"trainer": "9401"}}, "trainer = '9401' must be \"host:port\""),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_job_file_that_cannot_be_trained_is_refused_with_one_sentence(name: str, tmp_path: Path) -> None:
    sections, sentence = BAD_JOBS[name]
    path = write_job(tmp_path / "job.toml", job_content(tmp_path / "run", **sections))
    with pytest.raises(ConfigError) as raised:
        load_job(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


# every key, by introspection


class Key(NamedTuple):
    path: tuple[str | int, ...]  # in the content of a job file
    kind: str | None  # of the section, if only some kinds have the key
    type: Any
    literals: list[Any]  # the values that it lists

    @property
    def is_section(self) -> bool:
        return section_in(self.type) is not None

    @property
    def name(self) -> str:
        return re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, self.path)))


def keys_of(
    struct: type[Section], path: tuple[str | int, ...] = (), kind: str | None = None, known: tuple[str, ...] = ()
) -> Iterator[Key]:
    """Keys and sections, depth first; without those that are `known`."""
    for field in msgspec.structs.fields(struct):
        if field.name not in known:
            listed = [value for literal in literals_in(field.type) for value in get_args(literal)]
            yield Key((*path, field.name), kind, field.type, listed)
        inner = section_in(field.type)
        if inner is not None:
            among: dict[Any, list[str | int]] = {list: [0], dict: ["label"]}
            yield from keys_of(inner, (*path, field.name, *among.get(get_origin(field.type), [])))
    if struct.kinds is not None and kind is None:
        for name, own in struct.kinds.registry.items():
            yield from keys_of(own.settings, path, name, struct.__struct_fields__)


def section_in(type: Any) -> Any:
    return next((one for one in [type, *get_args(type)] if isclass(one) and issubclass(one, msgspec.Struct)), None)


def literals_in(type: Any) -> Iterator[Any]:
    if get_origin(type) is Literal:
        yield type
    elif get_origin(type) is not dict:
        for one in get_args(type):
            yield from literals_in(one)


KEYS = {key.name if key.kind is None else f"{key.name} of {key.kind}": key for key in keys_of(Job)}
WRONG: list[Any] = [True, 3, 2048.5, "no such value", "", ["text", 1], [], {"a": {"b": 1}}, None]


def whole_content() -> dict[str, Any]:
    """Every section is there."""
    return {
        "job": {"run_dir": "run"},
        "data": {
            "format": "synthetic",
            "columns": {},
            "synthetic": {},
            "negatives": [{"feature": "drawn", "number": 3}],
        },
        "tables": [dict(TABLE), {**TABLE, "name": "drawn", "features": ["drawn"], "pooling": "none"}],
        "tables_from": {"embedding_dim": 4},
        "model": {"bottom_mlp": [4], "top_mlp": [1]},
        "optimizer": {"sparse": SGD | {"schedule": {}}, "dense": SGD | {"schedule": {}}},
        **{
            name: {}
            for name in (
                "eval",
                "lookahead",
                "store",
                "checkpoint",
                "transport",
                "ranks",
                "trainer",
                "prefetcher",
                "metrics",
            )
        },
        "cache": {"capacity": "1MiB"},
    }


KINDS: dict[str, dict[str, Any]] = {  # what they need
    "tiered": {"memory": "1GiB"},
    "redis": {"memory": "1GiB", "url": "redis://host:1"},
}


def with_value(path: tuple[str | int, ...], value: Any, kind: str | None = None) -> dict[str, Any]:
    content = target = whole_content()
    if kind is not None:
        content[str(path[0])] = {"kind": kind} | KINDS.get(kind, {})
    for name in path[:-1]:
        target = target[name] if isinstance(name, int) else target.setdefault(name, {})  # type: ignore[index]
    target[path[-1]] = value  # type: ignore[index]
    return content


def is_of_type(value: Any, type: Any) -> bool:
    try:
        msgspec.convert(value, type)
    except msgspec.ValidationError:
        return False
    return True


def wrong_values(key: Key) -> list[Any]:
    return [
        value for value in WRONG if not is_of_type(value, key.type) and not (key.is_section and isinstance(value, dict))
    ]


def test_there_are_keys_to_go_through() -> None:
    assert len(KEYS) > 100
    assert {
        "job",
        "model.targets of din",
        "store.disk of tiered",
        "tables[0].dtype",
        "optimizer.sparse.schedule.kind",
        "data.columns.weights",
        "metrics.prefetcher",
    } <= set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_a_value_of_a_wrong_type_is_refused_with_what_the_key_takes_and_an_example_that_it_takes(name: str) -> None:
    key = KEYS[name]
    wrong = wrong_values(key)
    assert len(wrong) >= 5
    for value in wrong:
        with pytest.raises(ConfigError) as raised:
            parse_job(with_value(key.path, value, key.kind), "job.toml")
        sentence = str(raised.value)
        assert re.match(rf"job\.toml: {re.escape(key.name)}[ .\[]", sentence), sentence
        assert " must be " in sentence
        for word in ("`", "Expected", "msgspec", "array", "object", "\n"):
            assert word not in sentence
        assert all(json.dumps(choice) in sentence for choice in key.literals), sentence
        example = re.search(rf"such as {key.path[-1]} = (.*)$", sentence)
        if example is not None:
            assert is_of_type(tomllib.loads(f"value = {example[1]}")["value"], key.type), sentence


@pytest.mark.parametrize("name", KEYS)
def test_a_misspelt_key_is_told_its_nearest(name: str) -> None:
    *sections, key = KEYS[name].path
    kind = KEYS[name].kind
    misspelt = f"{str(key)[:-1]}{str(key)[-1] * 2}"
    with pytest.raises(ConfigError) as raised:
        parse_job(with_value((*sections, misspelt), 1, kind), "job.toml")
    assert str(raised.value).endswith(f"unknown key {misspelt}; the nearest is {key}")


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].literals])
def test_a_misspelt_choice_is_told_its_nearest(name: str) -> None:
    key = KEYS[name]
    for choice in key.literals:
        with pytest.raises(ConfigError) as raised:
            parse_job(with_value(key.path, f"{choice}x".upper(), key.kind), "job.toml")
        assert f'must be "{choice}"' in str(raised.value) or f'; the nearest is "{choice}"' in str(raised.value)


SENTENCES: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "a port": (
        ("metrics", "prefetcher"),
        9400,
        'metrics.prefetcher = 9400 must be text in quotes, such as prefetcher = "127.0.0.1:9400+"',
    ),
    "true": (("data", "shuffle"), True, 'data.shuffle = true must be text in quotes, such as shuffle = "none"'),
    "no list": (
        ("data", "columns", "dense"),
        "price",
        'data.columns.dense = "price" must be a list of texts, such as dense = ["price"]',
    ),
    "a float": (
        ("data", "batch_size"),
        512.0,
        "data.batch_size = 512.0 must be a whole number from 1 to 2**31 - 1, such as batch_size = 512",
    ),
    "a number in quotes": (
        ("optimizer", "dense", "lr"),
        "0.1",
        'optimizer.dense.lr = "0.1" must be a finite number of at least 0, such as lr = 0.1',
    ),
    "a thing in a list": (
        ("model", "bottom_mlp"),
        [512, "a"],
        'model.bottom_mlp[1] = "a" must be a whole number from 1 to 2**20, such as 16',
    ),
    "a thing in a table": (
        ("data", "columns", "weights"),
        {"cat_0": 3},
        "data.columns.weights.cat_0 = 3 must be text in quotes, such as cat_0",
    ),
    "a size": (
        ("cache", "capacity"),
        2.5,
        'cache.capacity = 2.5 must be text in quotes or a whole number, such as capacity = "64MiB"',
    ),
    "null": (("job", "seed"), None, "job.seed = null must be a whole number from 0 to 2**63 - 1, such as seed = 16"),
    "null for a section": (
        ("data", "synthetic"),
        None,
        "data.synthetic = null must be a section: write [data.synthetic], and its keys below",
    ),
    "a list for a section": (
        ("cache",),
        [1],
        "cache = [1] must be a section: write [cache], and its keys below it: capacity, policy, groups",
    ),
    "one bracket": (
        ("tables",),
        {"name": "t"},
        'tables = {name = "t"} must be a list of sections: write [[tables]], with two brackets,',
    ),
    "a choice of two kinds": (
        ("lookahead", "horizon"),
        "aut",
        'horizon = "aut" must be a whole number from 0 to 2**20 or "auto"; the nearest is "auto"',
    ),
    "a long value": (
        ("data", "path"),
        list(range(99)),
        "data.path = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1... must",
    ),
    "a key of another section": (("job", "batch_size"), 1, "job: unknown key batch_size; it belongs to [data]"),
    "a key of two others": (
        ("optimizer", "lr"),
        1,
        "optimizer: unknown key lr; it belongs to [optimizer.sparse] or [optimizer.dense]",
    ),
    "a key of every section": (
        ("cache", "kind"),
        1,
        "cache: unknown key kind; remove it, or use one of capacity, policy, groups",
    ),
    "a key of a table": (
        ("model", "pooling"),
        "sum",
        "model: unknown key pooling; it belongs to [[tables]] or [tables_from]",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_of(name: str) -> None:
    path, value, sentence = SENTENCES[name]
    with pytest.raises(ConfigError) as raised:
        parse_job(with_value(path, value), "job.toml")
    assert sentence in str(raised.value)


def test_a_name_that_is_gone_is_refused_with_what_replaces_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("store.kind = punched", "cache.magic", "run --lace", "knit"):
        monkeypatch.setitem(REMOVED, name, "remove it")
    for name, replacement in REMOVED.items():
        sentence = f"{name} is gone: {replacement}; commit {LATER.get(name, LAST_COMMIT)} has it"
        path, _, value = name.partition(" = ")
        if "." in path:
            section, key = path.split(".")
            content = job_content(tmp_path / "run", **{section: {key: value}})
            with pytest.raises(ConfigError) as raised:
                parse_job(content)
            assert sentence in str(raised.value)
            assert parse_manifest_job(content, "manifest.json") == parse_job(job_content(tmp_path / "run"))
        else:
            said = CliRunner().invoke(app, [*name.split(), "--config", "job.toml"], env={"COLUMNS": "500"})
            assert said.exit_code == 2
            assert sentence in said.stderr
