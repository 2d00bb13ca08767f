"""What does a step cost the prefetchers and their decoders, by thread, with one rank and with several?

Method: examples/retail.toml over a log in the npy layout, small MLPs, a horizon of 128, batches of 2,048 in as many
parts as the most ranks. `rowcast.deploy.local` runs with each number of ranks, in turns. The kernel's processor time
and voluntary switches of each thread of the prefetchers and decoders are read at two lines of progress; the difference
is divided by the steps between. A `sitecustomize` gives threads their Python names. With --against, another checkout
takes turns, too. Medians over rounds. Lines of a thread and of a rank are means over ranks, *all* is the sum.

    python -m benchmarks.rank_steps FOLDER                          the folder holds day_0_*.npy
    python -m benchmarks.rank_steps FOLDER --against ../before --ranks 4
"""

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.machine import write_result
from benchmarks.processes import ROLES, turns
from benchmarks.start import ROOT, Tree

NAMES_THREADS = """
import ctypes, threading
set_name, run = ctypes.CDLL(None).prctl, threading.Thread._bootstrap_inner
def named(thread):
    set_name(15, thread.name.encode())
    run(thread)
threading.Thread._bootstrap_inner = named
"""
SETTINGS = (
    'data.format="criteo-npy"',
    "data.eval_fraction=0",
    "data.epochs=100",
    "lookahead.horizon=128",  # not one that grows: a step reads one batch
    "model.bottom_mlp=[16]",
    "model.top_mlp=[1]",
    "trainer.threads=1",
)
MEASURED = ("prefetcher", "decoders")
Used = dict[str, tuple[float, float]]  # thread -> milliseconds of processor time, voluntary switches


def threads_of(group: int) -> Used:
    """Returns what each thread of a process group's prefetchers and decoders has used. Adds up threads of one name."""
    found = defaultdict[str, list[tuple[float, float]]](list)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            command = (process / "cmdline").read_text()
            role = next((role for word, role in ROLES.items() if word in command), "")
            if role in MEASURED and os.getpgid(int(process.name)) == group:
                for task in process.glob("task/*"):
                    found[f"{role}: {(task / 'comm').read_text().strip()}"].append(used(task))
    return {name: (sum(ms for ms, _ in own), sum(switches for _, switches in own)) for name, own in found.items()}


def used(task: Path) -> tuple[float, float]:
    switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
    assert switches is not None, "the kernel counts switches"
    return int((task / "schedstat").read_text().split()[0]) / 1e6, int(switches[1])


def a_run(tree: Tree, folder: Path, scratch: Path, cache: Path, ranks: Sequence[int], steps: Sequence[int]) -> Used:
    """Returns what a step uses on all ranks. `ranks`: how many, and how many parts a batch has. `steps`: the two steps
    at which the kernel's counts are read."""
    own = (f'job.run_dir="{scratch / "run"}"', f'data.path="{folder}"', f"ranks.count={ranks[0]}")
    options = [f"--set={setting}" for setting in (*SETTINGS, *own, f"ranks.parts={ranks[1]}")]
    arguments = ["-m", "rowcast.deploy.local", "--config", "examples/retail.toml", "--fresh", *options]
    process = tree.start(arguments, cache / tree.name)
    assert process.stdout is not None
    lines, seen = list[str](), list[tuple[int, Used]]()
    try:
        for line in process.stdout:
            lines.append(line)
            step = re.match(r"step (\d+)", line)
            if step and int(step[1]) >= steps[len(seen)]:
                seen.append((int(step[1]), threads_of(process.pid)))
                if len(seen) == len(steps):
                    (first, before), (last, after) = seen
                    return per_step(before, after, last - first)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    raise SystemExit(f"{tree.name} has not trained: {''.join(lines)[-2000:]}")


def per_step(before: Used, after: Used, steps: int) -> Used:
    found = {}
    for name, (ms, switches) in after.items():
        ms_before, switches_before = before.get(name, (0, 0))
        found[name] = (ms - ms_before) / steps, (switches - switches_before) / steps
    return found


def table(found: dict[str, list[Used]], ranks: Sequence[int]) -> Iterator[str]:
    """`found`: tree and ranks -> its rounds. Milliseconds and, in brackets, switches."""
    yield f"| ms a step (switches) | {' | '.join(found)} |\n|{'---|' * (1 + len(found))}"

    def line(title: str, names: Sequence[str], *, divided: bool = True) -> str:
        cells = []
        for count, rounds in zip(ranks, found.values(), strict=True):
            of = [[sum(own.get(name, (0, 0))[what] for name in names) for own in rounds] for what in (0, 1)]
            ms, switches = (statistics.median(own) / (count if divided else 1) for own in of)
            cells.append(f"{ms:.2f} ({switches:.1f})")
        return f"| {title} | {' | '.join(cells)} |"

    names = sorted({name for rounds in found.values() for own in rounds for name in own})
    for name in names:
        if any(own.get(name, (0, 0))[0] >= 0.01 for rounds in found.values() for own in rounds):
            yield line(name, [name])
    for role in MEASURED:
        yield line(f"{role}, a rank", [name for name in names if name.startswith(role)])
    yield line("all", names, divided=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", default="200,500", help="of the two readings")
    parser.add_argument("--against", type=Path, help="another checkout, with .venv")
    parser.add_argument("--cache", type=Path, help="where to keep compiled loops; by default a new one")
    options = parser.parse_args()
    counts = [int(count) for count in options.ranks.split(",")]
    steps = [int(step) for step in options.steps.split(",")]
    trees = [Tree(name="here", folder=ROOT)]
    if options.against is not None:
        trees.append(Tree(name=options.against.name, folder=options.against.resolve()))
    cases = {f"{tree.name}, ranks: {count}": (tree, count) for count in counts for tree in trees}
    found: dict[str, list[Used]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        scratch = Path(path)
        (scratch / "sitecustomize.py").write_text(NAMES_THREADS)
        os.environ["PYTHONPATH"] = str(scratch)
        for number, name in turns(list(cases), options.rounds):
            tree, count = cases[name]
            cache = options.cache or scratch
            found[name].append(a_run(tree, options.folder.resolve(), scratch, cache, (count, max(counts)), steps))
            print(f"round {number} of {options.rounds}: {name}", file=sys.stderr, flush=True)
    print("\n".join(table(found, [count for _, count in cases.values()])))
    write_result("rank_steps", rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
