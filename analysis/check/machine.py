"""Checks this machine: versions, run directory, ports, shared memory, and the trainer's device and model.

A child process asks the trainer for its device and model; this one never imports torch.
"""

import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from rowcast.analysis.show import Finding, error, ok, warning
from rowcast.job.file import with_ports_of_pair
from rowcast.job.schema import Job, Transport
from rowcast.prefetcher.run.sizing import check_shared_memory
from rowcast.protocol.transport.endpoint import allowed_clients, load_server
from rowcast.protocol.transport.ring_file import free_shared_memory
from rowcast.runtime.checkpoint_manifest import Manifest, newest_checkpoint, readable
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import threads_of_run, usable_cores
from rowcast.runtime.process import environment
from rowcast.runtime.run_directory import RunDirectory, holder, pair_folder
from rowcast.runtime.telemetry.format_numbers import human_bytes, plural
from rowcast.runtime.telemetry.metrics import Health, Process
from rowcast.runtime.telemetry.server import TelemetryServer

TIMEOUT_S = 120.0
QUESTION = """
import json, sys
from rowcast.job.file import parse_job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.device.cuda import choose_device
from rowcast.trainer.models import build_model
from rowcast.trainer.models.job_model import owns_step
content, num_dense = json.load(sys.stdin)
job = parse_job(content)
try:
    device = choose_device(job.trainer.device)
except ConfigError as error:
    answer = {"refusal": str(error)}
else:
    import torch
    on_cuda = device.type == "cuda"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if on_cuda else str(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] if on_cuda else None
    answer = {"name": name, "free_bytes": free_bytes, "count": torch.cuda.device_count() if on_cuda else 1}
if num_dense is not None:
    try:
        model = build_model(job, num_dense)
        owns_step(job, model)
        answer["dense_bytes"] = sum(own.numel() * own.element_size() for own in model.parameters())
    except ConfigError as error:
        answer["model_refusal"] = str(error)
    except Exception as error:
        answer["model_refusal"] = f"model.kind = {job.model.kind!r} cannot be built: {type(error).__name__}: {error}"
print()
print(json.dumps(answer))
"""
CAN_LOCK_MEMORY = 1 << 14  # CAP_IPC_LOCK: the limit does not apply
DISTRIBUTION = "rowcast"
# the others are still compared with their bounds
SHOWN = ("rowcast", "python", "torch", "triton", "numpy", "numba", "pyarrow", "pyzmq")
# what CI and `make compat` were run with; nothing is known against others
TRIED = {
    "python": ("3.11", "3.12", "3.15"),
    "torch": ("2.11", "2.13", "2.15"),
    "triton": ("3.6", "3.7", "3.9"),
    "numpy": ("2.4", "2.5"),
}


def check_versions(installed: Callable[[str], metadata.Distribution] = metadata.distribution) -> Iterator[Finding]:
    """Compares Python and packages with the lower bounds of the installed rowcast, and reports untested versions.
    `installed` is for tests."""
    try:
        rowcast = installed(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield warning(
            "rowcast is not installed, so its required versions are unknown; run `pip install .` in its folder"
        )
        return
    # `numpy<3,>=1.26` -> {"numpy": "1.26"}; requirements of extras are omitted
    matches = (
        re.match(r"([\w.-]+)[^;]*?>=\s*([\w.]+)", text)
        for text in [f"python{rowcast.metadata['Requires-Python']}", *(rowcast.requires or [])]
        if "extra ==" not in text
    )
    bounds = {match[1]: match[2] for match in matches if match}
    found, faults = {"rowcast": rowcast.version}, list[Finding]()
    for name, least in bounds.items():
        try:
            found[name] = platform.python_version() if name == "python" else installed(name).version
        except metadata.PackageNotFoundError:
            faults.append(error(f"{name} is not installed; run `pip install '{name}>={least}'`"))
        else:
            if release(found[name]) < release(least):
                faults.append(error(f"{name} {found[name]} is older than {least}; install '{name}>={least}'"))
    with suppress(metadata.PackageNotFoundError):  # no run needs it on a CPU
        found["triton"] = installed("triton").version
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    yield from faults or [ok("; ".join([shown, *untried(found)]))]


def untried(found: dict[str, str]) -> Iterator[str]:
    for name, tried in TRIED.items():
        if name in found and release(found[name])[:2] not in map(release, tried):
            yield f"{name} {found[name]} was not tried ({', '.join(tried)} were)"


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_run_directory(job: Job, newest_valid: Callable[[], Manifest | None]) -> Iterator[Finding]:
    """`newest_valid`: returns the checkpoint that a run goes on from, or raises DataError if all are damaged."""
    path = job.run_dir
    folders = [path, *(pair_folder(path, rank, job.ranks.count) for rank in range(job.ranks.count))]
    roles: tuple[Process, Process] = ("prefetcher", "trainer")
    for folder, role in product(dict.fromkeys(folders), roles):
        if (pid := holder(folder, role)) is not None:
            yield error(
                f"run directory {folder} is held by a {role} with process id {pid}; end it or set another job.run_dir"
            )
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield error(f"job.run_dir = {str(path)!r} cannot be made or written in {place}; choose another")
        return
    used = used_by(job)
    if used is not None:
        yield warning(used)
        return
    newest = newest_valid()
    where = "is free to use" if newest is None else f"holds a run that continues after {newest.train_steps} train steps"
    yield ok(f"{path} {where}")


def check_threads(job: Job) -> Iterator[Finding]:
    """Finds the trainer's number of threads, on this host. Raises ConfigError if a run there has another."""
    newest, cores = newest_checkpoint(job.run_dir), max(1, usable_cores() // job.ranks.on_host)
    was = None if newest is None else readable(newest)
    first, recorded = job.first_threads(cores), 0 if was is None else was.machine.threads
    found = plural(threads_of_run(job.trainer.threads, first, recorded, trains=True), "thread")
    idle = f"; {plural(cores, 'core')} for each trainer" if first == 1 < cores else ""
    yield ok(f"{found}, as the run in {job.run_dir}" if recorded else f"{found}, which the run keeps{idle}")


def used_by(job: Job) -> str | None:
    try:
        RunDirectory(job.run_dir, "prefetcher").refuse_complete(job.data.epochs, job.eval.patience)
    except ConfigError as refusal:
        return str(refusal)
    if (job.run_dir / "report.json").exists() and not any((job.run_dir / "checkpoints").glob("step-*")):
        return (
            f"{job.run_dir} holds the report of an earlier run; add --fresh to replace it, or set another job.run_dir"
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device and the model as the trainer's own start reports them."""

    name: str = "none"
    free_bytes: int | None = None  # free device memory; None if the device uses host memory
    refusal: str | None = None  # why the device cannot be used
    count: int = 1  # such devices on this host
    model_refusal: str | None = None  # why the model cannot be built
    dense_bytes: int | None = None  # size of the model's weights; None if the model was not built


def ask_trainer(job: Job, num_dense: int | None, command: tuple[str, ...] = (sys.executable, "-c", QUESTION)) -> Device:
    """Lets the trainer choose its device here and build the model, if `num_dense` is known. `command` is for tests."""
    question, device = msgspec.json.encode([job, num_dense]), f"trainer.device = {job.trainer.device!r}"
    try:
        asked = subprocess.run(
            command, input=question, env=environment(), capture_output=True, timeout=TIMEOUT_S, check=True
        )
        return Device(**json.loads(asked.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Device(refusal=f"torch did not say within {TIMEOUT_S:g} s which device {device} is; look at the driver")
    except (subprocess.CalledProcessError, OSError, ValueError, TypeError, IndexError) as failure:
        said = getattr(failure, "stderr", None)
        last = (said.decode(errors="replace") if said else str(failure)).strip().splitlines()[-1]
        return Device(refusal=f"the trainer's process cannot say which device {device} is ({last}); repair torch first")


def check_ports(job: Job) -> Iterator[Finding]:
    """Checks the ports of every pair on a host, which are all open at once."""
    names: tuple[Process, Process] = ("prefetcher", "trainer")
    pairs = [with_ports_of_pair(job, rank).metrics for rank in range(job.ranks.on_host)]
    with ExitStack() as stack:
        for name in names:
            refusals = []
            for metrics in pairs:
                try:
                    certificate = metrics.certfile, metrics.keyfile
                    server = TelemetryServer(name, getattr(metrics, name), CollectorRegistry(), Health(), certificate)
                    stack.enter_context(server)
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


def check_model(job: Job, device: Device) -> Iterator[Finding]:
    if device.model_refusal is not None:
        yield error(device.model_refusal)
    elif device.dense_bytes is not None:
        trained = "[optimizer.dense]" if job.optimizer.dense else "the model's own step"
        yield ok(f"{job.model.kind}, {human_bytes(device.dense_bytes)} of dense weights, trained by {trained}")


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
