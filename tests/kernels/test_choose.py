"""Which kernels a device gets."""

import subprocess
import sys

import pytest
import torch

from rowcast.trainer import kernels
from rowcast.trainer.kernels import torch_ops
from rowcast.trainer.kernels.choose import choose_kernels
from tests.support.full_capacity import make_job


def test_a_cuda_device_gets_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")
    monkeypatch.setattr(triton_ops, "make_launcher", lambda: None)
    assert choose_kernels(torch.device("cuda", 0)) is triton_ops


@pytest.mark.parametrize("cause", [RuntimeError("Failed to find C compiler."), subprocess.CalledProcessError(1, "gcc")])
def test_a_cuda_device_whose_launcher_cannot_be_made_gets_torch_and_a_warning(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")

    def fail() -> None:
        raise cause

    monkeypatch.setattr(triton_ops, "make_launcher", fail)
    assert choose_kernels(torch.device("cuda", 0)) is torch_ops
    said = capsys.readouterr()
    assert (said.out + said.err).count("kernels in plain torch operations") == 1


def test_a_cuda_device_with_rows_too_wide_for_triton_gets_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")
    monkeypatch.setattr(triton_ops, "make_launcher", lambda: None)
    tables = [{"name": "wide", "num_embeddings": 9, "embedding_dim": 1025, "features": ["a"]}]
    job = make_job(tables, model={"bottom_mlp": [1025], "top_mlp": [1]})
    assert choose_kernels(torch.device("cuda", 0), job) is torch_ops
    said = capsys.readouterr()
    assert "rows of 1025 columns" in said.out + said.err


def test_a_cuda_device_without_triton_gets_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton_ops", "triton_kernels", "triton_code"):
        monkeypatch.delitem(sys.modules, f"trainer.kernels.{name}", raising=False)
        monkeypatch.delattr(kernels, name, raising=False)
    assert choose_kernels(torch.device("cuda", 0)) is torch_ops
    said = capsys.readouterr()
    assert (said.out + said.err).count("kernels in plain torch operations") == 1


def test_torch_s_defaults_change_no_choice() -> None:
    job = make_job([{"name": "a", "num_embeddings": 9, "embedding_dim": 4, "features": ["a"]}])
    torch.set_default_dtype(torch.float64)
    try:
        assert choose_kernels(torch.device("cpu"), job) is not torch_ops
    finally:
        torch.set_default_dtype(torch.float32)
