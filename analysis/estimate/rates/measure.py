"""`trainer rates`: measures what this device does, for `prefetcher estimate`."""

import platform
from pathlib import Path

import torch

from rowcast.analysis.estimate.device_rates import RATES_VERSION, DeviceRates
from rowcast.analysis.estimate.rates.exchange import exchange_kernels
from rowcast.analysis.estimate.rates.host import host_rates
from rowcast.analysis.estimate.rates.kernel import measured
from rowcast.analysis.estimate.rates.layers import BATCHES, layer_kernels
from rowcast.analysis.estimate.rates.model import model_rates
from rowcast.analysis.estimate.rates.parts import part_kernels
from rowcast.analysis.estimate.rates.rows import move_kernels, row_kernels
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch, probe_seconds
from rowcast.job.schema import Job
from rowcast.runtime.disk import render, seal
from rowcast.runtime.machine import keep_freed_memory, processor
from rowcast.trainer.device.streams import device_name
from rowcast.trainer.kernels.choose import choose_kernels


def measure(
    device: torch.device, threads: int, job: Job | None, num_dense: int, network_gbs: float | None = None
) -> DeviceRates:
    """About a minute of a CPU core. `job`: its model is measured as a whole too, and what its ranks exchange;
    `num_dense`: dense features of its samples. `network_gbs`: of the network between hosts, in 10^9 bytes/s. Raises
    ConfigError."""
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()  # as a trainer does
    watch, kernels = Stopwatch(device, threads), choose_kernels(device)
    warm = Stopwatch(device, threads, cold=False)
    found = measured([*row_kernels(watch, kernels), *move_kernels(watch), *layer_kernels(warm)])
    if job is not None and job.ranks.num_parts > 1:
        found |= part_kernels(warm) | exchange_kernels(device, job, network_gbs)
    return DeviceRates(
        version=RATES_VERSION,
        machine=f"{processor()}, {platform.system()} {platform.machine()}",
        device=device_name(device),
        clock=watch.clock,
        torch=str(torch.__version__),
        threads=threads,
        probe=probe_seconds(watch),
        kernels=found,
        host=host_rates(watch, found),
        model=None if job is None else model_rates(warm, job, num_dense, BATCHES[device.type]),
    )


def write_rates(rates: DeviceRates, path: Path) -> None:
    path.write_bytes(render(seal(rates)))
