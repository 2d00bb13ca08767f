"""Implements `prefetcher keys`: makes the CURVE keys of `transport.keys` and checks them.

`protocol/transport/endpoint.py` describes the files.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import zmq
from typer import Option

from rowcast.protocol.transport.endpoint import (
    CLIENTS,
    PUBLIC_END,
    SECRET_END,
    SERVER,
    KeyPair,
    check_folder,
    fingerprint,
    load_pair,
    load_public,
    load_server,
)
from rowcast.runtime.errors import ConfigError

DEFAULT_CLIENT = "trainer"


def keys(
    out: Annotated[Path | None, Option(help="The folder of keys to make, or to add clients to.", metavar="DIR")] = None,
    clients: Annotated[
        list[str] | None, Option("--client", help="A trainer's name. Repeatable.", show_default=DEFAULT_CLIENT)
    ] = None,
    check: Annotated[Path | None, Option(help="A folder of keys to check instead.", metavar="DIR")] = None,
) -> None:
    """Raises ConfigError."""
    if (out is None) == (check is None):
        raise ConfigError("say either --out DIR, to make keys, or --check DIR, to check them")
    if check is not None and clients:
        raise ConfigError("--client goes with --out, not with --check")
    made = check_keys(check) if check is not None else make_keys(out, clients or [DEFAULT_CLIENT]) if out else []
    for line in made:
        typer.echo(line)


def make_keys(folder: Path, clients: list[str]) -> list[str]:
    """Makes the server's pair unless it exists, and one pair per client. Returns what was made.

    Raises ConfigError before writing anything if a client already has a pair or a name cannot be a file's."""
    for name in clients:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
            raise ConfigError(f"--client {name!r} must be up to 64 letters, digits, '.', '_' and '-'")
        for end in (PUBLIC_END, SECRET_END):
            if (folder / CLIENTS / f"{name}{end}").exists() or clients.count(name) > 1:
                raise ConfigError(
                    f"{folder / CLIENTS} has a key of {name!r} already; remove it first, or choose another name"
                )
    for each in (folder, folder / CLIENTS):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(each)
    is_new = not (folder / f"{SERVER}{SECRET_END}").exists()
    made = [_make_pair(folder, SERVER)] if is_new else []
    load_server(folder)  # raises if an existing one is damaged
    return made + [_make_pair(folder / CLIENTS, name) for name in clients]


def check_keys(folder: Path) -> list[str]:
    """Returns one line per key. Raises ConfigError for the first that is damaged."""
    check_folder(folder)
    check_folder(folder / CLIENTS)
    lines = [*_check_pairs(folder), *(f"{CLIENTS}/{line}" for line in _check_pairs(folder / CLIENTS))]
    if not lines:
        raise ConfigError(f"{folder} holds no key; make them with `prefetcher keys --out {folder}`")
    return lines


def _check_pairs(folder: Path) -> Iterator[str]:
    names = {path.stem for end in (PUBLIC_END, SECRET_END) for path in folder.glob(f"*{end}")}
    for name in sorted(names):
        public_path, secret_path = (folder / f"{name}{end}" for end in (PUBLIC_END, SECRET_END))
        public = load_public(public_path) if public_path.exists() else None
        pair = load_pair(secret_path) if secret_path.exists() else None
        if public is not None and pair is not None and pair.public != public:
            raise ConfigError(f"{public_path} and {secret_path} are not a pair; make both again with `prefetcher keys`")
        halves = " and ".join(half for half, there in (("public", public), ("secret", pair)) if there is not None)
        yield f"{name}: {fingerprint(public or (pair.public if pair else b''))} ({halves})"


def _make_pair(folder: Path, name: str) -> str:
    public, secret = zmq.curve_keypair()
    pair = KeyPair(public=public, secret=secret)
    _write_new(folder / f"{name}{SECRET_END}", 0o600, certificate(pair.public, pair.secret))
    _write_new(folder / f"{name}{PUBLIC_END}", 0o644, certificate(pair.public, None))
    return f"made {folder / name}{PUBLIC_END} and {SECRET_END}: {fingerprint(pair.public)}"


def certificate(public: bytes, secret: bytes | None) -> str:
    """Writes the format of `zmq.auth`, whose function leaves the file readable by others for a moment."""
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines = ["#   Secret: do not share it.", *lines, f'    secret-key = "{secret.decode()}"']
    return "\n".join(lines) + "\n"


def _write_new(path: Path, mode: int, content: str) -> None:
    """Creates the file with its final mode. Raises ConfigError if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({error.strerror}); remove the existing file, or choose another folder"
        ) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
