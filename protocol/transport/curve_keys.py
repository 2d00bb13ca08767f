"""Loads the CURVE keys of a run and checks that other users cannot read or change them.

    keys/                    0700
      server.key             the prefetcher's public key: a trainer connects to no other prefetcher
      server.key_secret      0600, only on the prefetcher's host
      clients/               0700
        NAME.key             a trainer that may connect; removing the file excludes it
        NAME.key_secret      0600, only on that trainer's host

Files have the format of `zmq.auth` certificates. On one host both sides may use the same folder; a trainer on another
host needs only `server.key` and its `clients/NAME.key_secret`. `prefetcher keys` makes and checks them.
"""

import hashlib
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from rowcast.runtime.errors import ConfigError

SERVER = "server"
CLIENTS = "clients"
PUBLIC_END, SECRET_END = ".key", ".key_secret"
KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    public: bytes  # z85, 40 characters
    secret: bytes = field(repr=False)  # z85, 40 characters


def fingerprint(public: bytes) -> str:
    """Names a key in logs: 16 hex digits of the SHA-256 of the z85 public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def load_server(keys: Path) -> KeyPair:
    """Returns the prefetcher's pair. Raises ConfigError."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    return load_pair(keys / f"{SERVER}{SECRET_END}")


def load_client(keys: Path) -> tuple[KeyPair, bytes]:
    """Returns the trainer's pair and the prefetcher's public key. Raises ConfigError."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    found = sorted((keys / CLIENTS).glob(f"*{SECRET_END}"))
    if len(found) != 1:
        raise ConfigError(
            f"{keys / CLIENTS} holds {len(found)} secret keys (*{SECRET_END}); "
            "leave this trainer's own there, and no other"
        )
    return load_pair(found[0]), load_public(keys / f"{SERVER}{PUBLIC_END}")


def allowed_clients(keys: Path) -> dict[bytes, str]:
    """Maps the public key of every trainer that may connect now to its name. A bad file admits no trainer."""
    allowed = {}
    for path in sorted((keys / CLIENTS).glob(f"*{PUBLIC_END}")):
        try:
            allowed[load_public(path)] = path.stem
        except ConfigError:
            continue  # `prefetcher keys --check` names it
    return allowed


def load_pair(path: Path) -> KeyPair:
    """Raises ConfigError if other users could read the secret, or the two keys do not match."""
    _check_owned(path, stat.S_IFREG, 0o600, "a file", f"chmod 600 {path}")
    public, secret = _load(path)
    if secret is None or not _is_key(secret):
        raise ConfigError(f"{path} holds no secret key; make a new one with `prefetcher keys`")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"the public and the secret key in {path} do not belong together; make new ones with `prefetcher keys`"
        )
    return KeyPair(public=public, secret=secret)


def load_public(path: Path) -> bytes:
    """Raises ConfigError if other users could have changed the file, or if it holds a secret, which must not be
    copied."""
    _check_owned(path, stat.S_IFREG, 0o755, "a file", f"chmod 644 {path}")
    public, secret = _load(path)
    if secret is not None:
        raise ConfigError(f"{path} is for a public key, but holds a secret one; make new ones with `prefetcher keys`")
    return public


def check_folder(folder: Path) -> None:
    """Raises ConfigError if other users could add keys there."""
    _check_owned(folder, stat.S_IFDIR, 0o755, "a folder", f"chmod 700 {folder}")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} holds no key ({error}); make a new one with `prefetcher keys`") from error
    if not _is_key(public):
        raise ConfigError(f"{path} holds no public key of 40 characters; make a new one with `prefetcher keys`")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _check_owned(path: Path, kind: int, most: int, name: str, remedy: str) -> None:
    """Raises ConfigError unless the path is of this kind, belongs to this user, and has no mode bits beyond `most`."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}); set transport.keys to a folder that `prefetcher keys` made"
        ) from error
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & ~most:
        raise ConfigError(
            f"{path} must be {name} of user {os.getuid()} with no more than mode {most:04o}, but it belongs to user "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; {remedy}"
        )
