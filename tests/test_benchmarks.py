"""Benchmarks are not run here, but each can be imported, and the jobs they build pass today's rules."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import planner
from benchmarks.gpu_check.jobs import make_job, sizes
from rowcast.job.file import load_job
from rowcast.job.schema import Job

ROOT = Path(__file__).parent.parent
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("benchmarks/**/*.py"))
OPTIONAL = {"fbgemm_gpu", "torchrec"}  # benchmarks compare with them


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_imported(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/**/*.toml")), ids=lambda path: path.name)
def test_a_benchmarks_job_file_is_valid(path: Path) -> None:
    assert load_job(path).tables


BUILT: dict[str, Callable[[], Job]] = {
    "planner": lambda: planner.job(64, 3, [100, 7]),
    "gpu_check": lambda: make_job(sizes(torch.device("cpu"))[0], torch.device("cpu")),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_job_that_a_benchmark_builds_is_valid(name: str) -> None:
    assert BUILT[name]().tables
