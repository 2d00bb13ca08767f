"""Do the tests pass with the oldest and the newest versions that people have? `make compat`.

    python -m benchmarks.compat [--low python3.12] [--high python3.15] [--only low|high] [--jobs 2]

CI runs one set of versions. Here are the two ends:

    low     the oldest torch that `pyproject.toml` allows, with the Triton that belongs to it
    high    whatever pip takes today: the newest of everything

Each end gets an environment of its own, made anew in `build/compat-<end>`. In it run the tests of `FOLDERS`, in which
warnings are errors, `rowcast check`, which says the versions, and the demo. A torch with CUDA's libraries, which pip
takes on Linux, needs 6 GB an end; no device is needed. An interpreter is a command or a path; where it is missing, `uv`
is asked if it is installed. Only the standard library is used, so any Python 3.11 or newer can run this.

The exit code is 1 where anything failed or an interpreter was missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "trainer", "adopt", "stores", "protocol", "planner")
PROCESSES = ("prefetcher", "trainer")
PINS = {"low": ("torch==2.11.*", "triton==3.6.*"), "high": ()}


@dataclass(frozen=True, kw_only=True)
class End:
    name: str
    folder: Path  # of the environment, the logs and the demo's run

    def python(self, what: str, shown: str, *arguments: str) -> bool:
        """Runs the environment's Python in the root of the repository; `<what>.log` has what it said. Prints the last
        line that matches `shown`. False if it failed.
        """
        began_s, log = time.perf_counter(), self.folder / f"{what}.log"
        with log.open("w") as file:
            code = subprocess.run(
                [str(self.folder / "bin" / "python"), *arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NUMBA_CACHE_DIR": str(self.folder / "numba")},
                check=False,
            ).returncode
        lines = [line.strip() for line in log.read_text().splitlines() if re.search(shown, line)]
        verdict = f"FAILED with code {code}, see {log.relative_to(ROOT)}" if code else "passed"
        print(f"{self.name:5} {what:8} {time.perf_counter() - began_s:4.0f} s  {verdict}", *lines[-1:], flush=True)
        return code == 0

    def try_all(self, python: str, jobs: int) -> bool:
        subprocess.run([python, "-m", "venv", "--clear", str(self.folder)], check=True)
        if not self.python("install", "^ERROR", "-m", "pip", "install", "--editable", ".[dev]", *PINS[self.name]):
            return False
        own = [f"job.run_dir={self.folder / 'run'}", *(f"metrics.{name}=127.0.0.1:0" for name in PROCESSES)]
        demo = ("--config", "examples/demo.toml", *(f"--set={setting}" for setting in own))
        workers = ("-n", str(jobs), "--dist", "loadfile")
        return all(
            [
                self.python("check", " versions ", "-m", "rowcast.prefetcher", "check", *demo),
                self.python("tests", " passed", "-m", "pytest", *workers, *(f"tests/{name}" for name in FOLDERS)),
                self.python("demo", "AUC", "-m", "rowcast.deploy.local", "--fresh", *demo),
            ]
        )


def find(python: str) -> str | None:
    """The interpreter's path. uv knows those it has installed and those that are on no path."""
    finders: list[Callable[[], str | None]] = [lambda: shutil.which(python), lambda: uv_finds(python)]
    return next((path for finder in finders if (path := finder()) and runs(path)), None)


def uv_finds(python: str) -> str | None:
    if shutil.which("uv") is None:
        return None
    asked = subprocess.run(["uv", "python", "find", python], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def runs(python: str) -> bool:
    """A version manager may have put a command on the path that only says that it has no such version."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compat")
    parser.add_argument("--low", metavar="PYTHON", default="python3.12", help="interpreter of the low end")
    parser.add_argument("--high", metavar="PYTHON", default="python3.15", help="interpreter of the high end")
    parser.add_argument("--only", choices=PINS, help="try one end")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time; default 2")
    options = parser.parse_args()
    passed = []
    for name in [options.only] if options.only else PINS:
        wanted = getattr(options, name)
        python = find(wanted)
        if python is None:
            print(f"{name:5} no interpreter {wanted} was found; install it, or name another with --{name} PATH")
        end = End(name=name, folder=ROOT / "build" / f"compat-{name}")
        passed.append(python is not None and end.try_all(python, options.jobs))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
