"""How does rowcast do on this device? One command, no network, one JSON file to send us.

    make gpu-check                      in less than 8 minutes: build/gpu-check.json and build/gpu-check-profile.json
    python -m benchmarks.gpu_check --device cpu --out check.json       tries the check itself, with small jobs

    environment   device, memory, versions, whether rings can be page-locked, copy speed
    kernels       against plain torch operations
    equality      bits, whatever the capacity and depth
    speed         every row on the device, replay, both processes, host tables
    overlap       share of the copies hidden by compute; no synchronisation in the loop

If a part fails, the file says so and the other parts still run. The exit code is 0 if everything passed.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.environment import environment
from benchmarks.gpu_check.equality import check_equality
from benchmarks.gpu_check.jobs import Size, precisions, sizes
from benchmarks.gpu_check.kernels import check_kernels
from benchmarks.gpu_check.overlap import check_overlap
from benchmarks.gpu_check.speed import batches_of, check_speed
from rowcast.trainer.execute.streams import choose_device
from rowcast.trainer.kernels.choose import choose_kernels

EQUALITY = Size(batch_size=1024, steps=16, dim=16, scale=0.01, bottom_mlp=(64, 16), top_mlp=(64, 1))
BUDGET_S = 460.0  # of the 8 minutes: parts that would begin later are skipped, and the file says so


class Parts:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._began_s = time.monotonic()

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        began_s = time.monotonic()
        if began_s - self._began_s > BUDGET_S:
            self.found[name] = {"left_out": f"{BUDGET_S:.0f} s were over"}
            return
        try:
            self.found[name] = work()
        except Exception as error:  # noqa: BLE001 - the other parts still run, and the file has the error
            self.found[name] = {
                "passed": False,
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        self.found[name]["took_s"] = round(time.monotonic() - began_s, 1)
        print(f"{name}: {said(self.found[name])}, {self.found[name]['took_s']} s", file=sys.stderr, flush=True)

    @property
    def passed(self) -> bool:
        return all(part.get("passed", True) and "left_out" not in part for part in self.found.values())


def said(part: dict[str, Any]) -> str:
    if "error" in part:
        return f"failed: {part['error']}"
    ratios = [
        f"{name} {value['to_resident']:.3f}"
        for name, value in part.items()
        if isinstance(value, dict) and "to_resident" in value
    ]
    verdict = {True: "passed", False: "FAILED", None: "measured"}[part.get("passed")]
    return " ".join([verdict, *ratios])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    parser.add_argument("--profile", type=Path, default=Path("build/gpu-check-profile.json"))
    options = parser.parse_args()
    device = choose_device(options.device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    parts = Parts()
    parts.run("environment", lambda: environment(device))
    parts.run("kernels", lambda: check_kernels(choose_kernels(device), device))
    parts.run("equality", lambda: check_equality(EQUALITY, device))
    for number, size in enumerate(sizes(device)):
        batches = batches_of(size, device)
        if number == 0:
            parts.run("overlap", partial(check_overlap, size, device, batches, options.profile))
        for precision in precisions(device):
            work = partial(check_speed, size, device, precision, batches, whole=precision == "fp32")
            parts.run(f"speed, batch {size.batch_size}, {precision}", work)
        options.out.write_text(json.dumps({"passed": parts.passed, **parts.found}, indent=1) + "\n")
    print(f"{'passed' if parts.passed else 'NOT passed'}: {options.out}")
    raise SystemExit(0 if parts.passed else 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
