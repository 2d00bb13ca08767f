"""The job of a script's collection, from its arguments, and its whole tables.

Whole tables are given before the run, at checkpoints and after the end.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from rowcast.job.embedding_tables import Table
from rowcast.job.file import parse_job
from rowcast.job.models import NO_MODEL
from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import newest_checkpoint
from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import pair_folder
from rowcast.trainer.adopt.connect import table_files
from rowcast.trainer.adopt.connect.session import ScriptSession
from rowcast.trainer.device.cuda import choose_device
from rowcast.trainer.run.launch import read_launch

JOB_FILE = "job.json"  # in the run directory: the job of both processes of an adopted run
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

    Fields as in EmbeddingConfig, and pooling: "sum" or "mean". placement: as in the job file, for several ranks."""

    pooling: str = "sum"
    placement: str = "rows"


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


def refuse_model(*args: Any, **options: Any) -> NoReturn:
    raise ConfigError(
        "the model of this job is in a training script of its own (docs/connect.md); run the script instead of "
        "`trainer run`"
    )


def job_content(configs: Sequence[Any], kind: Kind, optimizer: Any, capacity: Any, others: Any) -> dict[str, Any]:
    """`others`: "section.key" -> value. Raises ConfigError."""
    if optimizer is None or capacity is None:
        missing = "optimizer" if optimizer is None else "capacity"
        example = {"optimizer": '{"kind": "adagrad", "lr": 0.05}', "capacity": '"64MiB"'}[missing]
        raise ConfigError(f"{kind.name}: {missing} is missing; give {missing}={example}")
    if not isinstance(optimizer, SparseOptimizer | Mapping):
        raise ConfigError(
            f"{kind.name}: optimizer = {optimizer!r} does not say how rows are trained; give "
            '{"kind": "adagrad", "lr": 0.05}'
        )
    content: dict[str, Any] = {
        "data": {"format": "synthetic"},  # until a loader is connected
        "tables": [table_content(config, kind) for config in configs],
        "model": {"kind": NO_MODEL},
        # the script has the dense optimizer
        "optimizer": {"sparse": optimizer, "dense": {"kind": "sgd", "lr": 0.0}},
        "cache": {"capacity": capacity},
        "metrics": {"prefetcher": "127.0.0.1:0"},
    }
    for name, value in others.items():
        set_key(content, name, value)
    if "trainer" in content["metrics"]:
        raise ConfigError(
            "job = {'metrics.trainer': ...}: a script serves no /metrics; leave it out, or train by a job"
        )
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
    if isinstance(value, np.ndarray | Tensor):
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
                f"at {default!r} (docs/connect.md)"
            )
    content |= {"pooling": pooling, "init": init_of(config), "placement": getattr(config, "placement", "rows")}
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


class ScriptTables:
    def __init__(self, content: dict[str, Any]) -> None:
        """`content`: of a job file. Raises ConfigError."""
        self.content = plain(content)
        self.job = self._parsed(self.content)
        self.launch = read_launch(os.environ)
        self.device = choose_device(self.job.trainer.device, self.launch.local_rank)
        if self.launch.world_size > 1:
            set_key(self.content, "trainer.device", self.device.type)  # ranks have one job, and devices of their own
        self.session: ScriptSession | None = None  # once the loader has begun
        self.has_tables = True  # state_dict holds the tables
        self.is_connected = False  # to a loader
        self._resumes = False  # the tables begin with the newest checkpoint in the run directory
        self.loaded: Path | None = None  # the file that the run's tables begin with

    @property
    def folder(self) -> Path:
        """For the files of this process and its prefetcher."""
        return pair_folder(self.job.run_dir, self.launch.rank, self.launch.world_size)

    def adopt(self, changes: Mapping[str, Any], *, resumes: bool) -> Job:
        """Adds the loader's settings to the job; `connect` calls it once. Changes nothing if it raises ConfigError."""
        content = deepcopy(self.content)
        for name, value in plain(changes).items():
            set_key(content, name, value)
        self.job, self.content = self._parsed(content), content
        self.is_connected, self._resumes = True, resumes
        return self.job

    def write_job_file(self) -> Path:
        """Writes the job to a file for a prefetcher. Raises ConfigError."""
        path = self.folder / JOB_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb", opener=not_a_link) as file:
                file.write(msgspec.json.format(msgspec.json.encode(self.content), indent=2))
        except OSError as error:
            raise ConfigError(f"{path}: the job cannot be written ({error.strerror}); set another run_dir") from None
        return path

    def _parsed(self, content: dict[str, Any]) -> Job:
        return parse_job(content, "EmbeddingBagCollection")

    # whole tables

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        self.has_tables = False
        try:
            yield
        finally:
            self.has_tables = True

    def weights(self, tables: Sequence[Table]) -> list[Tensor]:
        """[num_embeddings, embedding_dim] of each, mapped from a file. Before a run, loaded tables as given.

        On several ranks, which all call it, only rank 0 has them; the others have none."""
        if self.session is not None:
            checkpoint = self.session.checkpoint_here()
        else:
            folder = newest_checkpoint(self.job.run_dir) if self._resumes else None
            checkpoint = None if folder is None else folder.name
        if checkpoint is None and self.session is not None and self.session.train_steps:
            raise RuntimeError(
                f"after {self.session.train_steps} train steps the newest rows are on the device: the tables are "
                "whole at a checkpoint, so call state_dict() after every N-th step of connect(..., save_every=N), or "
                "after the last of the loader's epochs"
            )
        if self.launch.rank:
            return []
        if checkpoint is not None:
            path = table_files.exported(self.job, "--run", str(self.job.run_dir), "--checkpoint", checkpoint)
        else:
            path = self.loaded or table_files.exported(self.job, "--config", str(self.write_job_file()))
        return table_files.read_tables(path, tables)

    def load(self, tables: Sequence[Table], weights: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the run has begun, ConfigError."""
        if self.session is not None:
            raise RuntimeError(
                "tables can be loaded only before the loader yields its first batch: from then on their rows move"
            )
        path = table_files.loaded_file(self.folder, tables)
        if self.launch.local_rank == 0:  # it starts the host's prefetchers
            self.write_job_file()
            table_files.write_tables(path, tables, weights)
        self.loaded = path
