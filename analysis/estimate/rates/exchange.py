"""Times exchanges between ranks, with as many processes as a job has on a host."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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
from rowcast.trainer.run.rank_group import RankGroup

SENT_BYTES = (10**3, 10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7)
WARM, REPEATS = 3, 15
TIMEOUT_S = 60.0
GB = 1e9


def exchange_kernels(device: torch.device, job: Job, network_gbs: float | None) -> dict[str, KernelRates]:
    """None for a job of one rank. Raises ConfigError."""
    found, count = {}, job.ranks.on_host
    if count > 1:
        processes = ProcessPoolExecutor(count, get_context("spawn"), stop_with_parent, (os.getpid(),))
        with TemporaryDirectory(prefix="rowcast-rates-") as folder, processes:
            parts = [processes.submit(take_part, number, count, device.type, folder) for number in range(count)]
            try:
                rates = fitted(parts[0].result(), ("1", "bytes"))
            except (RowcastError, ValueError) as error:  # ValueError: there is no such device
                raise ConfigError(f"an exchange between {count} processes cannot be measured here: {error}") from None
        # the fewest take as long as none
        found[EXCHANGE] = msgspec.structs.replace(rates, measured={"bytes": (0.0, float(SENT_BYTES[-1]))})
    if network_gbs is not None:
        found[NETWORK] = KernelRates(terms={"bytes": 1 / (network_gbs * GB)})
    return found


def take_part(number: int, count: int, device: str, folder: str) -> list[Sample]:
    """The bytes that this process sends to the others, and seconds. These are of the wall clock, as other processes and
    threads do the work."""
    chosen = choose_device("auto" if device == "cuda" else device, number)
    with on_device(chosen):
        store = FileStore(str(Path(folder) / "store"), count)
        group = RankGroup(store, Rank(number=number, count=count, parts=count), TIMEOUT_S)
        collectives, streams = group.connect(chosen, lambda: None), make_streams(chosen)
        found = []
        for nbytes in SENT_BYTES:
            given = torch.zeros(count * (nbytes // 4 // (count - 1)), device=chosen)
            output = torch.empty_like(given)
            seconds = []
            for _ in range(WARM + REPEATS):
                began_s = time.perf_counter()
                collectives.all_to_all_single(output, given, async_op=True).wait()
                streams.settle()
                seconds.append(time.perf_counter() - began_s)
            found.append(Sample({"bytes": float(nbytes)}, median(seconds[WARM:])))
        group.close()
        return found
