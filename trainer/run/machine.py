"""Sets the number of torch's threads to the run's, and warns where this machine may round differently.

first start    the job's number; `auto` is one if batches have parts, otherwise one for each usable core
restart        the number that the checkpoint records, on any machine and any number of ranks
"""

import os
from collections.abc import Mapping

import torch

from rowcast.job.schema import Job
from rowcast.protocol.messages import Mode
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import Machine, differences, processor, threads_of_run
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.device.cuda import device_name, float32_products, warm_up_sqrt
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.choose import choose_kernels

# of libraries below torch: each may choose other code, and so other bits
CHOOSES_CODE = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)


def settle(job: Job, mode: Mode, here: Machine, cores: int, recorded: Machine) -> Machine:
    """Sets torch's threads to the run's; returns the machine with this number. Warns of what differs from the
    `recorded` machine. `cores`: for each trainer of this host; in a training script, the number of threads that it has
    set. Raises ConfigError if the job or the environment has another number."""
    log = get_logger()
    threads = threads_of_run(job.trainer.threads, here.threads, recorded.threads, trains=mode == "train")
    refuse_fewer_threads(threads, os.environ)
    set_threads(threads)
    if threads != here.threads:
        log.warning(f"the run keeps its {plural(threads, 'thread')}; a new run would have {here.threads} here")
    elif mode == "eval" and recorded.threads not in (0, threads):
        log.warning(f"trainer.threads = {threads} evaluates, and the run trains with {recorded.threads}")
    elif threads < cores and job.trainer.threads == "auto" and not recorded.threads:
        log.info(f"1 of {cores} cores computes, because batches have parts; trainer.threads sets more")
    if recorded.threads and (differing := differences(recorded, here)):
        log.warning(f"may round differently than before this checkpoint: {'; '.join(differing)}")
    return Machine(threads=threads, facts=here.facts)


def prepared(job: Job, device: torch.device, cores: int) -> tuple[Kernels, Machine]:
    """Chooses the kernels, in parallel with the prefetcher's start; returns them, and this machine with the threads of
    a first start. `cores`: as in `settle`."""
    kernels = choose_kernels(device, job)
    return kernels, Machine(threads=job.first_threads(cores), facts=facts_of(device, kernels, os.environ))


def facts_of(device: torch.device, kernels: Kernels, environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    facts = {
        "torch": str(torch.__version__),
        "device": device_name(device),
        "float32 products": float32_products(device),
    }
    if device.type == "cuda":
        facts["kernels"] = getattr(kernels, "__name__", type(kernels).__name__)  # on a CPU, all have the same bits
    else:
        facts["processor"], facts["vectors"] = processor(), torch.backends.cpu.get_cpu_capability()
    facts |= {name: environment[name] for name in CHOOSES_CODE if name in environment}
    return tuple(facts.items())


def refuse_fewer_threads(threads: int, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if OpenMP would give torch another number of threads."""
    limit = environment.get("OMP_THREAD_LIMIT", "").strip()
    if limit.isdigit() and int(limit) < threads:
        raise ConfigError(f"OMP_THREAD_LIMIT = {limit}, but the run computes with {threads} threads; remove the limit")
    if environment.get("OMP_DYNAMIC", "").strip().lower() == "true":
        raise ConfigError("OMP_DYNAMIC = true gives each step another number of threads, and other bits; remove it")


def warn_of_overridden(threads: int, trainers: int, environment: Mapping[str, str]) -> None:
    """`trainers`: of this host. For several, torchrun sets OMP_NUM_THREADS = 1 if the user does not."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environment.get(name, str(threads))
        if value != str(threads) and (trainers == 1 or value != "1"):
            get_logger().warning(f"{name} = {value} is ignored: this run uses {threads} threads (trainer.threads)")


def set_threads(threads: int) -> None:
    torch.set_num_threads(1)
    warm_up_sqrt()
    torch.set_num_threads(threads)
