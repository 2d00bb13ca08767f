"""How does rowcast do on this device? One command, no network, one JSON file to send us.

    make gpu-check                                      in less than 8 minutes: build/gpu-check.json
    python -m benchmarks.gpu_check --parts kernels,steady
    python -m benchmarks.gpu_check --device cpu         tries the check itself, with small jobs

    environment    device, memory, versions, whether rings can be page-locked, copy speed
    kernels        the bits of plain torch operations, in the most important cases
    equality       two processes train to the bits of the cache that holds all rows, at three capacities, depths 1 and 4
    steady         nothing waits for the device in the steady loop; the share of copies that lies under compute
    speed          batch 16,384: every row on the device, replay, both processes, tables in host memory; where time goes
    speed-large    the same, batch 65,536
    rates          what the device does, for `prefetcher estimate`: build/gpu-check-device-rates.json
    peers          FBGEMM's managed caching, where it is installed
    more-kernels   the other cases

The most valuable parts come first. Each runs in a process of its own, with a time limit; the file is rewritten after
each. The exit code is 0 if nothing failed and 1 if something failed; what was left out is listed and fails nothing.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.findings import write_json
from benchmarks.gpu_check.packages import packages
from benchmarks.gpu_check.summary import summary
from benchmarks.gpu_check.supervise import GRACE_S, HARM, run_part

LIMITS_S = {  # of each part, in the order in which they run, with all of BUDGET_S
    "environment": 45.0,
    "kernels": 100.0,
    "equality": 150.0,
    "steady": 75.0,
    "speed": 120.0,
    "speed-large": 120.0,
    "rates": 75.0,
    "peers": 60.0,
    "more-kernels": 120.0,
}
BUDGET_S = 470.0  # of all parts together, with what a part that hangs takes until it is killed
LEAST_S = 20.0  # a part with less time left does not begin


def run_parts(names: list[str], device: str, budget_s: float, out: Path) -> dict[str, Any]:
    """Writes what was found so far to `out` after each part; returns all of it."""
    began_s = time.monotonic()
    parts: dict[str, dict[str, Any]] = {}
    whole_s = min(BUDGET_S, sum(LIMITS_S[name] for name in names))  # few parts share the budget among themselves
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rowcast-gpu-check-") as folder:
        for name in names:
            left_s = budget_s - (time.monotonic() - began_s) - GRACE_S
            if left_s < LEAST_S:
                parts[name] = {"status": "left out", "reason": f"{budget_s:.0f} s were over"}
            else:
                limit_s = min(LIMITS_S[name] * budget_s / whole_s, left_s)
                findings = Path(folder) / f"{name}.json"
                command = [sys.executable, "-m", "benchmarks.gpu_check.part", name, f"--device={device}"]
                parts[name] = run_part(
                    [*command, f"--out={findings}", f"--until={time.monotonic() + limit_s}"], findings, limit_s
                )
                keep_files(Path(folder), out)
            found = {**verdict(parts), "took_s": round(time.monotonic() - began_s, 1), **summary(parts), "parts": parts}
            write_json(out, found)
            print(f"{name}: {said(parts[name])}", file=sys.stderr, flush=True)
    return found


def verdict(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    left_out = {name: part.get("reason") or part.get("left_out") for name, part in parts.items()}
    return {
        "passed": not any(part["status"] in HARM for part in parts.values()),
        "status": {name: part["status"] for name, part in parts.items()},
        "left_out": {name: what for name, what in left_out.items() if what},
    }


def said(part: dict[str, Any]) -> str:
    items = part.get("items", {})
    failed = [name for name, item in items.items() if item.get("passed") is False]
    running = f"; it was at: {', '.join(part['running'])}" if part.get("running") else ""
    left_out = part.get("reason") or (f"{len(part['left_out'])} left out" if part.get("left_out") else "")
    facts = [
        f"{len(items)} items" if items else "",
        f"{part['took_s']} s" if "took_s" in part else "",
        part.get("signal", "") or (f"exit code {part['exit_code']}" if "exit_code" in part else ""),
        left_out,
        f"FAILED: {', '.join(failed)}" if failed else "",
    ]
    return f"{part['status']}, {', '.join(filter(None, facts))}{running}"


def keep_files(folder: Path, out: Path) -> None:
    """Puts the profiler's trace and the device's rates beside `out`, if a part has made them."""
    for file in (*folder.glob("*.json.gz"), *folder.glob("device-rates.json")):
        out.with_name(f"{out.stem}-{file.name}").write_bytes(file.read_bytes())
        file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto: cuda where there is one")
    parser.add_argument("--parts", default=",".join(LIMITS_S), help="separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_S, help="for all parts together; their limits change with it"
    )
    options = parser.parse_args()
    names = options.parts.split(",")
    unknown = [name for name in names if name not in LIMITS_S]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)} is none of {', '.join(LIMITS_S)}")
    if missing := packages()["missing"]:
        parser.error(
            f"a run needs packages that are not here: {', '.join(missing)}; docs/speed.md says how to carry them along"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = run_parts(names, options.device, options.seconds, options.out)
    print(f"{'nothing failed' if found['passed'] else 'FAILED'}, {found['took_s']} s: {options.out}")
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
