"""What a config carries is taken, or refused by name; numbers of NumPy are numbers."""

import inspect
from dataclasses import fields, make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rowcast
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.scripts import make
from tests.adopt.stand_ins.torchrec.modules import embedding_configs
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"
GOOD: dict[str, Any] = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}
# the fields of TorchRec's configs, at commit 0066275, with what they begin as
TORCHREC = {
    "data_type": "FP32",
    "weight_init_max": None,
    "weight_init_min": None,
    "num_embeddings_post_pruning": None,
    "init_fn": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "pooling": "SUM",
    "is_weighted": False,
    "has_feature_processor": False,
}
TAKEN = {"num_embeddings", "embedding_dim", "name", "feature_names", "data_type", "pooling", "init", "placement"}
TAKEN |= {"weight_init_max", "weight_init_min", "init_fn"}
# how torch computes and where, which rowcast decides, and what max_norm uses
HARMLESS = {"sparse", "include_last_offset", "device", "norm_type"}


def collection(config: Any, **others: Any) -> EmbeddingBagCollection:
    given: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 0.1}, "capacity": "1MiB"}
    return EmbeddingBagCollection([config], **given | others)


def job_of(**changed: Any) -> Job:
    return collection(SimpleNamespace(**GOOD | changed)).job


def arguments(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {own.name: None if own.default is own.empty else own.default for own in parameters}


CARRIED = arguments(nn.Embedding) | arguments(nn.EmbeddingBag) | arguments(nn.Embedding.from_pretrained) | TORCHREC
CARRIED |= {own.name: None for own in fields(embedding_configs.EmbeddingBagConfig)}
CARRIED |= {own.name: None for own in fields(rowcast.EmbeddingBagConfig)}
NOT_OF_A_TABLE = {"embeddings", "freeze"}  # arguments of from_pretrained, which no object carries


@pytest.mark.parametrize("field", sorted(set(CARRIED) - TAKEN - HARMLESS - NOT_OF_A_TABLE))
def test_what_a_table_does_not_do_is_refused_by_name(field: str) -> None:
    default = "sum" if field == "mode" else CARRIED[field]
    assert job_of(**{field: default}).tables == job_of().tables
    for odd in (True if default is False else "max", 3, np.int64(7), torch.zeros(2)):
        with pytest.raises(ConfigError, match=facts("table t", field, "docs/connect.md")):
            job_of(**{field: odd})
    config = make_dataclass("Own", [*GOOD, field])(*GOOD.values(), default)
    assert collection(config).job.tables == job_of().tables


@pytest.mark.parametrize(
    ("changed", "init"),
    [
        ({"weight_init_min": -0.5, "weight_init_max": 0.25}, "uniform:-0.5,0.25"),
        ({"weight_init_max": 0.25}, f"uniform:{-(10**-0.5)!r},0.25"),
        ({"weight_init_min": np.float32(-0.5)}, f"uniform:-0.5,{10**-0.5!r}"),
        ({"init_fn": None}, "uniform"),
        ({"init_fn": nn.init.uniform_}, "uniform:0.0,1.0"),
        ({"init_fn": partial(nn.init.uniform_, a=-1, b=2)}, "uniform:-1.0,2.0"),
        ({"init_fn": partial(nn.init.uniform_, a=-(10**-0.5), b=10**-0.5)}, "uniform"),
        ({"init_fn": partial(nn.init.uniform_, a=-(4**-0.5), b=4**-0.5)}, "uniform"),
        ({"init_fn": partial(nn.init.uniform_, a=-1, generator=None)}, None),
        ({"init_fn": nn.init.zeros_}, None),
    ],
)
def test_first_values_are_those_of_the_config(changed: dict[str, Any], init: str | None) -> None:
    if init is None:
        with pytest.raises(ConfigError, match=facts("table t", "init_fn")):
            job_of(**changed)
    else:
        assert job_of(**changed).tables[0].init == init


INTEGERS = [np.dtype(name).type for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]


@pytest.mark.parametrize("integer", INTEGERS, ids=lambda own: str(own.__name__))
def test_integers_of_numpy_are_integers(integer: Any, tmp_path: Any) -> None:
    ebc = collection(
        SimpleNamespace(**GOOD | {"num_embeddings": integer(100), "embedding_dim": integer(4)}),
        capacity=integer(127),
        seed=integer(3),
        run_dir=tmp_path,
        job={"lookahead.depth": integer(2), "data": {"options": {"batches": [integer(5)]}}},
    )
    count = integer(2)
    rowcast.connect(ebc, DATASET, epochs=count, max_steps=count, save_every=count, options={"batches": count})
    job = ebc.job
    assert (job.tables[0].num_embeddings, job.tables[0].embedding_dim, job.job.seed) == (100, 4, 3)
    assert (job.data.epochs, job.checkpoint.every, job.data.options) == (2, 2, {"batches": 2})
    assert ebc.shared.write_job_file().exists()


@pytest.mark.parametrize(
    "number", [np.float64(0.25), np.float32(0.25), np.float16(0.25)], ids=lambda own: str(own.dtype)
)
def test_floats_of_numpy_are_rates(number: Any, tmp_path: Any) -> None:
    ebc = collection(SimpleNamespace(**GOOD), optimizer={"kind": "adagrad", "lr": number}, run_dir=tmp_path)
    assert ebc.job.optimizer.sparse.lr == 0.25
    assert ebc.shared.write_job_file().exists()


@pytest.mark.parametrize(
    "value", [torch.tensor(0.25), torch.tensor(3), np.array(3), np.array([0.25]), True, np.True_, "x", None]
)
def test_what_is_no_number_gets_a_sentence(value: Any, tmp_path: Any) -> None:
    for name, given in (
        ("optimizer.sparse.lr", {"optimizer": {"kind": "sgd", "lr": value}}),
        ("lookahead.depth", {"job": {"lookahead.depth": value}}),
        ("seed", {"seed": value}),
    ):
        with pytest.raises(ConfigError, match=name):
            collection(SimpleNamespace(**GOOD), **given)
    with pytest.raises(ConfigError, match="num_embeddings"):
        job_of(num_embeddings=value)
    for name in ("epochs", "save_every", "max_steps"):
        if value is not None and (name, value) != ("save_every", "x"):
            model, _ = make(tmp_path)
            with pytest.raises(ConfigError, match="checkpoint.every" if name == "save_every" else name):
                rowcast.connect(model.ebc, DATASET, **{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.5, np.int64(0)])
def test_a_count_is_at_least_one(value: Any, tmp_path: Any) -> None:
    for name in ("epochs", "max_steps"):
        model, _ = make(tmp_path)
        with pytest.raises(ConfigError, match=name):
            rowcast.connect(model.ebc, DATASET, **{name: value})
