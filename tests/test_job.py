"""A job file that cannot be trained is refused as it is read, with one sentence that names the key."""

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from protocol.job_file import load_job
from tests.system.processes import TABLES, job_content, write_job

TABLE = TABLES[0]
SGD = {"kind": "sgd", "lr": 0.1}


def table(**keys: Any) -> dict[str, Any]:
    return {"tables": [TABLE | keys]}


def sparse(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"sparse": SGD | keys}}


def dense(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"dense": SGD | keys}}


TBSM = {"kind": "tbsm", "final_mlp": [1]}
BAD_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section": ({"nosuch": {"key": 1}}, "unknown key nosuch; correct or remove it"),
    "unknown key": ({"job": {"seeed": 1}}, "job: unknown key seeed; correct or remove it"),
    "unknown key of a table": (table(precision="fp16"), "tables[0]: unknown key precision; correct or remove it"),
    "missing section": ({"cache": None}, "key cache is missing"),
    "missing key": ({"optimizer": {"sparse": {"kind": "sgd"}}}, "optimizer.sparse: key lr is missing"),
    "text for a number": ({"job": {"seed": "one"}}, "job.seed: Expected `int`, got `str`"),
    "number for text": ({"metrics": {"trainer": 9401}}, "metrics.trainer: Expected `str`, got `int`"),
    "value for a section": ({"job": 3}, "job: Expected `object`, got `int`"),
    "unknown choice": (sparse(kind="lion"), "optimizer.sparse.kind: 'lion' is not one of the values that this key can have"),
    "seed": ({"job": {"seed": -1}}, "seed = -1 must be from 0 to 2**63 - 1"),
    "run directory": ({"job": {"run_dir": ""}}, "run_dir is empty; name a folder"),
    "format": ({"data": {"format": "csv"}}, "format = 'csv' is none of criteo-tsv, criteo-npy, parquet, synthetic"),
    "half a factory": ({"data": {"format": "package:"}}, "format = 'package:' is none of"),
    "no path": ({"data": {"format": "criteo-tsv"}}, "format = 'criteo-tsv' needs path"),
    "batch size": ({"data": {"batch_size": 0}}, "batch_size = 0 must be from 1 to"),
    "eval fraction": ({"data": {"eval_fraction": 1.0}}, "eval_fraction = 1.0 must be at least 0 and less than 1"),
    "shuffle": ({"data": {"shuffle": "window:0"}}, "shuffle = 'window:0' is none of none, full, window:ROWS"),
    "shuffle of a stream": (
        {"data": {"format": "parquet", "path": "x", "shuffle": "full"}},
        'shuffle = "full" needs random access, which parquet has not',
    ),
    "no tables": ({"tables": []}, "no tables; give [[tables]] or [tables_from]"),
    "empty table": (table(num_embeddings=0), "table t: num_embeddings = 0 must be from 1 to 2**48"),
    "endless table": (table(num_embeddings=2**60), "table t: num_embeddings = 1152921504606846976 must be from 1 to 2**48"),
    "width": (table(embedding_dim=0), "table t: embedding_dim = 0 must be from 1 to 4096"),
    "table without a feature": (table(features=[]), "table t has no feature; list at least one in features = [...]"),
    "feature without a table": (
        {"data": {"columns": {"weights": {"cat_9": "w"}}}},
        "data.columns.weights: feature cat_9 has no table; add it to a table's features",
    ),
    "feature of two tables": ({"tables": [TABLE, TABLE | {"name": "u"}]}, "feature cat_0 appears more than once in [[tables]]"),
    "two tables of a name": ({"tables": [TABLE, TABLE | {"features": ["x"]}]}, "table t appears more than once in [[tables]]"),
    "initial values": (table(init="normal:inf"), "init = 'normal:inf' is none of uniform, uniform:lo,hi, normal:std, constant:x"),
    "a value that fp16 has not": (
        table(dtype="fp16", init="constant:-70000"),
        "table t: init = 'constant:-70000' reaches 70000, and fp16 ends at 65504; choose smaller first values",
    ),
    "a tail that fp16 has not": (table(dtype="fp16", init="normal:1e4"), "init = 'normal:1e4' reaches 66604.4, and fp16 ends at 65504"),
    "master weights of fp32": (
        sparse(master=True),
        "optimizer.sparse.master = true keeps fp32 weights beside rounded ones, but every table",
    ),
    "dtype": (table(dtype="fp8"), "tables[0].dtype: 'fp8' is not one of the values that this key can have"),
    "widths that do not meet": (table(embedding_dim=8), "model.bottom_mlp ends in 4, but table t has embedding_dim = 8"),
    "layers": ({"model": {"bottom_mlp": [0, 4]}}, "attention_mlp and final_mlp list widths, which must be from 1 to"),
    "sequences for dlrm": (table(pooling="none"), 'table t has pooling = "none", but dlrm needs one vector a feature; use "sum" or "mean"'),
    "sequences for dcnv2": (table(pooling="none") | {"model": {"kind": "dcnv2"}}, 'table t has pooling = "none", but dcnv2 needs one'),
    "tbsm without sequences": ({"model": TBSM}, 'tbsm needs a table with pooling = "none": the last entry of its sequences is the target'),
    "tbsm without a final layer": (table(pooling="none") | {"model": TBSM | {"final_mlp": [4]}}, "tbsm needs bottom_mlp = [..., embedding"),
    "tbsm of other widths": (
        table(pooling="none", embedding_dim=8) | {"model": TBSM},
        "table t has embedding_dim = 8; tbsm needs them equal",
    ),
    "tbsm without a history": (table(pooling="none") | {"model": TBSM | {"history": 0}}, "history = 0 must be from 1 to"),
    "tbsm's layers elsewhere": ({"model": {"final_mlp": [1]}}, "attention_mlp and final_mlp belong to kind = \"tbsm\", not 'dlrm'"),
    "weighted mean": (table(pooling="mean") | {"data": {"columns": {"weights": {"cat_0": "w"}}}}, "a weighted mean is refused"),
    "momentum on rows": (sparse(momentum=0.9), "optimizer.sparse: momentum on rows is refused: it changes rows that no batch touches"),
    "weight decay on rows": (sparse(weight_decay=0.1), "optimizer.sparse: weight_decay on rows is refused: it changes rows that no batch"),
    "eps of zero": (sparse(kind="adagrad", eps=0.0), "eps = 0.0 must be above 0: with 0 rows that no batch touches would become NaN"),
    "learning rate": (sparse(lr=-1.0), "lr = -1.0 must be finite and at least 0"),
    "momentum of dense": (dense(momentum=-1.0), "momentum = -1.0 must be finite and at least 0"),
    "betas of dense": (dense(kind="adam", betas=[2.0, 2.0]), "betas = [2.0, 2.0] must be at least 0 and below 1"),
    "capacity": ({"cache": {"capacity": "lots"}}, "'lots' is not a size; write bytes with a unit"),
    "no capacity": ({"cache": {"capacity": 0}}, "0 must be more than 0"),
    "capacity without end": ({"cache": {"capacity": "9" * 400 + "MiB"}}, "less than 2**63 bytes"),
    "depth": ({"lookahead": {"depth": 0}}, "depth = 0 must be from 1 to 64"),
    "ring": ({"transport": {"ring": "1KiB"}}, "ring = '1KiB' must be at least 1MiB"),
    "tcp without keys": (
        {"transport": {"endpoint": "tcp://host:1"}},
        "endpoint = 'tcp://host:1' needs keys = \"FOLDER\", also on one host",
    ),
    "endpoint": ({"transport": {"endpoint": "tcp://host"}}, 'endpoint = \'tcp://host\' must be "ipc" or "tcp://host:port"'),
    "port": ({"transport": {"endpoint": "tcp://host:65536", "keys": "k"}}, 'must be "ipc" or "tcp://host:port"'),
    "rejoin": ({"transport": {"rejoin_timeout": -1}}, "rejoin_timeout = -1.0 must be 0 seconds or more"),
    "time-out": ({"transport": {"connect_timeout": "soon"}}, "'soon' is not a duration; write a number and ms, s, m or h"),
    "threads": ({"trainer": {"threads": 0}}, 'threads = 0 must be "auto" or from 1 to'),
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
