"""Chooses the kernels for a device; imports Triton and numba only if they are used."""

import subprocess
import time

import torch

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow
from rowcast.trainer.kernels import Kernels, torch_ops
from rowcast.trainer.kernels.self_check import difference

WORTH_SAYING_S = 2.0


def choose_kernels(device: torch.device, job: Job | None = None) -> Kernels:
    """The fastest kernels that this installation has for `device`.

    Warns and falls back to plain torch operations if those kernels cannot be used or have wrong bits. Kernels for a CPU
    are checked on the job's tables, if a job is given.
    """
    if device.type == "cuda":
        return triton_kernels(device, job)
    return compiled_kernels(job) if device.type == "cpu" else torch_ops


def compiled_kernels(job: Job | None) -> Kernels:
    began_s = time.perf_counter()
    with said_if_slow(WORTH_SAYING_S, "preparing the kernels; a first start compiles them: about 10 s"):
        from rowcast.trainer.kernels.compiled_ops import CompiledOps  # imports numba, which only a CPU needs

        chosen: Kernels = CompiledOps(torch.get_num_threads())
        if job is not None:
            chosen = checked(chosen, job)
    seconds = time.perf_counter() - began_s
    if seconds > WORTH_SAYING_S:
        get_logger().info("prepared the kernels; their first start compiles them", seconds=round(seconds, 1))
    return chosen


def checked(kernels: Kernels, job: Job) -> Kernels:
    found = difference(kernels, group_specs(job), job.optimizer.sparse)
    if found is None:
        return kernels
    get_logger().warning(
        "compiled kernels have other bits than torch here, so plain torch operations serve, which are slower",
        differ=found,
    )
    return torch_ops


def triton_kernels(device: torch.device, job: Job | None) -> Kernels:
    """Triton's kernels, if Triton can build its launcher here: that takes a C compiler and Python's headers."""
    try:
        from rowcast.trainer.kernels import triton_ops

        triton_ops.make_launcher()
        triton_ops.check_dims(() if job is None else [table.embedding_dim for table in job.tables])
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        get_logger().warning(
            "kernels in plain torch operations, which are slower", device=str(device), cause=str(error)
        )
        return torch_ops
    return triton_ops
