"""Tools of a CUDA installation, where there are any: they run a part of this check and look at its kernels.

memcheck    compute-sanitizer finds accesses outside of memory and wrong addresses
ncu         Nsight Compute counts the bytes that reach the device's memory, and the share of its bandwidth
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings, NotHere

FEW_KERNELS, ONCE = "few-kernels", "kernels-once"  # the parts that run under a tool
METRICS = {
    "dram__bytes.sum": "bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "percent_of_bandwidth",
    "gpu__time_duration.sum": "ns",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "percent_of_warps",
    "launch__registers_per_thread": "registers",
}
KERNELS = "regex:lookup_kernel|segments_kernel|join_kernel|index"
REFUSED = "ERR_NVGPUCTRPERM"  # counters are for administrators
LAST_LINES = 40


def check_memory(findings: Findings, device: torch.device, folder: Path) -> None:
    def run() -> dict[str, Any]:
        # the allocator's large segments would hide accesses beside a tensor
        found, said = under(
            ["compute-sanitizer", "--tool", "memcheck"],
            FEW_KERNELS,
            device,
            folder,
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        errors = [line for line in said if "ERROR SUMMARY" in line]
        items = {name: item["passed"] for name, item in found["items"].items() if "passed" in item}
        is_clean = bool(errors) and all(" 0 errors" in line for line in errors)
        return {"summary": errors, "items": items, "said": said, "passed": is_clean and all(items.values())}

    findings.item("memcheck", run, guess_s=30.0)


def count_bytes(findings: Findings, device: torch.device, folder: Path) -> None:
    def run() -> dict[str, Any]:
        tool = ["ncu", "--csv", "--kernel-name", KERNELS, "--metrics", ",".join(METRICS), "--launch-count", "16"]
        _, said = under(tool, ONCE, device, folder, {})
        if any(REFUSED in line for line in said):
            raise NotHere("ncu may not read the device's counters")
        kernels = counted(said)
        return {"kernels": kernels, "passed": bool(kernels), **({} if kernels else {"said": said[-LAST_LINES:]})}

    findings.item("ncu", run, guess_s=30.0)


def under(
    tool: Sequence[str], part: str, device: torch.device, folder: Path, environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """What the part has found under the tool, and the last lines that both said. Raises NotHere without the tool."""
    program = shutil.which(tool[0])
    if program is None:
        raise NotHere(f"{tool[0]} is not installed")
    out = folder / f"{part}.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check.part", part, f"--device={device}", f"--out={out}"]
    done = subprocess.run(
        [program, *tool[1:], *command, f"--until={time.monotonic() + 3600}"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    return json.loads(out.read_text()) if out.exists() else {"items": {}}, said


def counted(said: Sequence[str]) -> list[dict[str, Any]]:
    """One entry a launch, from ncu's CSV: a line for each launch and metric."""
    first = next((number for number, line in enumerate(said) if line.startswith('"ID"')), len(said))
    launches: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(said[first:]):
        if line.get("Metric Name") in METRICS:
            own = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
            own[METRICS[line["Metric Name"]]] = f"{line['Metric Value']} {line['Metric Unit']}".strip()
    return list(launches.values())
