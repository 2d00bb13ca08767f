"""Do several trainers, as real processes, end with the bits of the plain loop in parts, whatever is killed?

Method: for each row optimizer and number of parts, run `examples/plain_loop.py --parts M`, then `rowcast.deploy.local`
with several numbers of trainers, and once with numbers that change by restarts; compare every loss, row, row state
and dense weight. Then start two trainers 40 times, kill (SIGKILL) or stop (SIGSTOP) one of the processes at a random
time, and measure until all of them have ended or another one is there in its place; start the run again until it is
complete, and compare with one trainer.

    make ranks ROWCAST_RETAIL=folder        without it: the built-in click stream
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.commands import command
from benchmarks.exact import equal_bits, job_text
from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.runtime.telemetry.logs import setup_logging
from tests.recovery.ranked import LONGEST_LIFE_S, RANKS, RecoveringRanks
from tests.recovery.restarted import Outcome, Recovering
from tests.support.driver import start_state
from tests.support.processes import Session

CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (  # row optimizer, parts, numbers of trainers
    ("adagrad", 8, ("1", "2", "4", "8", "1 -> 4 -> 2")),
    ("rowwise_adagrad", 6, ("1", "3")),
    ("adam", 4, ("2", "4")),
    ("sgd", 3, ("3",)),
)
COLUMNS = ("1", "2", "3", "4", "8", "1 -> 4 -> 2")
STOPPED = ("prefetcher 0", "prefetcher 1", "trainer 0", "trainer 1")
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Reference:
    losses: bytes
    tensors: dict[str, Tensor]


class Bits:
    """The runs of one row optimizer and number of parts, in a folder of their own."""

    def __init__(self, folder: Path, log: Path | None, optimizer: str, parts: int, steps: int) -> None:
        self.run_dir, self.config = folder / "run", folder / "job.toml"
        way = {"optimizer": optimizer, "data": "synthetic" if log is None else "tsv", "batch_size": "2048"}
        way |= {"depth": "2", "horizon": "8", "ring": "1MiB"}
        self.config.write_text(job_text(way, log, self.run_dir))
        self._steps, self._shared = steps, ['--set=cache.capacity="60000 rows"', f"--set=ranks.parts={parts}"]
        job = load_job(self.config)
        batches = list(schedule(job, open_reader(job), steps))
        losses, tensors = run_plain_loop(job, start_state(job, batches[0].batch.dense.shape[1]), batches, parts)
        self.reference = Reference(losses=np.array(losses, np.float32).tobytes(), tensors=tensors)

    def differing(self, counts: Sequence[int]) -> int:
        """Tensors and losses that differ after a run with these numbers of trainers, one after the other."""
        for turn, count in enumerate(counts):
            fresh = ["--fresh"] if turn == 0 else []
            until = self._steps * (turn + 1) // len(counts)  # a complete run goes on if it is given more steps
            options = [*self._shared, *fresh, f"--set=ranks.count={count}", f"--max-steps={until}"]
            command("rowcast.deploy.local", "--config", str(self.config), *options)
        out = self.run_dir / "model.safetensors"
        command("rowcast.prefetcher", "export", "--run", str(self.run_dir), "--out", str(out))
        ours, reference = load_file(out), self.reference
        wrong = [name for name, end in reference.tensors.items() if name not in ours or not equal_bits(ours[name], end)]
        return len(wrong) + ((self.run_dir / "losses.f32").read_bytes() != reference.losses)


def bits_table(log: Path | None, steps: int, optimizers: Sequence[str]) -> int:
    """Prints it; returns how many runs differ."""
    print(f"| row optimizer | parts | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}", flush=True)
    wrong = 0
    for optimizer, parts, ways in CASES:
        if optimizer not in optimizers:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bits = Bits(Path(folder), log, optimizer, parts, steps)
            found = {way: bits.differing([int(count) for count in way.split(" -> ")]) for way in ways}
        wrong += sum(number > 0 for number in found.values())
        print(f"| {optimizer} | {parts} | {' | '.join(str(found.get(way, '')) for way in COLUMNS)} |", flush=True)
    return wrong


@dataclass(frozen=True, kw_only=True)
class Struck:
    """What followed a signal."""

    outcome: str
    seconds: float
    starts: int
    differs: list[str]
    left: list[str]


def strike(folder: Path, name: str, number: signal.Signals, after_s: float, expected: Outcome) -> Struck:
    with Session(folder) as session:
        run = RecoveringRanks(session)
        command = run.start()
        run.until(command, lambda: name in run.processes.by_name())
        time.sleep(after_s)
        victim = run.processes.by_name().get(name)
        run.processes.signal(name, number)
        began_s = time.monotonic()
        outcome = "all ended"
        while command.running or run.processes.by_name():
            if run.processes.by_name().get(name, victim) != victim:
                outcome = "came back"
                break
            time.sleep(POLL_S)
        seconds = time.monotonic() - began_s
        run.end(command)
        if run.complete and outcome == "all ended":
            outcome = "complete"
        differs = run.finish().differs(expected)
        return Struck(
            outcome=outcome, seconds=seconds, starts=run.num_starts, differs=differs, left=run.processes.remains()
        )


def strikes(kills: range, seed: int) -> Iterator[tuple[str, signal.Signals, float]]:
    """Every process and signal in turn, and when. A row does not depend on those before it."""
    pairs = [f"{role} {rank}" for role in ("prefetcher", "trainer") for rank in range(RANKS)]
    every = [(name, signal.SIGKILL) for name in (*pairs, "torchrun", "parent", "local")]
    every += [(name, signal.SIGSTOP) for name in STOPPED]
    for index in kills:
        yield *every[index % len(every)], random.Random(f"{seed} {index}").uniform(0.0, LONGEST_LIFE_S)


def kill_table(kills: range, seed: int) -> int:
    """Prints it; returns how many runs differ or have left something."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder, Session(Path(folder)) as session:
        expected = Recovering(session, ranks={"parts": 4}).finish()
    print("| process | signal | at s | what followed | after s | starts | differs | left behind |")
    print("|" + "---|" * 8, flush=True)
    for name, number, at_s in strikes(kills, seed):
        with tempfile.TemporaryDirectory() as folder:
            struck = strike(Path(folder), name, number, at_s, expected)
        failed += bool(struck.differs or struck.left)
        print(
            f"| {name} | {number.name} | {at_s:.1f} | {struck.outcome} | {struck.seconds:.1f} | {struck.starts} | "
            f"{', '.join(struck.differs) or 'nothing'} | {', '.join(struck.left) or 'nothing'} |",
            flush=True,
        )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=os.environ.get("ROWCAST_RETAIL"), help="folder with train.tsv")
    parser.add_argument("--steps", type=int, default=30, help="train steps of each run of the first table; 0: none")
    names = [optimizer for optimizer, *_ in CASES]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names, help="rows of the first table")
    parser.add_argument("--kills", type=int, default=40, help="rows of the second table")
    parser.add_argument("--first", type=int, default=0, help="the row of the second table to begin with")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    setup_logging("ranks", "warning")
    log = None if options.log is None else Path(options.log).absolute()
    torch.set_num_threads(1)
    print(f"data: {log or 'synthetic, without a log'}; torch {torch.__version__}\n\nDiffering tensors, by trainers\n")
    wrong = bits_table(log, options.steps, options.optimizers) if options.steps else 0
    print(f"\n{options.kills} signals to two trainers, their prefetchers and what started them\n")
    failed = kill_table(range(options.first, options.first + options.kills), options.seed) if options.kills else 0
    print(f"\n{wrong} runs differ; {failed} of {options.kills} signals changed bits or left something behind")
    return int(wrong + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
