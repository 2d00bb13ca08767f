"""Checks the machine: ports, shared memory, the trainer's device, page-locked memory.

A child process examines the device with torch; this one never imports torch.
"""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from rowcast.analysis.check.findings import Finding, error, ok, warning
from rowcast.job.file import with_ports_of_pair
from rowcast.job.schema import Job, Transport
from rowcast.prefetcher.run.sizing import check_shared_memory
from rowcast.protocol.transport.callers import allowed_clients, load_server
from rowcast.protocol.transport.ring_file import free_shared_memory
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.runtime.telemetry.metrics import Health, Process
from rowcast.runtime.telemetry.server import TelemetryServer

TIMEOUT_S = 120.0
QUESTION = """
import json, sys
from rowcast.trainer.device.streams import choose_device
try:
    device = choose_device(sys.argv[1])
except ValueError as error:
    answer = {"refusal": str(error)}
else:
    import torch
    on_cuda = device.type == "cuda"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if on_cuda else str(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] if on_cuda else None
    answer = {"name": name, "free_bytes": free_bytes, "count": torch.cuda.device_count() if on_cuda else 1}
print(json.dumps(answer))
"""
CAN_LOCK_MEMORY = 1 << 14  # CAP_IPC_LOCK: the limit does not apply


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    name: str = "none"
    free_bytes: int | None = None  # of device memory; None: the device uses host memory
    refusal: str | None = None  # why the device cannot be used
    count: int = 1  # such devices on this host


def ask_device(name: str, command: tuple[str, ...] = (sys.executable, "-c", QUESTION)) -> Device:
    """Finds the device of `trainer.device = name` on this machine. `command` is for tests."""
    try:
        asked = subprocess.run([*command, name], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return Device(**json.loads(asked.stdout))
    except subprocess.TimeoutExpired:
        return Device(
            refusal=f"torch did not say within {TIMEOUT_S:g} s which device trainer.device = {name!r} is; "
            f"look at the driver"
        )
    except (subprocess.CalledProcessError, OSError, ValueError, TypeError) as failure:
        said = getattr(failure, "stderr", None) or str(failure)
        last = said.strip().splitlines()[-1]
        return Device(
            refusal=f"the trainer's process cannot say which device trainer.device = {name!r} is ({last}); "
            f"repair torch first"
        )


def check_ports(job: Job) -> Iterator[Finding]:
    """Checks the ports of every pair on a host, which are all open at once."""
    names: tuple[Process, Process] = ("prefetcher", "trainer")
    pairs = [with_ports_of_pair(job, rank).metrics for rank in range(job.ranks.on_host)]
    with ExitStack() as stack:
        for name in names:
            refusals = []
            for metrics in pairs:
                try:
                    stack.enter_context(TelemetryServer(name, metrics, CollectorRegistry(), Health()))
                except ConfigError as refusal:
                    refusals.append(str(refusal))
            yield from (error(refusal) for refusal in refusals)
            if not refusals:
                last = "" if len(pairs) == 1 else f" and so on to {getattr(pairs[-1], name)}"
                yield ok(f"[metrics] {name} = {getattr(job.metrics, name)}{last} is free")


def check_rings(ring_bytes: int, pairs: int = 1) -> Iterator[Finding]:
    """`pairs` of prefetcher and trainer on this host. Raises ConfigError if one pair's rings do not fit."""
    check_shared_memory(ring_bytes)
    free, rings = free_shared_memory(), "two rings" if pairs == 1 else f"two rings of each of {pairs} pairs"
    if 2 * ring_bytes * pairs > free:
        yield error(
            f"{rings}, of {human_bytes(ring_bytes)} each, need {human_bytes(2 * ring_bytes * pairs)} of /dev/shm, "
            f"where {human_bytes(free)} are free; make transport.ring smaller or enlarge /dev/shm"
        )
        return
    yield ok(f"{rings} of {human_bytes(ring_bytes)} fit into the {human_bytes(free)} that are free")


def check_keys(transport: Transport) -> Iterator[Finding]:
    assert transport.keys is not None, "checked with the job file"
    keys = Path(transport.keys)
    load_server(keys)  # raises ConfigError as a run would
    clients = allowed_clients(keys)
    if clients:
        yield ok(f"{keys} has the prefetcher's key and lets in {', '.join(sorted(clients.values()))}")
    else:
        yield error(
            f"{keys} lets no trainer in; `prefetcher keys --out {keys} --client NAME` makes a key for a trainer"
        )


def check_device(device: Device, job: Job, cache_bytes: int | None, staging_bytes: int) -> Iterator[Finding]:
    """`cache_bytes` is None if the data did not tell how large the cache would be."""
    if device.refusal is not None:
        yield error(device.refusal)
        return
    if device.free_bytes is None:
        if job.model.precision == "tf32":
            yield error(
                f'model.precision = "tf32" needs a CUDA device, and this is {device.name}; set it to "fp32" or "bf16"'
            )
        else:
            yield ok(f"{device.name}, which uses host memory")
        return
    if job.ranks.on_host > device.count:
        yield error(
            f"{job.ranks.on_host} ranks of a host need as many devices, and there are {device.count}; set "
            f'ranks.per_host = {device.count} or less, or trainer.device = "cpu"'
        )
    needed = (cache_bytes or 0) + staging_bytes
    parts = f"rows ({human_bytes(cache_bytes or 0)}) and staging ({human_bytes(staging_bytes)})"
    if needed > device.free_bytes:
        free = human_bytes(device.free_bytes)
        yield error(f"{device.name} has {free} free, too little for {parts}; lower cache.capacity or data.batch_size")
    else:
        yield ok(f"{device.name}, {human_bytes(device.free_bytes)} free for {parts} and the dense model")


def check_memlock(device: Device, ring_bytes: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the driver may page-lock the rings. `root` is for tests."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if device.free_bytes is None or device.refusal is not None:
        yield ok("not needed: no copies to a CUDA device")
    elif limit == resource.RLIM_INFINITY or may_lock(root) or limit >= 2 * ring_bytes:
        yield ok(f"two rings of {human_bytes(ring_bytes)} may be page-locked")
    else:
        yield warning(
            f"the memlock limit is {human_bytes(limit)} and two rings take {human_bytes(2 * ring_bytes)}: they may not "
            "be page-locked, which "
            f"makes copies slower; raise `ulimit -l` to {2 * ring_bytes // 1024} or make transport.ring smaller"
        )


def may_lock(root: Path) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", (root / "proc/self/status").read_text(), flags=re.MULTILINE)
    return match is not None and bool(int(match[1], 16) & CAN_LOCK_MEMORY)
