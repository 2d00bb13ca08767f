"""Does a stop of all processes at once, at any instant, end a run in order?

    python -m benchmarks.stops [--runs 40] [--ranks 2]

Method: start `rowcast.deploy.local` with a small job, wait for a random time, and send SIGTERM to every process of it
at once, as systemd does; half of the times again within 50 ms. Times begin with the start and go on until twice the
seconds that it takes until training begins. Four processes that compute for ever run beside. A stop is in order if the
exit code is 0, nothing of the run is left, and, after the first step, the newest checkpoint is of the last step in
`losses.f32`.

A signal while the interpreter itself starts, before any line of ours has run, has a row of its own: it ends the command
with 143, and nothing was begun. The exit code is 1 where any other stop is not in order.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest

SPINNING = 4
TWICE_WITHIN_S = 0.05
LIMIT_S = 300.0  # of one run, which guards against a hang
POLL_S = 0.02
EARLY = "the interpreter starts"
MARK = "ROWCAST_STOPS_MARK"  # in the environment of all processes of a run
JOB = Path(__file__).parents[1] / "examples" / "demo.toml"
SMALL = (
    "data.batch_size=256",
    "data.synthetic.scale=0.01",
    "data.synthetic.samples=64000000",
    "data.eval_fraction=0.0",
    "model.bottom_mlp=[32, 16]",
    "model.top_mlp=[16, 1]",
    "cache.capacity=4MiB",
    "trainer.threads=1",
    "transport.ring=4MiB",
    "metrics.prefetcher=127.0.0.1:0",
    "metrics.trainer=127.0.0.1:0",
)


class Run:
    """The processes of one start."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.run_dir = folder / "run"
        self._mark = uuid.uuid4().hex
        settings = (*SMALL, f"job.run_dir={self.run_dir}", f"ranks.count={ranks}")
        command = [
            sys.executable,
            "-m",
            "rowcast.deploy.local",
            "--config",
            str(JOB),
            *(f"--set={s}" for s in settings),
        ]
        self._log = (folder / "log").open("wb")
        self.local = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, MARK: self._mark}, start_new_session=True
        )

    @property
    def steps(self) -> int:
        with suppress(FileNotFoundError):
            return (self.run_dir / "losses.f32").stat().st_size // 4
        return 0

    @property
    def trains(self) -> bool:
        """Losses reach their file later."""
        return "event=training " in Path(self._log.name).read_text(errors="replace")

    @property
    def began_python(self) -> bool:
        """Whether SIGTERM no longer ends the first process."""
        status = Path(f"/proc/{self.local.pid}/status").read_text()
        return any(int(mask, 16) & 1 << signal.SIGTERM - 1 for mask in re.findall(r"Sig(?:Blk|Cgt):\s*(\w+)", status))

    def alive(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_ours(path)]

    def signal(self, number: int) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> str:
        """What was not in order, or nothing."""
        try:
            code = self.local.wait(LIMIT_S)
            deadline_s = time.monotonic() + 10
            while self.alive() and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            faults = [f"code {code}"] * (code != 0) + ["processes left"] * bool(self.alive())
        except subprocess.TimeoutExpired:
            faults = [f"runs after {LIMIT_S:.0f} s"]
        self.signal(signal.SIGKILL)
        self.local.wait()
        self._log.close()
        newest = newest_checkpoint(self.run_dir)
        saved = 0 if newest is None else read_manifest(newest).train_steps
        if saved != self.steps:
            faults.append(f"checkpoint of step {saved} of {self.steps}" if saved else "no checkpoint")
        return ", ".join(faults)

    def log(self) -> str:
        files = (Path(self._log.name), self.run_dir / "prefetcher.log")
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def _is_ours(self, path: Path) -> bool:
        with suppress(OSError):  # it has ended, or is another user's
            return f"{MARK}={self._mark}".encode() in (path / "environ").read_bytes()
        return False


@contextmanager
def beside(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def seconds_to_training(ranks: int) -> float:
    with tempfile.TemporaryDirectory(prefix="rowcast-stops-") as folder:
        began_s, run = time.monotonic(), Run(Path(folder), ranks)
        while not run.trains and run.local.poll() is None and time.monotonic() < began_s + LIMIT_S:
            time.sleep(POLL_S)
        seconds = time.monotonic() - began_s
        run.signal(signal.SIGKILL)
        run.local.wait()
        return seconds


def stopped(chance: random.Random, ranks: int, longest_s: float, *, twice: bool) -> tuple[str, float, str]:
    """When the stop came, the seconds that it took, and what was not in order."""
    with tempfile.TemporaryDirectory(prefix="rowcast-stops-") as folder:
        run = Run(Path(folder), ranks)
        time.sleep(chance.uniform(0.0, longest_s))
        began_s = time.monotonic()
        when = EARLY if not run.began_python else "before training" if not run.trains else "training"
        run.signal(signal.SIGTERM)
        if twice:
            time.sleep(chance.uniform(0.0, TWICE_WITHIN_S))
            run.signal(signal.SIGTERM)
        faults = run.end()
        if faults and when != EARLY:
            print(run.log(), file=sys.stderr)
        return when, time.monotonic() - began_s, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, counts, in_order = random.Random(options.seed), Counter[str](), Counter[str]()
    slowest_s = 0.0
    with beside(SPINNING):
        seconds_to_training(options.ranks)  # the very first one compiles
        longest_s = 2 * seconds_to_training(options.ranks)
        print(f"stops within {longest_s:.1f} s of the start", flush=True)
        for number in range(options.runs):
            when, seconds, faults = stopped(chance, options.ranks, longest_s, twice=number % 2 == 1)
            counts[when] += 1
            in_order[when] += not faults
            slowest_s = max(slowest_s, seconds)
            print(f"{number + 1:3} {when:22} {seconds:6.1f} s  {faults or 'in order'}", flush=True)
    for when, count in counts.items():
        print(f"{when:26} {in_order[when]:3} of {count:3} in order")
    print(f"the slowest took {slowest_s:.1f} s")
    return int(any(in_order[when] < count for when, count in counts.items() if when != EARLY))


if __name__ == "__main__":
    sys.exit(main())
