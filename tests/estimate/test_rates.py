"""`trainer rates`: fits to made-up times, and that every kernel a step calls is measured. No time is asserted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rowcast.analysis.estimate.device_rates import model_fingerprint, read_rates
from rowcast.analysis.estimate.rates import host, kernel, layers, parts, rows, stopwatch
from rowcast.analysis.estimate.rates.exchange import exchange_kernels
from rowcast.analysis.estimate.rates.fit import Sample, fitted, not_below_zero, tabulated
from rowcast.analysis.estimate.rates.kernel import ROUNDS, Kernel, Shape, measured
from rowcast.analysis.estimate.rates.layers import shapes
from rowcast.analysis.estimate.rates.measure import measure, write_rates
from rowcast.analysis.estimate.rates.model import model_rates
from rowcast.analysis.estimate.rates.parts import part_kernels
from rowcast.analysis.estimate.rates.rows import RowShapes
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.analysis.estimate.step_kernels import GroupCounts, StepCounts, step_seconds
from rowcast.command_line.trainer import app
from rowcast.job.file import parse_job
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.jobs import laid_over

CPU = torch.device("cpu")
COUNTS = StepCounts(batch=16, plan_bytes=64, groups=(GroupCounts(lookups=416, rows=90, fetched=20, written_back=10),))


def job(**changes: Any) -> Job:
    content = {
        "job": {"run_dir": "unused"},
        "data": {"format": "synthetic", "synthetic": {"preset": "criteo-kaggle", "scale": 0.001}},
        "tables_from": {"embedding_dim": 4},
        "model": {"kind": "dlrm", "bottom_mlp": [16, 4], "top_mlp": [8, 1]},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "1MiB"},
    }
    return parse_job(laid_over(content, changes))


def test_a_fit_finds_the_rates_that_made_the_times() -> None:
    rng = np.random.default_rng(3)
    samples = [
        Sample({"rows": rows, "dim": dim}, 2.0 + 3e-3 * rows + 5e-4 * rows * dim)
        for rows, dim in rng.integers(1, 1000, (40, 2)).astype(float).tolist()
    ]
    found = fitted(samples, ("1", "rows", "rows*dim"))
    assert found.terms == pytest.approx({"1": 2.0, "rows": 3e-3, "rows*dim": 5e-4})
    assert found.errors is not None
    assert found.errors.worst < 1e-6
    assert found.measured["dim"] == (
        min(own.counts["dim"] for own in samples),
        max(own.counts["dim"] for own in samples),
    )


def test_no_rate_is_below_zero() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        factors = rng.random((12, 3))
        found = not_below_zero(factors, rng.random(12))
        assert (found >= 0).all()
        assert found.any()


BETWEEN = {"batch": 4.0, "inputs": 2.0}


def test_a_table_has_the_times_of_its_points_and_is_judged_between_them() -> None:
    def seconds(counts: dict[str, float]) -> float:
        return counts["batch"] ** 2 * counts["inputs"]

    axes = {"batch": (2, 8, 32), "inputs": (1, 4)}
    grid, between = ([Sample(own, seconds(own)) for own in points] for points in (shapes(**axes), [BETWEEN]))
    found = tabulated(axes, grid, between)
    assert found.seconds({"batch": 8.0, "inputs": 4.0}) == pytest.approx(256.0)
    assert found.errors is not None
    assert found.errors.worst < 1e-3, "a power law is a straight line between logarithms"


def test_a_time_in_which_the_machine_was_slow_falls_on_no_kernel() -> None:
    calls = 0

    def seconds() -> float:
        nonlocal calls
        calls += 1
        return 0.1 if 3 <= calls < 11 else 1e-3  # eight shapes in a row, of two kernels with eight shapes each

    kernels = [
        Kernel(name=name, shapes=[Shape({"rows": rows}, seconds) for rows in map(float, range(8))], terms=("1",))
        for name in ("lookup", "gather")
    ]
    found = measured(kernels)
    assert [rates.terms for rates in found.values()] == 2 * [{"1": pytest.approx(1e-3)}]
    assert calls == 2 * 8 * ROUNDS


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stopwatch.SWEPT_BYTES, "cpu", 4096)
    monkeypatch.setattr(stopwatch, "REPEATS", 1)
    monkeypatch.setattr(stopwatch, "MOST_REPEATS", 1)
    monkeypatch.setitem(layers.BATCHES, "cpu", (8, 16))
    monkeypatch.setitem(layers.BETWEEN, "cpu", (10, 12))
    for name in ("INPUTS", "OUTPUTS", "FIRST_INPUTS", "FIRST_OUTPUTS"):
        monkeypatch.setattr(layers, name, (2, 4))
    monkeypatch.setattr(kernel, "ROUNDS", 1)
    monkeypatch.setattr(host, "STEPS", 6)
    monkeypatch.setattr(host, "WARM_STEPS", 2)
    monkeypatch.setattr(host, "BATCHES", (8, 64))
    small = RowShapes(
        dims=(4, 8), batches=(16, 32), shares=(0.5,), moved_rows=(8, 16), record_floats=(8, 16), copied_bytes=(64, 256)
    )
    monkeypatch.setitem(rows.SHAPES, "cpu", small)


def test_every_kernel_of_a_counted_step_is_measured(small_shapes: None, tmp_path: Path) -> None:
    own = job(model={"kind": "dcnv2", "cross_rank": 3})
    found = measure(CPU, 1, own, 13)
    assert found.host.per_step >= 0
    assert found.model is not None
    assert found.model.fingerprint == model_fingerprint(own)
    write_rates(found, tmp_path / "rates.json")
    rates = read_rates(tmp_path / "rates.json")
    assert rates.kernels == found.kernels
    for kind in ("dlrm", "dcnv2"):
        for sparse in ROW_OPTIMIZERS:
            for dense in ("sgd", "adagrad", "adam", "adamw"):
                optimizer = {"sparse": {"kind": sparse, "lr": 0.1}, "dense": {"kind": dense, "lr": 0.1}}
                counted = job(optimizer=optimizer, model={"kind": kind})
                seconds = step_seconds(rates, counted, group_specs(counted), 13, COUNTS)
                assert all(of_task >= 0 for of_task in seconds.tasks.values())
                assert seconds.tasks["step"] > 0


def test_a_model_of_sequences_is_refused() -> None:
    tables = [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["a"], "pooling": "none"}]
    own = job(
        tables=tables, tables_from=None, model={"kind": "tests.system.odd_models:dropout_model", "bottom_mlp": []}
    )
    with pytest.raises(ConfigError, match=facts("table t", 'pooling = "none"', "time")):
        model_rates(Stopwatch(CPU, 1), own, 13, (8,))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "rates.json"):
        found = CliRunner().invoke(app, ["rates", f"--out={path}"])
        assert found.exit_code == 2
        assert "cannot be written; name a file in a folder that exists" in " ".join(found.output.split())


def test_exchanges_are_measured_between_as_many_processes_as_a_host_has_ranks() -> None:
    found = exchange_kernels(CPU, job(ranks={"count": 4, "per_host": 2}), 12.5)
    assert found["exchange"].samples == 8
    assert min(found["exchange"].table) > 0
    assert found["exchange"].covers({"bytes": 0.0})
    assert found["network"].seconds({"bytes": 12.5e9}) == pytest.approx(1.0)
    assert exchange_kernels(CPU, job(ranks={"parts": 4}), None) == {}


def test_sums_over_parts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARAMETERS", (1000, 10_000))
    found = part_kernels(Stopwatch(CPU, 1, cold=False))["dense sums"]
    assert found.samples == 3 * 3 * 2
    assert found.seconds({"parts": 4.0, "tensors": 24.0, "parameters": 10_000.0}) > 0


def test_an_exchange_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ConfigError, match=facts("2 processes", "rank 0 of 2")):
        exchange_kernels(CPU, job(ranks={"count": 2}), None)
