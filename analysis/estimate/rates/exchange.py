"""Times exchanges between ranks, with as many processes as a job has on a host.

    python -m rowcast.analysis.estimate.rates.exchange NUMBER COUNT DEVICE FOLDER

Number 0 writes its samples to stdout: bytes that it sends to the others, and seconds. These are of the wall clock, as
other processes and threads do the work.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rowcast.analysis.estimate.planned import EXCHANGE, NETWORK
from rowcast.analysis.estimate.rates_file import KernelRates, Sample, fitted
from rowcast.job.schema import Job
from rowcast.protocol.parts import Rank
from rowcast.runtime.children import stop_with_parent
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.device.cuda import choose_device, make_streams
from rowcast.trainer.device.streams import on_device
from rowcast.trainer.run.rank_group import RankGroup, never

SENT_BYTES = (10**3, 10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7)
WARM, REPEATS = 3, 15
TIMEOUT_S = 60.0
GB = 1e9


def exchange_kernels(device: torch.device, job: Job, network_gbs: float | None) -> dict[str, KernelRates]:
    """None for a job of one rank. Raises ConfigError."""
    found = {}
    if job.ranks.on_host > 1:
        found[EXCHANGE] = exchange_rates(device, job.ranks.on_host)
    if network_gbs is not None:
        found[NETWORK] = KernelRates(terms={"bytes": 1 / (network_gbs * GB)})
    return found


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
        samples = [Sample({"bytes": nbytes}, seconds) for nbytes, seconds in json.loads(said)]
        rates = fitted(samples, ("1", "bytes"))
        # the fewest take as long as none
        return msgspec.structs.replace(rates, measured={"bytes": (0.0, float(SENT_BYTES[-1]))})


def started(number: int, count: int, device: str, folder: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "rowcast.analysis.estimate.rates.exchange",
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
    found = []
    for nbytes in SENT_BYTES:
        given = torch.zeros(count * (nbytes // 4 // (count - 1)), device=device)
        output = torch.empty_like(given)
        seconds = []
        for _ in range(WARM + REPEATS):
            began_s = time.perf_counter()
            collectives.all_to_all(output, given, None, None).wait()
            streams.settle()
            seconds.append(time.perf_counter() - began_s)
        found.append((float(nbytes), median(seconds[WARM:])))
    group.close()
    return found


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
