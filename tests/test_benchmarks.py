"""Benchmarks are not run here, but each can be imported, and the jobs they build pass today's rules."""

import importlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import histories, issue, launches, parts, planner, predict_jobs, predict_runs, predict_trainer, zoo
from benchmarks.beyond_memory import job_file as beyond_memory_file
from benchmarks.gpu_check.jobs import make_job, sizes
from benchmarks.nominal_rows import job_file as nominal_rows_file
from rowcast.job.file import load_job, parse_job
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job

ROOT = Path(__file__).parent.parent
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("benchmarks/**/*.py"))
OPTIONAL = {"fbgemm_gpu", "torchrec", "matplotlib"}  # benchmarks compare with them, or draw with them


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


def by(build: Callable[..., Job], *arguments: object) -> Callable[[Path], Job]:
    return lambda folder: build(*arguments)


def with_rows(kind: str) -> Callable[[Path], Job]:
    return lambda folder: zoo.job_of(kind, folder, [100] * 26, 0)


def with_histories(kind: str, log: str) -> Callable[[Path], Job]:
    def build(folder: Path) -> Job:
        columns = histories.LOGS[log]
        rows = dict.fromkeys((columns.item, *columns.items, *columns.users), 100)
        return parse_job(histories.job_content(kind, columns, rows, folder / "data.parquet"))

    return build


def forced(name: str) -> Callable[[Path], Job]:
    return lambda folder: written(
        folder, {**predict_runs.JOB, **predict_runs.FORCED[name].settings, "job.run_dir": "unused"}
    )


def written(folder: Path, settings: dict[str, object]) -> Job:
    path = folder / "job.toml"
    path.write_text("".join(predict_runs.sections(settings)))
    return load_job(path)


def drawn(seed: int) -> Callable[[Path], Job]:
    settings, _, _ = predict_jobs.random_settings(random.Random(seed), [64, 128])
    return lambda folder: written(folder, {**settings, "cache.capacity": "1MiB", "job.run_dir": "unused"})


def drawn_for_the_trainer(seed: int) -> Job:
    return predict_trainer.random_job(random.Random(seed))[0]


BUILT: dict[str, Callable[[Path], Job]] = {
    **{
        f"launches {model}, {optimizer}, {pooling}": by(launches.job_of, model, optimizer, pooling)
        for model in launches.DIMS
        for optimizer in ROW_OPTIMIZERS
        for pooling in ("sum", "mean")
    },
    **{f"issue {groups}": by(issue.job_of, groups, 64, 3) for groups in issue.WIDTHS},
    **{f"zoo {kind}": with_rows(kind) for kind in zoo.MODELS},
    **{f"histories {kind} {log}": with_histories(kind, log) for kind in ("din", "two-tower") for log in histories.LOGS},
    **{f"predict_runs {name}": forced(name) for name in predict_runs.FORCED},
    "parts": by(parts.checkpoint_job, 100),
    "planner": by(planner.job, 64, 3, [100, 7]),
    **{f"predict_jobs {seed}": drawn(seed) for seed in range(20)},
    **{f"predict_trainer {seed}": by(drawn_for_the_trainer, seed) for seed in range(20)},
    "gpu_check": by(make_job, sizes(torch.device("cpu"))[0], torch.device("cpu")),
    "nominal_rows": lambda folder: load_job(nominal_rows_file(folder, [100] * 26, 3)),
    "beyond_memory": lambda folder: load_job(beyond_memory_file(folder, 1 << 30, 3, 0)),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_job_that_a_benchmark_builds_is_valid(name: str, tmp_path: Path) -> None:
    assert BUILT[name](tmp_path).tables
