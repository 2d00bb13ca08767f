"""What this device does, as `trainer rates` measures it: a file that makes it a device of `rowcast estimate`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import make_job, sizes
from rowcast.analysis.estimate import measure as measuring
from rowcast.analysis.estimate.measure import measure
from rowcast.analysis.estimate.rates_file import OVERHEADS
from rowcast.runtime.disk import render, seal

FILE = "device-rates.json"


@contextmanager
def in_a_hurry() -> Iterator[None]:
    """Enough to try this part, not to measure: one round, and caches stay warm."""
    with patch.object(measuring, "ROUNDS", 1), patch.dict(measuring.SWEPT_BYTES, cpu=2**20):
        yield


def check_rates(findings: Findings, device: torch.device, folder: Path) -> None:
    """Writes `FILE` to the folder; finds how far each kernel's estimate is off at shapes that it was not made from."""

    def measured() -> dict[str, Any]:
        with in_a_hurry() if device.type == "cpu" else nullcontext():
            rates = measure(device, 1, make_job(sizes(device)[1], device), 13)
        (folder / FILE).write_bytes(render(seal(rates)))
        errors = {name: round(own.error, 3) for name, own in rates.kernels.items() if own.error is not None}
        overheads = {name: 1e3 * rates.kernels[name].terms.get("1", 0.0) for name in OVERHEADS}
        return {"overhead_ms": overheads, "mean_error": errors}

    findings.item("rates", measured, guess_s=45.0)
