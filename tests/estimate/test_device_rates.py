"""A rates file of a made-up device, and the time of a step according to it."""

from pathlib import Path

import msgspec
import pytest

from rowcast.analysis.estimate.device_rates import (
    RATES_VERSION,
    DeviceRates,
    HostRates,
    KernelRates,
    ModelRates,
    model_fingerprint,
    read_rates,
)
from rowcast.analysis.estimate.step_kernels import GroupCounts, StepCounts, model_calls, step_seconds
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError, DataError

KERNELS = (
    "copy in", "gather", "scatter", "copy out", "lookup", "update adagrad", "linear forward", "linear backward",
    "first linear backward", "interaction forward", "interaction backward", "loss forward", "loss backward",
    "dense sgd",
)  # fmt: skip


def job(kind: str = "dlrm") -> Job:
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": {"format": "synthetic", "batch_size": 8, "synthetic": {"preset": "criteo-kaggle", "scale": 0.001}},
            "tables_from": {"embedding_dim": 4},
            "model": {"kind": kind, "bottom_mlp": [16, 4], "top_mlp": [8, 1]},
            "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1MiB"},
        }
    )


def line(**measured: tuple[float, float]) -> KernelRates:
    return KernelRates(terms={"1": 2.0, "rows*dim": 3.0}, measured=measured, samples=9)


def rates(kernels: dict[str, KernelRates], **changes: object) -> DeviceRates:
    made = DeviceRates(
        version=RATES_VERSION, machine="made up", device="cpu", clock="cpu", torch="2", threads=1, probe=0.01,
        kernels=kernels, host=HostRates(per_step=100.0, per_lookup=0.5),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def calls_only(kernels: tuple[str, ...] = KERNELS) -> DeviceRates:
    """Every kernel takes one second whatever its counts."""
    return rates({name: KernelRates(terms={"1": 1.0}, measured={}, samples=1) for name in kernels})


COUNTS = StepCounts(batch=8, plan_bytes=64, groups=(GroupCounts(lookups=208, rows=90, fetched=20, written_back=10),))


def test_terms_are_summed_over_their_counts() -> None:
    found = rates({"lookup": line(rows=(1, 10))})
    assert found.seconds("lookup", rows=5, dim=4) == (2.0 + 3.0 * 20, True)
    assert found.seconds("lookup", rows=11, dim=4) == (2.0 + 3.0 * 44, False)


def test_a_table_has_its_points_and_is_interpolated_by_logarithm() -> None:
    table = KernelRates(
        axes={"batch": [1, 4], "inputs": [1, 16]}, table=[1.0, 4.0, 8.0, 32.0], measured={"batch": (1, 4)}, samples=4
    )
    assert table.seconds({"batch": 4, "inputs": 1}) == pytest.approx(8)
    assert table.seconds({"batch": 2, "inputs": 1}) == pytest.approx(8**0.5)
    assert table.seconds({"batch": 4, "inputs": 4}) == pytest.approx(16)


def test_beyond_a_table_the_time_grows_in_proportion() -> None:
    table = KernelRates(axes={"batch": [1, 4]}, table=[1.0, 8.0], measured={"batch": (1, 4)}, samples=2)
    assert table.seconds({"batch": 8}) == pytest.approx(16)
    assert table.seconds({"batch": 0.5}) == pytest.approx(1)


def test_a_step_calls_every_kernel_of_its_job() -> None:
    found = step_seconds(calls_only(), job(), group_specs(job()), 13, COUNTS)
    model_and_rows = 4 + 4 + 2 + 2 + 1 + 2  # linear forward, backward, interaction, loss, optimizer, look-up and update
    assert found.tasks == {"copy in": 2, "fill": 2, "exchange": 0, "copy out": 1, "step": model_and_rows}
    assert found.host == 100 + 0.5 * 208


def test_weights_are_counted_as_the_model_has_them() -> None:
    pytest.importorskip("torch")
    from rowcast.trainer.models import build_model

    for kind in ("dlrm", "dcnv2"):
        weights = list(build_model(job(kind), 13).parameters())
        (optimizer,) = (call.counts for call in model_calls(job(kind), 13, COUNTS) if call.kernel == "dense sgd")
        assert optimizer == {"tensors": len(weights), "parameters": sum(weight.numel() for weight in weights)}


def test_a_measured_model_counts_instead_of_its_kernels() -> None:
    without_model = tuple(name for name in KERNELS if "linear" not in name and "interaction" not in name)
    own = ModelRates(
        fingerprint=model_fingerprint(job()), batch=[4, 16], forward=[10.0, 40.0], backward=[20.0, 80.0],
        update=[5.0, 5.0], tensors=4, parameters=100,
    )  # fmt: skip
    found = step_seconds(
        msgspec.structs.replace(calls_only(without_model), model=own), job(), group_specs(job()), 13, COUNTS
    )
    assert found.tasks["step"] == pytest.approx(20 + 40 + 5 + 2)


def test_a_model_that_nobody_measured_is_refused() -> None:
    compiled = msgspec.structs.replace(job(), model=msgspec.structs.replace(job().model, compile=True))
    with pytest.raises(ConfigError, match="trainer rates --config"):
        step_seconds(calls_only(), compiled, group_specs(job()), 13, COUNTS)


def test_a_kernel_that_is_not_in_the_file_is_named() -> None:
    with pytest.raises(ConfigError, match="no kernel gather"):
        rates({"lookup": line(rows=(1, 10))}).seconds("gather", rows=1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = seal(rates({"lookup": line(rows=(1, 10))}))
    (tmp_path / "rates.json").write_bytes(render(made))
    assert read_rates(tmp_path / "rates.json") == made


def test_another_version_and_a_missing_file_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_bytes(render(seal(rates({}, version=99))))
    with pytest.raises(DataError, match=f"version 99, but this version reads {RATES_VERSION}"):
        read_rates(tmp_path / "rates.json")
    with pytest.raises(ConfigError, match="trainer rates --out"):
        read_rates(tmp_path / "none.json")
