"""Benchmarks are not run here, but each can be imported, the jobs they build pass today's rules, and what they count is
right."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import planner, start
from benchmarks.gpu_check.jobs import make_job, sizes
from benchmarks.processes import LAUNCHER, processor_s
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


@pytest.mark.parametrize("write", [start.write_npy, start.write_bags])
def test_a_job_whose_start_is_measured_is_valid(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert load_job(write(tmp_path)).tables


def test_two_trees_are_compared_round_by_round() -> None:
    found = {"here": {"trainer": [2.0, 6.0]}, "before": {"trainer": [4.0, 4.0]}}
    *_, line = start.table("warm", found).splitlines()
    assert line.split(" | ")[-1].startswith("1.00 (")  # 0.5 and 1.5


def test_the_processor_time_of_a_group_is_that_of_its_processes() -> None:
    spin = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = processor_s(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert found[LAUNCHER] >= 0.1
    assert sum(found.values()) == found[LAUNCHER]
