"""The output of `trainer rates`."""

import math
import time
from pathlib import Path

import typer

from rowcast.job.device_rates import KernelRates
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.execute.streams import choose_device
from rowcast.trainer.rates.measure import measure, write_rates


def measure_and_say(
    out: Path, device: str, threads: int, job: Job | None, num_dense: int, network_gbs: float | None
) -> None:
    """Raises ConfigError."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written; name a file in a folder that exists, such as rates.json")
    if network_gbs is not None and not 0 < network_gbs < math.inf:
        raise ConfigError(f"--network-gbs {network_gbs}: give a number above 0")
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise ConfigError(f"--device {device}: {error}") from None
    began_s = time.perf_counter()
    typer.echo("measuring; this takes about a minute")
    found = measure(chosen, threads, job, num_dense, network_gbs)
    write_rates(found, out)
    typer.echo(f"{'kernel':<24}{'shapes':>8}{'mean error':>12}{'worst':>8}")
    for name, rates in found.kernels.items():
        say(name, rates)
    typer.echo(
        f"{out}: {len(found.kernels)} kernels, {1e3 * found.host.per_step:.2f} ms of the host a step, in "
        f"{time.perf_counter() - began_s:.0f} s"
    )


def say(name: str, rates: KernelRates) -> None:
    errors = rates.errors
    known = "" if errors is None else f"{errors.mean:>12.1%}{errors.worst:>8.0%}"
    typer.echo(f"{name:<24}{rates.samples:>8}{known}")
