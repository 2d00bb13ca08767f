"""Lists the stores of `store.kind` and their settings, without importing them.

A new one is a line here and the store's file; settings of its own are a struct above the line.
"""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import unquote, urlsplit

from msgspec import Meta

from rowcast.job.section import Kinds, Section
from rowcast.job.units import Size, parse_bytes, parse_rows, parse_seconds


class Store(Section, frozen=True, kw_only=True):
    kind: str = "memory"  # where the rows live: {kinds}


class StoreWithTier(Store, frozen=True, kw_only=True):
    """Memory holds the rows that the planner chooses, as many as fit into `memory`."""

    # all memory of the prefetcher; or, for small trials, `"20000 rows"` of each group, whatever else takes memory
    memory: Annotated[str | int, Meta(examples=["8GiB"])]

    def check(self) -> None:
        if self.memory_rows is None:
            parse_bytes(self.memory)

    @property
    def memory_rows(self) -> int | None:
        return parse_rows(self.memory)


class Tiered(StoreWithTier, frozen=True, kw_only=True):
    # the folder of the files, which are scratch space and not a checkpoint; by default `<run_dir>/tables`
    path: str | None = None
    # the most that the files may take; by default as much as a quarter of the memory can index
    disk: Size | None = None

    def check(self) -> None:
        super().check()
        if self.path == "":
            raise ValueError("path is empty; name a folder")
        if self.disk is not None:
            parse_bytes(self.disk)


class Redis(StoreWithTier, frozen=True, kw_only=True):
    # the server or one server of the cluster, `redis://host:6379`, with TLS `rediss://host:6379`; `user@` may stand
    # before the host, and the password is ROWCAST_REDIS_PASSWORD in the prefetcher's environment
    url: Annotated[str, Meta(examples=["redis://host:6379"])]
    timeout: str | None = None  # how long a server may be silent before it counts as lost; `"5s"`

    def check(self) -> None:
        super().check()
        parse_server_url(self.url)
        if not 0.01 <= self.timeout_seconds <= 3600:
            raise ValueError(f'timeout = {self.timeout!r} must be from "10ms" to "1h"')

    @property
    def timeout_seconds(self) -> float:
        return parse_seconds("5s" if self.timeout is None else self.timeout)


@dataclass(frozen=True, slots=True)
class StoreKind:
    module: str  # has open_store(job, group); imported only when the store is used
    note: str = ""  # for docs/job-file.md
    settings: type[Store] = Store  # the keys of [store]


STORES = {
    "memory": StoreKind("rowcast.prefetcher.stores.memory_store"),
    "tiered": StoreKind(
        "rowcast.prefetcher.stores.tiered_store",
        note="the rows that coming steps need in memory, the others in files that grow as rows are trained",
        settings=Tiered,
    ),
    "redis": StoreKind(
        "rowcast.prefetcher.stores.redis_store",
        note="the rows that coming steps need in memory, the others on a Redis server ([redis.md](redis.md))",
        settings=Redis,
    ),
}
Store.kinds = Kinds(STORES)


# the address of a Redis server


PORT = 6379
PASSWORD = "ROWCAST_REDIS_PASSWORD"  # the variable of the environment


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerUrl:
    host: str
    port: int
    tls: bool
    user: str | None


def parse_server_url(text: str) -> ServerUrl:
    """`"rediss://user@host:6379"`. Raises ValueError with a sentence."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"url is no URL of a server; write redis://host:{PORT}") from None
    if parts.password is not None:
        raise ValueError(
            f"url holds a password; remove it and set {PASSWORD} in the environment of the prefetcher, so that it "
            "stays out of job files and reports"
        )
    if parts.scheme not in ("redis", "rediss") or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(
            f"url must be redis://host:{PORT}, or rediss://host:{PORT} for TLS; user@ may stand before the host, and "
            "nothing may follow the port"
        )
    user = unquote(parts.username) if parts.username else None
    return ServerUrl(host=host, port=port or PORT, tls=parts.scheme == "rediss", user=user)
