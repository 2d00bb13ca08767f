"""Adapts the job file to one pair of prefetcher and trainer, among several on a host or in a run directory."""

from pathlib import Path

import msgspec

from rowcast.job.schema import Job
from rowcast.runtime.run_directory import pair_folder


def with_ports_of_pair(job: Job, rank: int) -> Job:
    """`job` with the ports of a rank, which count from those in the file: of metrics two for each rank of a host, of
    the link one."""
    local = rank % job.ranks.on_host
    metrics, transport = job.metrics, job.transport
    moved = {name: port_above(getattr(metrics, name), 2 * local) for name in ("prefetcher", "trainer")}
    if transport.is_tcp:
        transport = msgspec.structs.replace(transport, endpoint=port_above(transport.endpoint, local))
    return msgspec.structs.replace(job, metrics=msgspec.structs.replace(metrics, **moved), transport=transport)


def port_above(address: str, ports: int) -> str:
    """Adds to the port, except to 0, which means any free port."""
    host, _, given = address.rpartition(":")
    port = given.removesuffix("+")
    return address if int(port) == 0 else f"{host}:{int(port) + ports}{given.removeprefix(port)}"


def with_tables_of_pair(job: Job, rank: int) -> Job:
    """`job` for the stores of a rank: its run directory and its store.path are the pair's folders."""
    count, store = job.ranks.count, job.store
    if (path := getattr(store, "path", None)) is not None:
        store = msgspec.structs.replace(store, path=str(pair_folder(Path(path), rank, count)))
    own = msgspec.structs.replace(job.job, run_dir=str(pair_folder(job.run_dir, rank, count)))
    return msgspec.structs.replace(job, job=own, store=store)
