"""What does noticing other data cost of a step's processor time?

    python -m benchmarks.data_checks [--config examples/demo.toml] [--rounds 3]

The checks are few and short, so a run with them cannot be told from one without: a machine's speed changes by more.
They are timed by themselves, on the job's own batches, in one thread: checksums of the ids and dense parts in the
prefetcher, and in a trainer of several ranks what these tell each other and compare. A step's processor time is that of
all processes of real runs: of a long one minus a short one, over the steps between.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rowcast.job.file import load_job
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums
from rowcast.prefetcher.readers.source import InlineSource
from rowcast.trainer.models.shared_runner import check_same_batches, halves

NUM_BATCHES, REPEATS = 40, 20
SHORT, LONG = 60, 260  # train steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_checks")
    parser.add_argument("--config", type=Path, default=Path("examples/demo.toml"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for ranks in (1, 2):
        checks_s = ranks * (prefetcher_s(options.config) + (0.0 if ranks == 1 else trainer_s(ranks)))
        steps_s = [step_s(options.config, ranks) for _ in range(options.rounds)]
        step = statistics.median(steps_s)
        each = " ".join(f"{own * 1e3:.1f}" for own in steps_s)
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: checks {checks_s * 1e6:.0f} us of {step * 1e3:.1f} ms a step ({each}), "
            f"ratio {step / (step - checks_s):.5f}"
        )


def prefetcher_s(config: Path) -> float:
    source = InlineSource(load_job(config), NUM_BATCHES)
    polled = [source.poll() for _ in range(NUM_BATCHES)]
    batches = [batch for batch in polled if batch is not None]

    def check() -> None:
        checksums = BatchChecksums(depth=4)
        for ids, dense in batches:
            checksums.add_ids(ids)
            checksums.add_dense(dense)
        for _ in batches:
            checksums.planned()

    return seconds(check) / len(batches)


def trainer_s(ranks: int) -> float:
    told = torch.zeros(4, ranks)

    def check() -> None:
        for place, half in enumerate(halves(2**47 + 1), start=1):
            told[place, :] = float(half)
        check_same_batches(0, told[1], told[2])

    return seconds(check)


def seconds(work: Callable[[], None]) -> float:
    work()
    began_s = time.thread_time()
    for _ in range(REPEATS):
        work()
    return (time.thread_time() - began_s) / REPEATS


def step_s(config: Path, ranks: int) -> float:
    short_s, long_s = (run_s(config, ranks, steps) for steps in (SHORT, LONG))
    return (long_s - short_s) / (LONG - SHORT)


def run_s(config: Path, ranks: int, steps: int) -> float:
    """Processor time of all processes."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rowcast.deploy.local", f"--config={config}", f"--max-steps={steps}"]
        settings = {"job.run_dir": folder, "ranks.count": ranks, "data.eval_fraction": 0.0}
        ports = {"metrics.prefetcher": "127.0.0.1:0", "metrics.trainer": "127.0.0.1:0"}
        options = [f"--set={key}={value}" for key, value in {**settings, **ports}.items()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, *options], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
