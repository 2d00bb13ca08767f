"""Builds the content of a job file from an EmbeddingBagCollection's arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from rowcast.job.embedding_tables import Table
from rowcast.job.file import parse_job, read_content
from rowcast.job.models import NO_MODEL
from rowcast.job.row_optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError

JOB_FILE = "job.json"  # in the run directory: the job of both processes of an adopted run
NO_DATA = "synthetic"  # data.format until a loader is connected
# of configs in torch and TorchRec, what rowcast's tables do not do: name -> the value that asks for nothing
NOT_DONE = {
    **dict.fromkeys(("padding_idx", "max_norm", "_weight", "dtype", "input_dim", "total_num_buckets"), None),
    **dict.fromkeys(("num_embeddings_post_pruning", "virtual_table_eviction_policy"), None),
    **dict.fromkeys(("scale_grad_by_freq", "_freeze", "need_pos", "use_virtual_table", "is_weighted"), False),
    "has_feature_processor": False,
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table whose look-ups stay separate; TorchRec's EmbeddingConfig has the same fields and also works.

    name: unique among the tables. num_embeddings, embedding_dim: rows and their width. feature_names: the features that
    look up the table. data_type: "fp32", "fp16" or "bf16". init: first values, as `init` of the job file."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    data_type: str = "fp32"
    init: str = "uniform"


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table; TorchRec's EmbeddingBagConfig has the same fields and also works.

    Fields as in EmbeddingConfig, and pooling: "sum" or "mean"."""

    pooling: str = "sum"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What distinguishes the two collections."""

    name: str
    poolings: tuple[str, ...]  # the first is that of a config without one
    config: type[EmbeddingConfig]
    other: str  # the one for other poolings
    attribute: str  # of the module in TorchRec that holds the tables, which begins their names in a state dict

    def weight_name(self, table: Table) -> str:
        return f"{self.attribute}.{table.name}.weight"

    def check(self, table: str, pooling: str) -> None:
        """Raises ConfigError."""
        if pooling not in self.poolings:
            raise ConfigError(
                f'table {table}: {self.name} cannot have pooling = "{pooling}"; use {" or ".join(self.poolings)}, or a '
                f"rowcast.{self.other}"
            )


BAGS = Kind(
    name="an EmbeddingBagCollection",
    poolings=("sum", "mean"),
    config=EmbeddingBagConfig,
    other="EmbeddingCollection, which does not pool",
    attribute="embedding_bags",
)
SEQUENCES = Kind(
    name="an EmbeddingCollection",
    poolings=("none",),
    config=EmbeddingConfig,
    other="EmbeddingBagCollection, which pools",
    attribute="embeddings",
)


def job_content(
    configs: Sequence[Any],
    *,
    kind: Kind,
    optimizer: SparseOptimizer | Mapping[str, Any] | None,
    capacity: str | int | None,
    device: str,
    seed: int,
    run_dir: str,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """`others`: "section.key" -> value. Raises ConfigError."""
    if optimizer is None or capacity is None:
        missing = "optimizer" if optimizer is None else "capacity"
        example = {"optimizer": '{"kind": "adagrad", "lr": 0.05}', "capacity": '"64MiB"'}[missing]
        raise ConfigError(f"{kind.name}: {missing} is missing; give {missing}={example}, or a job file with tables")
    if not isinstance(optimizer, SparseOptimizer | Mapping):
        raise ConfigError(
            f"{kind.name}: optimizer = {optimizer!r} does not say how rows are trained; give "
            '{"kind": "adagrad", "lr": 0.05}'
        )
    content: dict[str, Any] = {
        "job": {"seed": seed, "run_dir": run_dir},
        "data": {"format": NO_DATA},
        "tables": [table_content(config, kind) for config in configs],
        "model": {"kind": NO_MODEL},
        # the script has the dense optimizer
        "optimizer": {"sparse": optimizer, "dense": {"kind": "sgd", "lr": 0.0}},
        "cache": {"capacity": capacity},
        "trainer": {"device": device},
        "metrics": {"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
    }
    for name, value in others.items():
        set_key(content, name, value)
    return content


def set_key(content: dict[str, Any], name: str, value: Any) -> None:
    """Sets one "section.key", or every key of a section that is given as a mapping. Raises ConfigError."""
    section, _, key = name.partition(".")
    if not key and not isinstance(value, Mapping):
        raise ConfigError(f'job = {{{name!r}: ...}}: write "section.key": value, such as "lookahead.depth": 4')
    for key_path, key_value in {key: value}.items() if key else value.items():
        *sections, last = key_path.split(".")
        target = content.setdefault(section, {})
        for inner in sections:
            target = target.setdefault(inner, {}) if isinstance(target, dict) else target
        if not isinstance(target, dict):
            raise ConfigError(
                f"job = {{{name!r}: ...}}: {section}.{key_path} cannot be set here; the configs describe the tables"
            )
        target[last] = key_value


def plain(value: Any, name: str = "") -> Any:
    """Returns the content of a job, with NumPy's numbers as Python's. Raises ConfigError for an array or a tensor."""
    if isinstance(value, Mapping):
        return {key: plain(own, f"{name}.{key}" if name else key) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain(own, name) for own in value]
    if isinstance(value, np.ndarray | torch.Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}; give a number of Python, such as value.item()")
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, enc_hook=lambda own: plain(own, name))
    return value.item() if isinstance(value, np.generic) else value


def table_content(config: Any, kind: Kind) -> dict[str, Any]:
    """A `[[tables]]` entry from a config, TorchRec's or rowcast's. Raises ConfigError."""
    try:
        content = {name: getattr(config, name) for name in ("name", "num_embeddings", "embedding_dim")}
        content["features"] = list(config.feature_names)
    except AttributeError as error:
        raise ConfigError(
            f"{kind.name}: {error}; give {kind.config.__name__}s, TorchRec's or rowcast.{kind.config.__name__}"
        ) from None
    pooling, dtype = word(getattr(config, "pooling", kind.poolings[0])), word(getattr(config, "data_type", "fp32"))
    kind.check(config.name, pooling)
    for field_name, default in {**NOT_DONE, "mode": pooling}.items():
        found = getattr(config, field_name, default)
        if not (found is default or (type(found) is type(default) and found == default)):
            raise ConfigError(
                f"table {config.name}: {field_name} = {found!r} is not done by rowcast, and would be ignored; leave it "
                f"at {default!r} (docs/adopt.md)"
            )
    content |= {"pooling": pooling, "init": init_of(config)}
    return content if dtype == "fp32" else content | {"dtype": dtype}


def word(value: Any) -> str:
    """`PoolingType.SUM`, `"SUM"` or `"sum"` -> `"sum"`."""
    return str(getattr(value, "value", value)).lower()


def init_of(config: Any) -> str:
    """Returns the first values' `init`. TorchRec's default `init_fn` counts as none; a function other than uniform
    would need rows that do not exist."""
    function = getattr(config, "init_fn", None)
    lowest, highest = getattr(config, "weight_init_min", None), getattr(config, "weight_init_max", None)
    if function is not None:
        ends = {"a": 0.0, "b": 1.0} | getattr(function, "keywords", {})
        is_uniform = getattr(function, "func", function) is torch.nn.init.uniform_ and not getattr(function, "args", ())
        if not is_uniform or len(ends) > 2:
            raise ConfigError(
                f"table {config.name}: an init_fn of its own needs the whole table in memory; omit it and give "
                "weight_init_min and weight_init_max, or load the values by load_state_dict"
            )
        defaults = [(own**-0.5, -(own**-0.5)) for own in (config.num_embeddings, config.embedding_dim)]
        if not any(np.allclose((ends["b"], ends["a"]), own, rtol=1e-12) for own in defaults):
            lowest, highest = ends["a"], ends["b"]
    if lowest is None and highest is None:
        return str(getattr(config, "init", "uniform"))
    bound = config.num_embeddings**-0.5
    return f"uniform:{float(-bound if lowest is None else lowest)!r},{float(bound if highest is None else highest)!r}"


def file_content(path: Path, configs: Sequence[Any]) -> dict[str, Any]:
    """The content of a job file. Raises ConfigError if `configs` are given and differ from its tables."""
    content = read_content(path)
    job_tables = parse_job(content, str(path)).tables
    for table in job_tables:
        if table.linear:
            raise ConfigError(
                f"{path}: table {table.name} has linear = true, and an EmbeddingBagCollection returns one vector for "
                "each feature; give linear weights a table of their own, with embedding_dim = 1"
            )
    tables = [described(table.name, table.num_embeddings, table.embedding_dim, table.features) for table in job_tables]
    given = [
        described(config.name, config.num_embeddings, config.embedding_dim, config.feature_names) for config in configs
    ]
    if given and given != tables:
        raise ConfigError(
            f"{path} has the tables {'; '.join(tables)}, but the configs are {'; '.join(given)}; make them equal, or "
            "give no configs"
        )
    return content


def described(name: str, rows: int, dim: int, features: Sequence[str]) -> str:
    return f"{name} [{rows}, {dim}] of {', '.join(features)}"


def configs_of(job: Job, kind: Kind) -> list[Any]:
    return [
        kind.config(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.features),
            init=table.init,
            **({"pooling": table.pooling} if kind is BAGS else {}),
        )
        for table in job.tables
    ]


def refuse_model(*args: Any, **options: Any) -> NoReturn:
    raise ConfigError(
        "the model of this job is in a training script of its own (docs/adopt.md); run the script instead of "
        "`trainer run`"
    )
