"""Exports and imports of fp16 and bf16 rows: safetensors names each dtype, and weights take the table's dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.export import DTYPES as WORDS
from rowcast.prefetcher.checkpoints.export import export_run, table_tensors
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.trainer.kernels import DTYPES
from tests.support.batches import NUM_DENSE, small_job
from tests.support.driver import start_state
from tests.support.facts import facts
from tests.support.full_capacity import bits

ALL: tuple[RowType, ...] = ("fp32", "fp16", "bf16")
WITH_MASTER = [(dtype, master) for dtype in ALL for master in (False, True) if not (dtype == "fp32" and master)]
OF_WORDS = {words: DTYPES[dtype] for dtype, words in WORDS.items()}
WEIGHT, MASTER = "embedding_bags.wide_a.weight", "optimizer.wide_a.master"


def job_of(folder: Path, dtype: RowType, *, master: bool = False, optimizer: str = "adagrad") -> Job:
    job = {"run_dir": str(folder)}
    data = {"format": "synthetic", "synthetic": {"samples": 100}}
    return small_job(optimizer, dtypes=(dtype,) * 4, master=master, job=job, data=data)


def content_of(job: Job) -> dict[str, Tensor]:
    """Random rows and state, in the job's dtypes; weights are not those that the master weights round to."""
    generator = torch.Generator().manual_seed(1)
    specs = table_tensors(group_specs(job))
    content = {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    squares = ("sum", "exp_avg_sq")
    return {
        name: (own.abs() if name.endswith(squares) else own).to(OF_WORDS[specs[name].dtype])
        for name, own in content.items()
    }


def imported(job: Job, content: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """What an export gives of an import of `content`."""
    save_file(content, folder / "in")
    import_run(job, folder / "in", fresh=False)
    export_run(job.run_dir, folder / "out")
    return load_file(folder / "out")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize(("dtype", "master"), WITH_MASTER)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_an_export_of_an_import_is_the_file_that_was_imported(
    dtype: RowType, optimizer: str, master: bool, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", dtype, optimizer=optimizer, master=master)
    content = content_of(job)
    assert (MASTER in content) == master
    assert content[WEIGHT].dtype == DTYPES[dtype]
    assert_equal(imported(job, content, tmp_path), content)


@pytest.mark.parametrize("dtype", ALL[1:])
def test_an_export_before_training_holds_rounded_values_and_unrounded_masters(dtype: RowType, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", dtype, master=True)
    weights = {
        name: tensor
        for name, tensor in start_state(job, NUM_DENSE).items()
        if name.startswith(("embedding_bags.", "optimizer."))
    }
    assert_equal(imported(job, weights, tmp_path), weights)
    assert torch.equal(weights[MASTER].to(DTYPES[dtype]), weights[WEIGHT])


@pytest.mark.parametrize("found", ALL)
@pytest.mark.parametrize(("needed", "master"), WITH_MASTER)
def test_weights_of_any_dtype_become_the_tables_own(
    found: RowType, needed: RowType, master: bool, tmp_path: Path
) -> None:
    """Master weights that the file has not are its weights, unrounded."""
    weights = content_of(job_of(tmp_path / "unused", found, optimizer="sgd"))
    result = imported(job_of(tmp_path / "run", needed, optimizer="sgd", master=master), weights, tmp_path)
    expected = {name: tensor.to(DTYPES[needed]) for name, tensor in weights.items()}
    if master:
        tables = [(name, name.split(".")[1]) for name in weights]
        expected |= {f"optimizer.{table}.master": weights[name].float() for name, table in tables}
    assert_equal(result, expected)


@pytest.mark.parametrize("value", [65505.0, -1e30])
def test_a_weight_that_the_dtype_cannot_hold_is_refused_before_anything_is_made(value: float, tmp_path: Path) -> None:
    content = content_of(job_of(tmp_path / "unused", "fp32"))
    content[WEIGHT][7, 3] = value
    job = job_of(tmp_path / "run", "fp16")
    with pytest.raises(ConfigError, match=facts(WEIGHT, 65504, "fp16")):
        imported(job, content, tmp_path)
    assert not job.run_dir.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((WEIGHT, value) for value in (float("inf"), float("-inf"), float("nan"))),
        *(("optimizer.wide_a.sum", value) for value in (float("inf"), float("nan"), -1e6)),
    ],
)
def test_rows_of_a_file_that_are_not_finite_or_have_impossible_state_are_refused(
    name: str, value: float, tmp_path: Path
) -> None:
    content = content_of(job_of(tmp_path / "unused", "fp32"))
    content[name][7, 2] = value
    field = name.removeprefix("optimizer.wide_a.") if "optimizer" in name else "weight"
    with pytest.raises(DataError, match=facts("row 7 of table wide_a", f"{field}[2]", str(value))):
        imported(job_of(tmp_path / "run", "bf16"), content, tmp_path)


def test_state_of_half_precision_is_refused_and_both_dtypes_are_named(tmp_path: Path) -> None:
    content = content_of(job_of(tmp_path / "unused", "bf16"))
    content["optimizer.wide_a.sum"] = content["optimizer.wide_a.sum"].bfloat16()
    with pytest.raises(ConfigError, match=facts("optimizer.wide_a.sum", "BF16 [300, 8]", "F32 [300, 8]")):
        imported(job_of(tmp_path / "run", "bf16"), content, tmp_path)


def test_master_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    content = content_of(job_of(tmp_path / "unused", "bf16", master=True))
    with pytest.raises(ConfigError, match=r"optimizer\.\w+\.master; add its table"):
        imported(job_of(tmp_path / "run", "bf16"), content, tmp_path)
