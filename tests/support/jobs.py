"""Jobs of tests: the least that a job file holds, with other sections laid over it."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rowcast.job.file import parse_job
from rowcast.job.schema import Job


def table(name: str, num_embeddings: int, embedding_dim: int, *features: str, **more: Any) -> dict[str, Any]:
    """One feature of the table's name where none is given."""
    shape = {"name": name, "num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    return {**shape, "features": list(features) or [name], **more}


FOLDER = TemporaryDirectory(
    prefix="rowcast-tests-"
)  # beside run directories that no test looks at, readers keep columns
TABLES = [table("t", 2000, 4, "cat_0", "cat_1")]
LEAST: dict[str, Any] = {
    "job": {"run_dir": f"{FOLDER.name}/unused", "seed": 1},
    "data": {"format": "synthetic"},
    "tables": TABLES,
    "model": {"kind": "tests.support.batches:small_model"},
    "optimizer": {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
    "cache": {"capacity": "1MiB"},
}
TINY: dict[str, dict[str, Any]] = {  # for two real processes
    "data": {"batch_size": 64, "synthetic": {"samples": 64_000_000}},
    "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
    "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}},
    "cache": {"capacity": "16KiB"},
    "lookahead": {"horizon": 8, "bundle": 1},
    "transport": {"ring": "1MiB", "connect_timeout": "30s"},
    "trainer": {"device": "cpu", "threads": 1},
    "metrics": {"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
}


def job(**sections: Any) -> Job:
    """The least job with `sections` laid over it."""
    return parse_job(laid_over(LEAST, sections))


def job_content(run_dir: Path, **sections: Any) -> dict[str, Any]:
    """The tiny job of two real processes with `sections` laid over it."""
    tiny = laid_over(laid_over(LEAST, TINY), {"job": {"run_dir": str(run_dir)}})
    return laid_over(tiny, sections)


def laid_over(content: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """A section's keys one by one, other things as a whole; None is no such section or key."""
    merged = copy.deepcopy(dict(content))
    for name, section in sections.items():
        both = isinstance(section, dict) and isinstance(merged.get(name), dict)
        merged[name] = without_none(merged[name] | section) if both else section
    return without_none(merged)


def without_none(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


def write_job(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{name} = {toml(section)}\n" for name, section in content.items()))
    return path


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value)
