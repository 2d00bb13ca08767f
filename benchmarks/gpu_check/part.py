"""One part of the check, in a process of its own: started by `supervise.py`, tells by `findings.py`.

python -m benchmarks.gpu_check.part kernels --device cuda --out found.json --until SECONDS
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_check import (
    adopted,
    bandwidth,
    environment,
    equality,
    in_process,
    kernels,
    peers,
    rates,
    recovery,
    same_seed,
    speed,
    steady,
    tools,
)
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import sizes, threads_of
from rowcast.trainer.device.cuda import choose_device
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.run.machine import set_threads

Work = Callable[[Findings, torch.device, Path], None]  # the path: a folder for further files

PARTS: dict[str, Work] = {
    "environment": lambda findings, device, folder: environment.check_environment(findings, device),
    "kernels": lambda findings, device, folder: kernels.check_kernels(findings, device, kernels.CORE),
    "memcheck": lambda findings, device, folder: tools.check_memory(findings, device, folder),
    "orders": lambda findings, device, folder: in_process.check_orders(findings, device),
    "ways": lambda findings, device, folder: in_process.check_ways(findings, device),
    "adopted": lambda findings, device, folder: adopted.check_adopted(findings, device),
    "bandwidth": lambda findings, device, folder: bandwidth.check_bandwidth(findings, device),
    "ncu": lambda findings, device, folder: tools.count_bytes(findings, device, folder),
    "steady": lambda findings, device, folder: steady.check_steady(findings, device, folder),
    "speed-large": lambda findings, device, folder: speed.check_speed(findings, device, sizes(device)[1]),
    "speed": lambda findings, device, folder: speed.check_speed(findings, device, sizes(device)[0]),
    "live-large": lambda findings, device, folder: speed.check_live(findings, device, sizes(device)[1]),
    "live": lambda findings, device, folder: speed.check_live(findings, device, sizes(device)[0]),
    "equality": lambda findings, device, folder: equality.check_equality(findings, device, folder),
    "rates": lambda findings, device, folder: rates.check_rates(findings, device, folder),
    "peers": lambda findings, device, folder: peers.check_peers(findings, device),
    "more-kernels": lambda findings, device, folder: kernels.check_kernels(findings, device, kernels.REST),
    "recovery": lambda findings, device, folder: recovery.check_recovery(findings, device, folder),
    "same-seed": lambda findings, device, folder: same_seed.check_same_seed(findings, device, folder),
    # only under a tool
    tools.FEW_KERNELS: lambda findings, device, folder: kernels.check_kernels(findings, device, kernels.CORE[:4]),
    tools.ONCE: lambda findings, device, folder: bandwidth.run_once(findings, device),
}


def is_alive(device: torch.device) -> bool:
    """Whether the device still works; after an illegal address it refuses everything."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds, by the machine's monotonic clock")
    options = parser.parse_args()
    device = choose_device(options.device)
    findings = Findings(options.out, options.until, lambda: is_alive(device))
    set_threads(threads_of(device))  # as a trainer does, whose bits are compared
    torch.manual_seed(0)
    with on_device(device):
        PARTS[options.part](findings, device, options.out.parent)
    findings.end()


if __name__ == "__main__":
    main()
