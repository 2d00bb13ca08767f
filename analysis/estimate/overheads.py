"""Measures the time that a step spends outside its kernels, by type: both processes run a small job with --timeline.

Its kernels are measured as well, and its plans say how often each step calls them. The trainer's processor time tells
how much is left, and its timeline divides it among launch, Python and lock. Other programs only add to the times of the
timeline, so each is that of the fastest quarter of the steps.

Times exchanges between ranks, with as many processes as a job has on a host.

    python -m rowcast.analysis.estimate.overheads NUMBER COUNT DEVICE FOLDER

Number 0 writes its samples to stdout: bytes that it sends to the others, and seconds. These are of the wall clock, as
other processes and threads do the work.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rowcast.analysis.estimate.planned import EXCHANGE, NETWORK, plan_job
from rowcast.analysis.estimate.rates_file import KernelRates, KernelSample, fitted
from rowcast.analysis.estimate.recorded import recorded_run
from rowcast.analysis.timeline import Recording, ended, lives, read_pair
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.protocol.parts import Rank
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.process import ended_badly, ended_together, start_child, stop_with_parent
from rowcast.runtime.telemetry.timeline import MAIN
from rowcast.trainer.device.cuda import choose_device, make_streams
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.run.rank_group import RankGroup, never

SENT_BYTES = (10**3, 10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7)
WARM, REPEATS = 3, 15
TIMEOUT_S = 60.0
GB = 1e9


def exchange_kernels(device: torch.device, job: Job, network_gbs: float | None) -> dict[str, KernelRates]:
    """Returns None for a job of one rank. Raises ConfigError."""
    kernels = {}
    if job.ranks.on_host > 1:
        kernels[EXCHANGE] = exchange_rates(device, job.ranks.on_host)
    if network_gbs is not None:
        kernels[NETWORK] = KernelRates(terms={"bytes": 1 / (network_gbs * GB)})
    return kernels


def exchange_rates(device: torch.device, count: int) -> KernelRates:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="rowcast-rates-"))
        processes = [stack.enter_context(started(number, count, device.type, folder)) for number in range(count)]
        for process in processes:
            stack.callback(process.kill)
        said, errors = processes[0].communicate()
        if processes[0].returncode:
            reason = errors.strip().splitlines()[-1:]
            raise ConfigError(f"an exchange between {count} processes cannot be measured here: {' '.join(reason)}")
        samples = [KernelSample({"bytes": nbytes}, seconds) for nbytes, seconds in json.loads(said)]
        rates = fitted(samples, ("1", "bytes"))
        # the fewest take as long as none
        return msgspec.structs.replace(rates, measured={"bytes": (0.0, float(SENT_BYTES[-1]))})


def started(number: int, count: int, device: str, folder: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "rowcast.analysis.estimate.overheads",
        str(number),
        str(count),
        device,
        folder,
    ]
    output = subprocess.PIPE if number == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        command, stdout=output, stderr=output, text=True, preexec_fn=partial(stop_with_parent, os.getpid())
    )


def take_part(number: int, count: int, device: torch.device, folder: Path) -> list[tuple[float, float]]:
    store = FileStore(str(folder / "store"), count)
    group = RankGroup(store, Rank(number=number, count=count, parts=count), TIMEOUT_S)
    collectives, streams = group.connect(device, lambda: None, never), make_streams(device)
    assert collectives is not None, "nobody gives up"
    spent = []
    for nbytes in SENT_BYTES:
        given = torch.zeros(count * (nbytes // 4 // (count - 1)), device=device)
        output = torch.empty_like(given)
        seconds = []
        for _ in range(WARM + REPEATS):
            began_s = time.perf_counter()
            collectives.all_to_all(output, given, None, None).wait()
            streams.settle()
            seconds.append(time.perf_counter() - began_s)
        spent.append((float(nbytes), median(seconds[WARM:])))
    group.close()
    return spent


def main(number: int, count: int, device: str, folder: Path) -> None:
    chosen = choose_device("auto" if device == "cuda" else device, number)
    with on_device(chosen):
        samples = take_part(number, count, chosen, folder)
    if number == 0:
        sys.stdout.write(json.dumps(samples))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    except (RowcastError, ValueError) as error:  # ValueError: there is no such device
        sys.exit(str(error))


NUM_DENSE = 13
BATCHES = (128, 2048)  # the second one tells what each look-up adds
STEPS, WARM_STEPS = 200, 40
ON_MAIN, BESIDE_MAIN = ("copy in", "fill", "step"), ("copy out",)  # tasks of kernels, by thread
SMALL_JOB = """
job.run_dir = "{folder}/run"
data = {{ format = "synthetic", batch_size = {batch}, synthetic = {{ preset = "criteo-kaggle", scale = 0.001 }} }}
tables_from.embedding_dim = 8
model = {{ kind = "dlrm", bottom_mlp = [8], top_mlp = [1] }}
optimizer.sparse = {{ kind = "sgd", lr = 0.01 }}
optimizer.dense = {{ kind = "sgd", lr = 0.01 }}
cache.capacity = "{rows} rows"
lookahead.bundle = 1
checkpoint.every = 0
trainer = {{ threads = {threads}, device = "{device}" }}
"""


class HostSeconds(NamedTuple):
    """Seconds of a step."""

    processor: float  # processor time of the trainer, except its kernels
    main: float  # the main thread, beside its kernels and waits
    phases: float  # the part of it within the step's phases
    others: float  # threads of messages and checks, beside the copies of rows
    message: float
    wait: float
    lookups: float  # their number


def small_job(folder: Path, batch: int, device: str, threads: int) -> tuple[Path, Job]:
    """Returns a job with small tables and a small model, and its file."""
    config = folder / "job.toml"
    rows = 2000 + 5 * batch  # few enough to be fetched and written back in every step
    config.write_text(SMALL_JOB.format(folder=folder, batch=batch, rows=rows, device=device, threads=threads))
    return config, load_job(config)


def overheads(device: str, threads: int, kernels: Mapping[str, KernelRates]) -> dict[str, KernelRates]:
    """`kernels`: of the small job. Raises RowcastError."""
    small, large = (spent(batch, device, threads, kernels) for batch in BATCHES)
    a_lookup = max(0.0, (large.others - small.others) / max(1.0, large.lookups - small.lookups))
    launch = max(0.0, small.phases)
    shown = {"launch": launch, "Python": max(1e-9, small.main - launch), "lock": max(0.0, small.others)}
    by_kind = {name: own * max(0.0, small.processor) / sum(shown.values()) for name, own in shown.items()}
    rates = {name: KernelRates(terms={"1": own}) for name, own in by_kind.items()}
    lock = {"1": max(0.0, by_kind["lock"] - a_lookup * small.lookups), "lookups": a_lookup}
    return rates | {
        "lock": KernelRates(terms=lock),
        "message": KernelRates(terms={"1": small.message}),
        "wait": KernelRates(terms={"1": small.wait}),
    }


def spent(batch: int, device: str, threads: int, kernels: Mapping[str, KernelRates]) -> HostSeconds:
    with TemporaryDirectory(prefix="rowcast-rates-") as folder:
        config, job = small_job(Path(folder), batch, device, threads)
        options, log = [f"--config={config}", "--timeline"], Path(folder) / "log"
        children = [
            start_child("prefetcher", "rowcast.prefetcher", ["run", *options, f"--max-steps={STEPS}"], log),
            start_child("trainer", "rowcast.trainer", ["run", *options], log),
        ]
        seen: list[tuple[float, float]] = []  # moments, and the trainer's processor time then
        failed = ended_together(children, meanwhile=lambda: seen.extend(processor_time(children[1].process.pid)))
        if failed is not None:
            raise ended_badly(failed)
        pair = read_pair(job.run_dir)
        plan, _ = plan_job(job, STEPS)
    recorded, ends = recorded_run(pair), np.array([ended(life.step) for life in lives(pair)]) / 1e6
    processor = np.diff(np.interp(ends, *np.transpose(seen)), prepend=0.0)

    def of_kernels(tasks: Sequence[str]) -> F64:
        """Seconds in each step. On a device they take none of the host's time but that of their launch."""
        own = [[call for call in step.calls if call.task in tasks and device == "cpu"] for step in plan]
        return np.array(
            [sum(call.calls * kernels[call.kernel].seconds(call.counts) for call in calls) for calls in own]
        )

    work = seconds_of(pair.trainer, [MAIN], "work", ends)
    awake = np.diff(ends, prepend=ends[0]) - seconds_of(pair.trainer, [MAIN], "wait", ends)
    beside = seconds_of(pair.trainer, ["mail", "sender"], "work", ends)
    messages = [recorded.of_step[name].values() for name in ("rows sent", "rows back")]
    return HostSeconds(
        processor=float(np.mean((processor - of_kernels(ON_MAIN + BESIDE_MAIN))[WARM_STEPS:])),
        main=usual(awake - of_kernels(ON_MAIN)),
        phases=usual(work - of_kernels(ON_MAIN)),
        others=usual(beside - of_kernels(BESIDE_MAIN)),
        message=usual([*chain(*messages)]),
        wait=usual([*recorded.of_step["rows filled"].values()]),
        lookups=usual([sum(call.counts["lookups"] for call in step.calls if call.kernel == "lookup") for step in plan]),
    )


def processor_time(pid: int) -> Iterator[tuple[float, float]]:
    """Returns the moment and the seconds that the process has taken so far; nothing once it has ended."""
    with suppress(OSError, IndexError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        yield time.perf_counter(), sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def seconds_of(recording: Recording, tracks: Iterable[str], kind: str, ends: F64) -> F64:
    """Seconds of spans of a kind that ended up to the end of each step and after the one before."""
    spans = [span for track in tracks for span in recording.track(track) if span.cat == kind]
    step = np.searchsorted(ends, [ended(span) / 1e6 for span in spans])
    sums: F64 = np.bincount(step, [(span.dur or 0.0) / 1e6 for span in spans], len(ends) + 1)[: len(ends)].astype(float)
    return sums


def usual(seconds: Sequence[float] | F64) -> float:
    later = seconds[WARM_STEPS:]
    return float(np.quantile(later, 0.25)) if len(later) else 0.0
