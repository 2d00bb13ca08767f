"""What does a step run through? The functions it calls, their lines, and how thinly they lie in their files.

Trains examples/demo.toml with both processes. Each records the functions of ours that are called while a few hundred
steps pass: between a batch's reading and its PlanDone, with decoding processes and all threads, without those that
serve metrics. No checkpoint or evaluation is made. Bodies of compiled loops call nothing that Python can see, so they
are not counted.

    python -m benchmarks.step_path
    python -m benchmarks.step_path --root ANOTHER_CHECKOUT

Prints each file with its called lines, all lines and classes with a called method, then the sums. Density is called
lines over all lines of these files. It measures no time: recording makes calls slow.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOMS = ("prefetcher", "trainer", "protocol", "job", "runtime", "analysis", "deploy", "rowcast")
PROCESSES = ("prefetcher", "trainer")
THIN = 20  # called lines: such a file is rather a part of its caller's
WARM_UP_S, WINDOW_S, MOST_S = 30.0, 20.0, 120.0

# what Python imports at the start of each process, the decoding ones too
RECORDER = """
import atexit, json, os, sys, threading, time
folder, root = os.environ["STEP_PATH"], os.environ["STEP_PATH_ROOT"]
seen, on = set(), False

def record(frame, event, argument):
    if on and event == "call" and threading.current_thread().name != "telemetry":
        seen.add(frame.f_code)

def watch():
    global on
    sys.setprofile(None)
    while not os.path.exists(os.path.join(folder, "begin")):
        time.sleep(0.05)
    on = True
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.05)
    on = False
    called = sorted((os.path.realpath(code.co_filename), code.co_firstlineno) for code in list(seen))
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
        json.dump([[path, line] for path, line in called if path.startswith(root + "/")], file)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""


@dataclass(frozen=True)
class CalledFile:
    path: Path
    called_lines: int
    lines: int
    functions: int
    classes: int


def called_file(path: Path, first_lines: set[int]) -> CalledFile:
    """`first_lines` are those of the called functions, a decorator's line where there is one."""
    text = path.read_text()
    lines: set[int] = set()
    functions = classes = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(line.lineno for line in (node, *node.decorator_list))
            if first in first_lines:
                functions += 1
                lines.update(range(first, (node.end_lineno or first) + 1))
        elif isinstance(node, ast.ClassDef):
            classes += any(node.lineno < line <= (node.end_lineno or 0) for line in first_lines)
    return CalledFile(path, len(lines), text.count("\n"), functions, classes)


def recorded(root: Path, folder: Path) -> dict[Path, set[int]]:
    """File -> first lines of its functions that both processes and their children called in the window."""
    (folder / "sitecustomize.py").write_text(RECORDER)
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{root}",
        "STEP_PATH": str(folder),
        "STEP_PATH_ROOT": str(root),
    }
    shared = ["--config", "examples/demo.toml", f'--set=job.run_dir="{folder / "run"}"', "--set=data.epochs=1000"]
    shared += ["--set=data.eval_fraction=0.0", *(f"--set=metrics.{name}=127.0.0.1:0" for name in PROCESSES)]
    processes = {}
    for name in PROCESSES:
        with (folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", name, "run", *shared, "--set=checkpoint.every=1000000"]
            processes[name] = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + MOST_S
        while "step" not in (folder / "trainer.log").read_text() and time.monotonic() < deadline_s:
            time.sleep(0.5)
        time.sleep(WARM_UP_S)
        (folder / "begin").touch()
        time.sleep(WINDOW_S)
        (folder / "end").touch()
        time.sleep(2.0)
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended: {(folder / f'{name}.log').read_text()[-1000:]}")
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(120)
    called: dict[Path, set[int]] = {}
    for file in folder.glob("*.json"):
        for path, line in json.loads(file.read_text()):
            called.setdefault(Path(path), set()).add(line)
    return called


def main(
    root: Annotated[Path, typer.Option(help="A checkout of rowcast.")] = Path(__file__).parent.parent,
) -> None:
    root = root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        called = recorded(root, Path(folder).resolve())
    files = [
        called_file(path, lines) for path, lines in sorted(called.items()) if path.relative_to(root).parts[0] in ROOMS
    ]
    files = [file for file in files if file.functions]
    for file in files:
        print(
            f"{file.called_lines:6,} of {file.lines:5,} lines {file.classes:4} classes  {file.path.relative_to(root)}"
        )
    called_lines, lines = (sum(getattr(file, key) for file in files) for key in ("called_lines", "lines"))
    functions, classes = (sum(getattr(file, key) for file in files) for key in ("functions", "classes"))
    density, thin = called_lines / lines, sum(file.called_lines < THIN for file in files)
    print(f"{functions:,} functions, {called_lines:,} lines, {classes} classes are called")
    print(f"in {len(files)} files of {lines:,} lines: density {density:.0%}; {thin} with < {THIN} called lines")


if __name__ == "__main__":
    typer.run(main)
