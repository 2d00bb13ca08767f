"""Benchmarks are not run here, but each can be imported, the jobs they build pass today's rules, and what they count is
right."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cliffs, planner, rank_steps, start
from benchmarks.gpu_check.jobs import make_job, sizes
from benchmarks.mutations.__main__ import placed
from benchmarks.mutations.mutants import MUTANTS
from benchmarks.processes import LAUNCHER, processor_s
from benchmarks.training import by_batch
from benchmarks.training.paged import PagedRows
from benchmarks.training.steady import Turn
from benchmarks.training.stock import Rows, StockRows
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Batch

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


def test_the_processor_time_of_prefetchers_is_read_by_thread(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(rank_steps.NAMES_THREADS)
    spin = """if True:
        import threading, time
        def run():
            while time.thread_time() < 0.1: pass
            print(flush=True)
            time.sleep(60)
        threading.Thread(target=run, name="planning").start()"""
    command = [sys.executable, "-c", spin, "rowcast.prefetcher"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = rank_steps.threads_of(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert found["prefetcher: planning"][0] >= 100


def test_a_step_of_all_ranks_is_the_sum_of_its_threads() -> None:
    rounds = [rank_steps.per_step({"prefetcher: mail": (1, 1)}, {"prefetcher: mail": (9, 5)}, steps=2)]
    *_, rank, _, total = rank_steps.table({"here, ranks: 4": rounds}, [4])
    assert rank == "| prefetcher, a rank | 1.00 (0.5) |"
    assert total == "| all | 4.00 (2.0) |"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_the_loop_that_pages_in_trains_the_rows_of_stock(tmp_path: Path) -> None:
    """Rows that a batch touches several times are updated once."""
    settings = ('optimizer.sparse.kind="adagrad"', "tables_from.cardinalities=[5,3,400]", "tables_from.embedding_dim=4")
    job = load_job(ROOT / "benchmarks" / "jobs" / "tiny.toml", (*settings, "model.bottom_mlp=[4]"))
    both: tuple[Rows, Rows] = (StockRows(job, torch.device("cpu")), PagedRows(job, tmp_path / "rows"))
    rng = np.random.default_rng(3)
    for _ in range(3):
        ids = rng.integers(0, [[5], [3], [400]], (3, 16))
        batch = Batch(dense=np.zeros((16, 1), np.float32), labels=np.zeros(16, np.float32), ids=ids.ravel())
        stock, paged = (torch.stack(list(rows.look_up(batch))) for rows in both)
        torch.testing.assert_close(paged, stock)
        for own, rows in zip((stock, paged), both, strict=True):
            torch.autograd.backward((own**2).sum())
            rows.update()


def test_processor_time_is_compared_per_sample() -> None:
    def turn(seconds: float, samples: float) -> Turn:
        return Turn(wall_s=1.0, samples=samples, waited_s=0.0, spent={"trainer": seconds, "prefetcher": seconds})

    found = {16: {"rowcast": [turn(0.1, 160)] * 2, "stock": [turn(0.1, 320)] * 2}}
    printed = "\n".join(by_batch.lines(found))
    assert "| rowcast | 20.00 (" in printed
    assert "| rowcast over stock | 2.00 (" in printed


@pytest.mark.parametrize("widths", cliffs.WIDTHS.values(), ids=cliffs.WIDTHS)
def test_a_job_of_many_widths_reads_the_files_that_are_written_for_it(widths: Sequence[int], tmp_path: Path) -> None:
    cliffs.write_data(tmp_path, num_samples=512)
    job = cliffs.parsed(cliffs.job_text(widths, tmp_path))
    assert [scheduled.batch.size for scheduled in islice(schedule(job, open_reader(job)), 2)] == [256, 256]


def test_the_planner_of_many_widths_plans_as_many_batches_as_are_timed() -> None:
    assert {len(of_batches) for of_batches in cliffs.planner(3).values()} == {3}


def test_rows_are_touched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cliffs, "TOUCHED", 100)
    assert len(cliffs.rows(2)) == 8


def test_every_mutant_has_its_line_of_the_product_and_its_test() -> None:
    found, stale = placed(MUTANTS)
    assert not stale
    assert len(found) == len(MUTANTS)
