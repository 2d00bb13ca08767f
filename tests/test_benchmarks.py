"""Benchmarks are not run here, but each can be imported, and the jobs they build pass today's rules."""

import importlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import estimate_jobs, issue, launches, parts, planner, step_bytes, zoo
from benchmarks.beyond_memory import job_file as beyond_memory_file
from benchmarks.gpu_check.jobs import Size, make_job, sizes
from rowcast.job.file import load_job
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


def written(folder: Path, settings: dict[str, object]) -> Job:
    path = folder / "job.toml"
    path.write_text("".join(estimate_jobs.sections(settings)))
    return load_job(path)


def drawn(seed: int) -> Callable[[Path], Job]:
    settings, _, _ = estimate_jobs.random_settings(random.Random(seed), [64, 128])
    return lambda folder: written(folder, {**settings, "cache.capacity": "1MiB", "job.run_dir": "unused"})


BUILT: dict[str, Callable[[Path], Job]] = {
    **{
        f"launches {model}, {optimizer}, {pooling}": by(launches.job_of, model, optimizer, pooling)
        for model in launches.DIMS
        for optimizer in ROW_OPTIMIZERS
        for pooling in ("sum", "mean")
    },
    **{f"issue {groups}": by(issue.job_of, groups, 64, 3) for groups in issue.WIDTHS},
    **{f"zoo {kind}": with_rows(kind) for kind in zoo.MODELS},
    "parts": by(parts.checkpoint_job, 100),
    "planner": by(planner.job, 64, 3, [100, 7]),
    **{f"estimate_jobs {seed}": drawn(seed) for seed in range(20)},
    "gpu_check": by(make_job, sizes(torch.device("cpu"))[0], torch.device("cpu")),
    "beyond_memory": lambda folder: load_job(beyond_memory_file(folder, 1 << 30, 3, 0)),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_job_that_a_benchmark_builds_is_valid(name: str, tmp_path: Path) -> None:
    assert BUILT[name](tmp_path).tables


def test_bytes_of_a_step_are_those_of_its_operators_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(batch_size=64, steps=1, dim=8, scale=1e-4, bottom_mlp=(8,), top_mlp=(1,))
    monkeypatch.setattr(step_bytes, "SIZE", size)
    vectors = 4 * 27 * 64 * 8  # bytes of the bottom output and 26 features
    bmm, fused = step_bytes.count_bytes("bmm"), step_bytes.count_bytes("fused")
    assert bmm["stack"] == 2 * vectors
    products, result = 4 * 64 * 27 * 27, 4 * 64 * (8 + 351)
    # the product; and of its gradient with the vectors, once for each of its two inputs
    assert bmm["bmm"] == 3 * (2 * vectors + products)
    kernels = {"look-up kernel", "update kernels", "interaction, forward", "interaction, backward"}
    assert set(fused) == kernels, "no operator beside the kernels"
    assert fused["interaction, forward"] + fused["interaction, backward"] == 3 * vectors + 2 * result
    assert {name: bmm[name] for name in kernels & set(bmm)} == {name: fused[name] for name in kernels & set(bmm)}
