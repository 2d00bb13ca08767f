"""How does rowcast do on this device? Three commands, no network, one JSON file to send us.

    make gpu-check                                      all three: build/gpu-check.json
    python -m benchmarks.gpu_check safety               one of them, in less than 9 minutes
    python -m benchmarks.gpu_check --parts steady       some parts
    python -m benchmarks.gpu_check --small              tries the check itself, on a CPU with small jobs
    python -m benchmarks.gpu_check safety --wheels DIR  on a machine that lacks packages (docs/speed.md)

safety: are all bits right, and no address wrong?
    environment    device, memory, versions, whether rings can be page-locked, copy speed
    kernels        the bits of plain torch operations, in the most important cases
    memcheck       four of these cases under compute-sanitizer, where it is installed
    orders         streams that start late: the bits of the cache that holds all rows, for 20 seeds
    ways           the same for jagged and weighted bags, several groups, Adam with bf16 and master, 8 parts, ...
    adopted        a script as it is and with `rowcast.adopt`, for six rules of torch.optim
speed: is a step as short as the hardware allows?
    bandwidth      GB/s of each kernel with a real plan, against a copy; other block shapes
    ncu            what Nsight Compute counts of these kernels, where it is installed
    steady         nothing waits for the device in the steady loop; the share of copies that lies under compute
    speed-large    batch 65,536: every row on the device, and replay
    speed          batch 16,384
whole: what do both processes do?
    live-large     batch 65,536: both processes; tables in host memory
    live           batch 16,384
    equality       both processes train to the bits of all rows on the device, at three capacities
    rates          what the device does, for `rowcast estimate`: build/gpu-check-device-rates.json
    peers          FBGEMM's managed caching, where it is installed
    more-kernels   the other cases of `kernels`
    recovery       a trainer, a prefetcher or both are killed and started again
    same-seed      HSTU and DLRM, new runs of one seed on 1, 2 and 4 trainers: one sha256 each

The most valuable parts come first. Each runs in a process of its own, with a time limit; the file is rewritten after
each. A later command adds to the file. It skips parts that have passed with nothing left out: remove the file to begin
again. The exit code is 0 if nothing failed and 1 if something failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.findings import write_json
from benchmarks.gpu_check.packages import packages
from benchmarks.gpu_check.summary import summary
from benchmarks.gpu_check.supervise import GRACE_S, HARM, run_part

COMMANDS = {  # the parts in their order, and the seconds of each, if each takes all of them
    "safety": {
        "environment": 25.0,
        "kernels": 80.0,
        "memcheck": 45.0,
        "orders": 75.0,
        "ways": 120.0,
        "adopted": 175.0,
    },
    "speed": {"bandwidth": 90.0, "ncu": 75.0, "steady": 100.0, "speed-large": 140.0, "speed": 115.0},
    "whole": {
        "live-large": 75.0,
        "live": 65.0,
        "equality": 95.0,
        "rates": 50.0,
        "peers": 20.0,
        "more-kernels": 25.0,
        "recovery": 100.0,
        "same-seed": 90.0,
    },
}
LIMITS_S = {part: limit_s for parts in COMMANDS.values() for part, limit_s in parts.items()}
BUDGET_S = 520.0  # limits a command: all its parts, and the time until a part that hangs is killed
LEAST_S = 20.0  # a part with less time left does not begin
WHEELS = "ROWCAST_WHEELS"  # names the folder of wheels, like --wheels


def run_parts(names: list[str], device: str, budget_s: float, out: Path) -> dict[str, Any]:
    """Adds to `out` what was found so far, after each part; returns all of it."""
    began_s = time.monotonic()
    parts = parts_in(out, device)
    names = [name for name in names if not is_settled(parts.get(name))]
    found = told(parts, device)
    with tempfile.TemporaryDirectory(prefix="rowcast-gpu-check-") as folder:
        for number, name in enumerate(names):
            left_s = budget_s - (time.monotonic() - began_s) - GRACE_S
            if left_s < LEAST_S:
                parts[name] = {"status": "left out", "reason": f"{budget_s:.0f} s were over"}
            else:
                # what earlier parts did not need, and what parts that are not chosen would need, is for all others
                limit_s = LIMITS_S[name] * left_s / sum(LIMITS_S[other] for other in names[number:])
                findings = Path(folder) / f"{name}.json"
                command = [sys.executable, "-m", "benchmarks.gpu_check.part", name, f"--device={device}"]
                parts[name] = run_part(
                    [*command, f"--out={findings}", f"--until={time.monotonic() + limit_s}"], findings, limit_s
                )
                keep_files(Path(folder), out)
            found = told(parts, device)
            write_json(out, found)
            print(f"{name}: {said(parts[name])}", file=sys.stderr, flush=True)
    return found


def parts_in(out: Path, device: str) -> dict[str, dict[str, Any]]:
    """What earlier commands have found. Raises ValueError for a file of another device."""
    if not out.exists():
        return {}
    found = json.loads(out.read_text())
    if found["device"] != device:
        raise ValueError(
            f"{out} is of --device {found['device']}, not of {device}; remove it, or name another with --out"
        )
    parts: dict[str, dict[str, Any]] = found["parts"]
    return parts


def is_settled(part: dict[str, Any] | None) -> bool:
    return part is not None and part["status"] in ("passed", "not here") and not part.get("left_out")


def told(parts: dict[str, dict[str, Any]], device: str) -> dict[str, Any]:
    took_s = round(sum(part.get("took_s", 0.0) for part in parts.values()), 1)
    return {**verdict(parts), "device": device, "took_s": took_s, **summary(parts), "parts": parts}


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
        f"{len(part['not_here'])} not possible here" if part.get("not_here") else "",
        f"FAILED: {', '.join(failed)}" if failed else "",
    ]
    return f"{part['status']}, {', '.join(filter(None, facts))}{running}"


def keep_files(folder: Path, out: Path) -> None:
    """Puts the profiler's trace and the device's rates beside `out`, if a part has made them."""
    for file in (*folder.glob("*.json.gz"), *folder.glob("device-rates.json")):
        out.with_name(f"{out.stem}-{file.name}").write_bytes(file.read_bytes())
        file.unlink()


def start_with(wheels: Path, site: Path) -> None:
    """Installs the wheels in the folder `site`, and starts this command again, which then finds them."""
    known = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    if str(site) in os.pathsep.join(known).split(os.pathsep):
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*pip, f"--target={site}", *sorted(map(str, wheels.glob("*.whl")))], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *known])
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; by default all")
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto: cuda where there is one")
    parser.add_argument("--small", action="store_true", help="the same as --device cpu")
    parser.add_argument("--parts", help="instead of commands, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="of each command; its parts' limits follow")
    parser.add_argument(
        "--wheels", type=Path, default=os.environ.get(WHEELS), help=f"a folder of wheels to use; also {WHEELS}"
    )
    options = parser.parse_args()
    turns = [options.parts.split(",")] if options.parts else [list(COMMANDS.get(c, [c])) for c in options.commands]
    turns = turns or [list(parts) for parts in COMMANDS.values()]
    unknown = [name for names in turns for name in names if name not in LIMITS_S]
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of {', '.join((*COMMANDS, *LIMITS_S))}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        start_with(Path(options.wheels).resolve(), options.out.parent.resolve() / "gpu-check-site")
    if missing := packages()["missing"]:
        parser.error(
            f"a run needs packages that are not here: {', '.join(missing)}; docs/speed.md says how to carry them along"
        )
    device = "cpu" if options.small else options.device
    try:
        found = [run_parts(names, device, options.seconds, options.out) for names in turns][-1]
    except ValueError as error:
        parser.error(str(error))
    print(f"{'nothing failed' if found['passed'] else 'FAILED'}, {found['took_s']} s: {options.out}")
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
