"""Implements `trainer rates`."""

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rowcast.analysis.estimate.rates.measure import measure, write_rates
from rowcast.job.file import load_job
from rowcast.runtime.command_options import Overrides
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.device.streams import choose_device


def rates(
    out: Annotated[Path, Option(help="The file to write.", metavar="FILE")],
    config: Annotated[
        Path | None,
        Option(
            help="A job whose model is measured as a whole, and exchanges if it has ranks.",
            metavar="job.toml",
            show_default=False,
        ),
    ] = None,
    num_dense: Annotated[int, Option(min=0, help="Dense features of that job's samples.")] = 13,
    network_gbs: Annotated[
        float | None, Option(help="What the network between hosts carries, in 10^9 bytes/s.", show_default=False)
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, Option(min=1, help="Threads of torch, as trainer.threads.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Raises ConfigError."""
    setup_logging("trainer", "warning", None)
    job = None if config is None else load_job(config, tuple(overrides or ()))
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
    for name, kernel in found.kernels.items():
        errors = kernel.errors
        known = "" if errors is None else f"{errors.mean:>12.1%}{errors.worst:>8.0%}"
        typer.echo(f"{name:<24}{kernel.samples:>8}{known}")
    typer.echo(
        f"{out}: {len(found.kernels)} kernels, {1e3 * found.host.per_step:.2f} ms of the host a step, in "
        f"{time.perf_counter() - began_s:.0f} s"
    )
