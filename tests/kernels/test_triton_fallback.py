"""Triton's kernels are tried before a run: where they fail or are wrong, torch serves; no step compiles a kernel."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from triton.runtime.errors import OutOfResources, PTXASError

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.kernels import Kernels, choose, torch_ops, triton_ops
from rowcast.trainer.kernels.choose import choose_kernels, triton_kernels
from tests.kernels.lookups import KINDS
from tests.support.facts import facts
from tests.support.full_capacity import bits, make_job, random_schedule, random_start, table, train

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
TABLES = [table("a", 7, 8, ["a"], "mean"), table("b", 30, 5, ["b", "c"]), table("d", 30, 8, ["d"])]
MODEL = {"kind": "tests.support.full_capacity:Concatenated"}
FAILURES = [
    RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    OutOfResources(262144, 232448, "shared memory"),
    PTXASError("ptxas fatal: Value 'sm_103a' is not defined for option 'gpu-name'"),
    subprocess.CalledProcessError(1, ["ptxas"]),
    AttributeError("'HIPOptions' object has no attribute 'enable_reflect_ftz'"),
    AssertionError(),
]


@pytest.fixture(autouse=True)
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: fewer rows and look-ups, and chunks so short that some rows are still long."""
    monkeypatch.setattr(choose, "NUM_ROWS", 20)
    monkeypatch.setattr(choose, "NUM_LOOKUPS", 40)
    monkeypatch.setattr("rowcast.trainer.kernels.CHUNK_LOOKUPS", 5)
    monkeypatch.setattr(triton_ops, "make_launcher", lambda: None)


def job_of(optimizer: str = "adagrad") -> Job:
    return make_job(TABLES, optimizer, MODEL)


class Launched:
    """Stands for a kernel: `launch` is called instead, with the kernel's own launch on the grid."""

    def __init__(self, kernel: Any, launch: Callable[..., None]) -> None:
        self._kernel, self._launch = kernel, launch

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launch(self._kernel[grid], *arguments, **options)


def stand_in(monkeypatch: pytest.MonkeyPatch, kernel: str, launch: Callable[..., None]) -> None:
    monkeypatch.setattr(triton_ops, kernel, Launched(getattr(triton_ops, kernel), launch))


def assert_torch_serves(job: Job, cause: str) -> None:
    """With one warning that names the cause, and training goes on with the bits of the plain loop."""
    with capture_logs() as logs:
        chosen = triton_kernels(CPU, job)
    assert chosen is torch_ops
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert warning["event"].startswith("kernels in plain torch operations")
    assert cause in warning["cause"]
    assert_trains(job, chosen)


def assert_trains(job: Job, kernels: Kernels) -> None:
    start, batches = random_start(job), random_schedule(job, ("train", "eval", "train"), lengths=(0, 3))
    plain_losses, plain = run_plain_loop(job, start, batches)
    losses, end = train(job, start, batches, kernels)
    assert losses == plain_losses
    assert all(torch.equal(bits(end[name]), bits(tensor)) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_are_right_pass_the_check(kind: str) -> None:
    with capture_logs() as logs:
        assert triton_kernels(CPU, job_of(kind)) is triton_ops
    assert not logs


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("master", [False, True])
def test_kernels_for_rounded_weights_pass_the_check(dtype: str, master: bool) -> None:
    job = make_job([{**own, "dtype": dtype} for own in TABLES], "adagrad", MODEL, master=master)
    assert triton_kernels(CPU, job) is triton_ops


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("kernel", ["lookup_kernel", "segments_kernel", "join_kernel"])
def test_a_kernel_that_fails_at_its_launch_leaves_the_work_to_torch(
    kernel: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise failure

    stand_in(monkeypatch, kernel, fail)
    assert_torch_serves(job_of(), f"{type(failure).__name__}: {failure}")


def test_a_kernel_that_does_not_compile_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Triton that lacks an operation."""
    monkeypatch.delattr("triton.language.div_rn")
    assert_torch_serves(job_of(), "div_rn")


def test_a_look_up_with_another_last_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(run: Callable[..., None], pooled: torch.Tensor, *arguments: Any, **options: Any) -> None:
        run(pooled, *arguments, **options)
        pooled *= 1 + 2**-23

    stand_in(monkeypatch, "lookup_kernel", launch)
    assert_torch_serves(job_of(), "look-ups of single look-ups in fp32_d8_adagrad differ")


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_at_another_rate_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = triton_ops.RULES[kind].scalars

    def other(rule: Any) -> Any:
        rate, constants = scalars(rule)
        return rate * 1.01, constants

    monkeypatch.setattr(triton_ops.RULES[kind], "scalars", other)
    assert_torch_serves(job_of(kind), f"updates by single look-ups in fp32_d8_{kind} differ")


def test_long_rows_that_are_not_trained_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "join_kernel", lambda run, *arguments, **options: None)
    assert_torch_serves(job_of(), "updates by single look-ups in fp32_d8_adagrad differ")


def test_an_update_that_is_not_a_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops.RULES["sgd"], "scalars", lambda rule: (float("nan"), ()))
    assert_torch_serves(job_of("sgd"), "updates by single look-ups in fp32_d8_sgd differ")


def test_a_device_that_a_kernel_has_made_unusable_ends_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    stand_in(monkeypatch, "segments_kernel", fail)
    monkeypatch.setattr(choose, "use", fail)
    with pytest.raises(ConfigError, match=facts("illegal memory access", 'trainer.kernels = "torch"')):
        triton_kernels(CPU, job_of())


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)])
def test_a_job_may_ask_for_torch_operations_and_nothing_is_tried(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "difference", None)
    monkeypatch.setattr(triton_ops, "make_launcher", None)
    job = job_of()
    asking = msgspec.structs.replace(job, trainer=msgspec.structs.replace(job.trainer, kernels="torch"))
    assert choose_kernels(device, asking) is torch_ops


@pytest.fixture(scope="module")
def variants() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.launch_variants"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_steps_launch_only_what_the_check_has_compiled(variants: list[dict[str, Any]]) -> None:
    assert [found["optimizer"] for found in variants] == list(KINDS)
    for found in variants:
        checked = set(map(tuple, found["checked"]))
        assert len(found["trained"]) == 4
        for batches, launched in found["trained"].items():
            trained = set(map(tuple, launched))
            assert {kernel for kernel, _ in trained} == {"lookup_kernel", "segments_kernel", "join_kernel"}
            assert trained <= checked, (found["optimizer"], batches)


def test_the_check_compiles_only_what_some_step_may_launch(variants: list[dict[str, Any]]) -> None:
    for found in variants:
        trained = {tuple(own) for launched in found["trained"].values() for own in launched}
        assert trained == set(map(tuple, found["checked"])), found["optimizer"]
