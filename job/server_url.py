"""Reads `store.url`, the address of a Redis server. Its errors never quote the URL, which may hold a password."""

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

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
