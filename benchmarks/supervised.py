"""Does a run that a supervisor starts, stops and restarts end with the bits of an undisturbed one?

    python -m benchmarks.supervised [--minutes 15] [--seed 0]

For one pair, then for two ranks: `rowcast.deploy.local` is started as systemd starts a service, and stopped after a
random time as systemd stops one, with SIGTERM for every process at once; in one life of six every process is killed
(SIGKILL), as after systemd's time-out. When the minutes are over, the run continues to its end. Its losses and its
export are compared with those of a run that nobody disturbed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

JOB = """
[job]
name = "supervised"
run_dir = "{run_dir}"
[data]
format = "synthetic"
batch_size = 512
eval_fraction = 0.02
epochs = {epochs}
synthetic = {{ preset = "criteo-kaggle", scale = 0.01, samples = 100000 }}
[tables_from]
embedding_dim = 8
[model]
kind = "dlrm"
bottom_mlp = [64, 8]
top_mlp = [64, 1]
[optimizer]
sparse = {{ kind = "adagrad", lr = 0.05 }}
dense = {{ kind = "adam", lr = 0.001 }}
[eval]
every = 150
[cache]
capacity = "4MiB"
[checkpoint]
every = "20s"
[ranks]
count = {ranks}
parts = 2
[metrics]
prefetcher = "127.0.0.1:0"
trainer = "127.0.0.1:0"
"""
STOP_LIMIT_S = 90.0  # systemd's TimeoutStopSec


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervised")
    parser.add_argument("--minutes", type=float, default=15.0, help="of stops and restarts, for each of the two jobs")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, same = random.Random(options.seed), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = Service(folder, "undisturbed", 1, options.epochs)
        code = whole.lives_until_it_ends()
        assert code == 0, f"the undisturbed run ended with code {code}: {whole.said()}"
        for ranks in (1, 2):
            service = Service(folder, f"ranks-{ranks}", ranks, options.epochs)
            endings = Counter(disturbed(service, chance, 60 * options.minutes))
            code = 0 if service.is_complete else service.lives_until_it_ends()
            differing = service.differences(whole)
            same.append(
                code == 0 and not differing and not endings.keys() - {"killed", "stopped: 0", "ended by itself: 0"}
            )
            told = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
            print(f"ranks {ranks}: lives {told}; the last ended with {code}; other bits in {differing or 'nothing'}")
    return int(not all(same))


def disturbed(service: "Service", chance: random.Random, seconds: float) -> Iterator[str]:
    """How each life ended."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not service.is_complete:
        process = service.start()
        try:
            code = process.wait(chance.choice([chance.uniform(0, 8), chance.uniform(8, 45)]))
            yield f"ended by itself: {code}"
            continue
        except subprocess.TimeoutExpired:
            is_kill = chance.random() < 1 / 6
        everyone(process.pid, signal.SIGKILL if is_kill else signal.SIGTERM)
        try:
            code = process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            everyone(process.pid, signal.SIGKILL)
            yield "not stopped in time"
            continue
        if not is_kill and code:
            print(service.said())
        yield "killed" if is_kill else f"stopped: {code}"


class Service:
    def __init__(self, folder: Path, name: str, ranks: int, epochs: int) -> None:
        self.run_dir, self._config, self._log = folder / name, folder / f"{name}.toml", folder / f"{name}.log"
        self._config.write_text(JOB.format(run_dir=self.run_dir, ranks=ranks, epochs=epochs))

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rowcast.deploy.local", "--config", str(self._config)]
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def is_complete(self) -> bool:
        return (self.run_dir / "complete").exists()

    def lives_until_it_ends(self) -> int:
        return self.start().wait()

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def differences(self, other: "Service") -> list[str]:
        ours, theirs = ((own.run_dir / "losses.f32").read_bytes() for own in (self, other))
        tensors, expected = self._exported(), other._exported()
        found = [name for name in expected if name not in tensors or not same_bits(tensors[name], expected[name])]
        return [*(["losses"] if ours != theirs else []), *found]

    def _exported(self) -> dict[str, torch.Tensor]:
        out = self.run_dir.with_suffix(".safetensors")
        command = [sys.executable, "-m", "rowcast.prefetcher", "export", f"--run={self.run_dir}", f"--out={out}"]
        subprocess.run(command, check=True, capture_output=True)
        return load_file(out)


def same_bits(some: torch.Tensor, others: torch.Tensor) -> bool:
    return some.dtype == others.dtype and some.numpy().tobytes() == others.numpy().tobytes()


def everyone(pid: int, number: signal.Signals) -> None:
    """Signals a process and all that descend from it, as a control group's members are signalled."""
    for own in [pid, *descendants(pid)]:
        try:
            os.kill(own, number)
        except ProcessLookupError:
            continue


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, last = [], {pid}
    while last:
        last = {own for own, parent in parents.items() if parent in last}
        found += sorted(last)
    return found


if __name__ == "__main__":
    sys.exit(main())
