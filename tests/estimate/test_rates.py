"""`trainer rates` and its file: fits to made-up times, and that every kernel a step calls is measured. No time is
asserted."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rowcast.analysis.estimate import measure as measuring
from rowcast.analysis.estimate import overheads as overheads_of
from rowcast.analysis.estimate.estimate import OF_HOST
from rowcast.analysis.estimate.measure import ROUNDS, KernelShape, Stopwatch, measure, measured, model_shapes
from rowcast.analysis.estimate.overheads import BATCHES, HostSeconds, exchange_kernels, overheads, seconds_of
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.rates_file import (
    OVERHEADS,
    RATES_VERSION,
    KernelRates,
    KernelSample,
    fitted,
    not_below_zero,
    read_rates,
)
from rowcast.command_line.trainer import app
from rowcast.job.file import parse_job
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError, DataError
from tests.support import made_up_device
from tests.support.facts import facts
from tests.support.jobs import laid_over
from tests.support.made_up_timeline import recording, span

CPU = torch.device("cpu")
SIZES = [float(nbytes) for nbytes in range(1, 9)]


def job(**changes: Any) -> Job:
    content = {
        "job": {"run_dir": "unused"},
        "data": {"format": "synthetic", "batch_size": 16, "synthetic": {"preset": "criteo-kaggle", "scale": 0.001}},
        "tables_from": {"embedding_dim": 4},
        "model": {"kind": "dlrm", "bottom_mlp": [16, 4], "top_mlp": [8, 1]},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "600 rows"},
    }
    return parse_job(laid_over(content, changes))


def test_a_fit_finds_the_rates_that_made_the_times() -> None:
    rng = np.random.default_rng(3)
    samples = [
        KernelSample({"rows": rows, "dim": dim}, 2.0 + 3e-3 * rows + 5e-4 * rows * dim)
        for rows, dim in rng.integers(1, 1000, (40, 2)).astype(float).tolist()
    ]
    found = fitted(samples, ("1", "rows", "rows*dim"))
    assert found.terms == pytest.approx({"1": 2.0, "rows": 3e-3, "rows*dim": 5e-4})
    assert found.error == pytest.approx(0.0, abs=1e-6)
    dims = [own.counts["dim"] for own in samples]
    assert found.measured["dim"] == (min(dims), max(dims))
    assert found.seconds({"rows": 4.0, "dim": 2.0}) == pytest.approx(2.0 + 12e-3 + 4e-3)
    assert not found.covers({"rows": 4.0, "dim": 1001.0})


def test_no_rate_is_below_zero() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        factors = rng.random((12, 3))
        found = not_below_zero(factors, rng.random(12))
        assert (found >= 0).all()
        assert found.any()


def test_a_time_in_which_the_machine_was_slow_falls_on_no_kernel() -> None:
    calls = 0

    def seconds() -> float:
        nonlocal calls
        calls += 1
        return 0.1 if 3 <= calls < 11 else 1e-3  # eight shapes in a row, of two kernels with eight shapes each

    shapes = [KernelShape(name, {"bytes": nbytes}, seconds) for name in ("copy in", "copy out") for nbytes in SIZES]
    assert [own.seconds({"bytes": 8.0}) for own in measured(shapes).values()] == 2 * [pytest.approx(1e-3)]
    assert calls == 2 * 8 * ROUNDS


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measuring.SWEPT_BYTES, "cpu", 4096)
    for module, names in (
        (measuring, {"REPEATS": 1, "MOST_REPEATS": 1, "ROUNDS": 1, "MOVED_ROWS": (8, 16), "COPIED_BYTES": (64, 256)}),
        (measuring, {"overheads": lambda *_: dict.fromkeys(OVERHEADS, KernelRates(terms={"1": 0.0}))}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("sparse", ROW_OPTIMIZERS)
def test_every_kernel_of_a_step_is_measured_and_its_overhead_by_type(
    small_shapes: None, sparse: str, tmp_path: Path
) -> None:
    own = job(
        model={"kind": "dcnv2", "cross_rank": 3}, optimizer={"sparse": {"kind": sparse, "lr": 0.1}}, ranks={"parts": 2}
    )
    found = measure(CPU, 1, own, 13)
    (tmp_path / "rates.json").write_bytes(render(seal(found)))
    rates = read_rates(tmp_path / "rates.json")
    assert rates.kernels == found.kernels
    calls = [call for planned in plan_job(own, 20)[0] for call in planned.calls if call.task not in OF_HOST]
    assert {call.kernel for call in calls} == rates.kernels.keys() - {*OVERHEADS}
    assert all(rates.seconds(call.kernel, **call.counts) >= 0 for call in calls)
    assert rates.kernels.keys() >= {*OVERHEADS}


@pytest.mark.rest  # two processes that import torch
def test_a_run_of_both_processes_tells_what_a_step_takes_besides_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads_of, "STEPS", 60)
    free = dict.fromkeys((*made_up_device.KERNELS, "update sgd"), KernelRates(terms={"1": 0.0}))
    seconds = overheads_of.spent(64, "cpu", 1, free)
    assert 0 < seconds.phases < seconds.main < 1.0, "kernels that take no time leave all of a step"
    assert min(seconds.processor, seconds.message, seconds.wait) >= 0
    assert seconds.lookups == 64 * 26


def test_processor_time_is_divided_among_types_and_a_larger_batch_tells_what_a_lookup_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {
        batch: HostSeconds(
            processor=0.008, main=0.006, phases=0.002, others=others, message=3e-4, wait=2e-4, lookups=lookups
        )
        for batch, others, lookups in zip(BATCHES, (0.002, 0.006), (100.0, 1100.0), strict=True)
    }
    monkeypatch.setattr(overheads_of, "spent", lambda batch, *_: runs[batch])
    found = {name: rates.terms for name, rates in overheads("cpu", 1, {}).items()}
    assert found.keys() == {*OVERHEADS}
    assert found["launch"] == {"1": pytest.approx(0.002)}
    assert found["Python"] == {"1": pytest.approx(0.004)}
    assert found["lock"] == {"1": pytest.approx(0.002 - 4e-6 * 100), "lookups": pytest.approx(4e-6)}
    assert (found["message"], found["wait"]) == ({"1": 3e-4}, {"1": 2e-4})


def test_seconds_count_for_the_step_that_they_end_in() -> None:
    spans = [span("work", "MainThread", "fill", 0.0, 1.0), span("work", "MainThread", "fill", 2.0, 2.5)]
    spans += [span("wait", "MainThread", "rows", 1.0, 2.0), span("work", "sender", "copy out", 0.0, 4.0)]
    found = seconds_of(recording(spans), ["MainThread"], "work", np.array([1e-3, 2e-3, 3e-3]))
    assert found.tolist() == pytest.approx([1e-3, 0.0, 0.5e-3])


def test_another_version_and_a_missing_file_are_refused_in_a_sentence(tmp_path: Path) -> None:
    other = msgspec.structs.replace(made_up_device.device(), version=99)
    (tmp_path / "rates.json").write_bytes(render(seal(other)))
    with pytest.raises(DataError, match=f"version 99, but this version reads {RATES_VERSION}"):
        read_rates(tmp_path / "rates.json")
    with pytest.raises(ConfigError, match="trainer rates --out"):
        read_rates(tmp_path / "none.json")


def test_a_model_of_sequences_is_refused() -> None:
    tables = [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["a"], "pooling": "none"}]
    own = job(
        tables=tables, tables_from=None, model={"kind": "tests.system.odd_models:dropout_model", "bottom_mlp": []}
    )
    with pytest.raises(ConfigError, match=facts("table t", 'pooling = "none"', "time")):
        list(model_shapes(Stopwatch(CPU, 1), own, 13))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "rates.json"):
        found = CliRunner().invoke(app, ["rates", f"--out={path}", "--config=examples/demo.toml"])
        assert found.exit_code == 2
        assert "cannot be written; name a file in a folder that exists" in " ".join(found.output.split())


@pytest.mark.rest  # processes that import torch
def test_exchanges_are_measured_between_as_many_processes_as_a_host_has_ranks() -> None:
    found = exchange_kernels(CPU, job(ranks={"count": 4, "per_host": 2}), 12.5)
    assert found["exchange"].samples == 8
    assert max(found["exchange"].terms.values()) > 0
    assert found["exchange"].covers({"bytes": 0.0})
    assert found["network"].seconds({"bytes": 12.5e9}) == pytest.approx(1.0)
    assert exchange_kernels(CPU, job(ranks={"parts": 4}), None) == {}


@pytest.mark.rest  # processes that import torch
def test_an_exchange_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ConfigError, match=facts("an exchange between 2 processes", "of 2 found no way")):
        exchange_kernels(CPU, job(ranks={"count": 2}), None)
