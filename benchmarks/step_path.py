"""Which files does a step run through? The size of what one must read to know a step.

Trains examples/demo.toml with both processes. Each records the functions of ours that are called while a few hundred
steps pass: between a batch's reading and its StepDone, with decoding processes and all threads, without those that
serve metrics. No checkpoint or evaluation is made. Bodies of compiled loops call nothing that Python can see, so their
file is listed only if another function of it is called.

    python -m benchmarks.step_path
    python -m benchmarks.step_path --root ANOTHER_CHECKOUT

Prints each file with its lines and classes, then the sums. It measures no time: recording makes calls slow.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

ROOMS = ("prefetcher", "trainer", "protocol", "job", "runtime", "analysis", "deploy", "rowcast")
PROCESSES = ("prefetcher", "trainer")
WARM_UP_S, WINDOW_S, MOST_S = 30.0, 20.0, 120.0

# what Python imports at the start of each process, the decoding ones too
RECORDER = """
import atexit, json, os, sys, threading, time
folder, root = os.environ["STEP_PATH"], os.environ["STEP_PATH_ROOT"]
seen, on = set(), False

def record(frame, event, argument):
    if on and event == "call" and threading.current_thread().name != "telemetry":
        seen.add(frame.f_code.co_filename)

def watch():
    global on
    sys.setprofile(None)
    while not os.path.exists(os.path.join(folder, "begin")):
        time.sleep(0.05)
    on = True
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.05)
    on = False
    files = sorted(path for path in map(os.path.realpath, list(seen)) if path.startswith(root + "/"))
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
        json.dump(files, file)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""


def recorded(root: Path, folder: Path) -> set[Path]:
    """The files of `root` whose functions both processes and their children called in the window."""
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
    return {Path(path) for file in folder.glob("*.json") for path in json.loads(file.read_text())}


def main(
    root: Annotated[Path, typer.Option(help="A checkout of rowcast.")] = Path(__file__).parent.parent,
) -> None:
    root = root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        files = recorded(root, Path(folder).resolve())
    lines = classes = 0
    own = sorted(file for file in files if file.relative_to(root).parts[0] in ROOMS)
    for file in own:
        text = file.read_text()
        of_file = sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))
        print(f"{text.count(chr(10)):6,} lines {of_file:4} classes  {file.relative_to(root)}")
        lines, classes = lines + text.count("\n"), classes + of_file
    print(f"{len(own)} files, {lines:,} lines, {classes} classes")


if __name__ == "__main__":
    typer.run(main)
