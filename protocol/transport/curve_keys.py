"""The CURVE keys of a run: which files there are, and what makes them fit to be used.

    keys/                    0700
      server.key             the prefetcher's public key: a trainer talks to nobody else
      server.key_secret      0600, on the prefetcher's host only
      clients/               0700
        NAME.key             a trainer that may come in; taking the file away shuts it out
        NAME.key_secret      0600, on that trainer's host only

Files have the format of `zmq.auth` certificates. A folder for both sides serves both on one host; a trainer elsewhere needs `server.key`
and its own `clients/NAME.key_secret`, no more. `prefetcher keys` makes and checks them.
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
    """What logs name a key by: 16 hex digits of the SHA-256 of the z85 public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def load_server(keys: Path) -> KeyPair:
    """Raises ConfigError where the prefetcher may not or cannot use its key."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    return load_pair(keys / f"{SERVER}{SECRET_END}")


def load_client(keys: Path) -> tuple[KeyPair, bytes]:
    """The trainer's pair and the prefetcher's public key. Raises ConfigError."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    found = sorted((keys / CLIENTS).glob(f"*{SECRET_END}"))
    if len(found) != 1:
        raise ConfigError(
            f"{keys / CLIENTS} holds {len(found)} secret keys (*{SECRET_END}); leave this trainer's own there, and no other"
        )
    return load_pair(found[0]), load_public(keys / f"{SERVER}{PUBLIC_END}")


def allowed_clients(keys: Path) -> dict[bytes, str]:
    """Public key -> name of every trainer that may come in now. A file that is not in order lets nobody in."""
    allowed = {}
    for path in sorted((keys / CLIENTS).glob(f"*{PUBLIC_END}")):
        try:
            allowed[load_public(path)] = path.stem
        except ConfigError:
            continue  # `prefetcher keys --check` names it
    return allowed


def load_pair(path: Path) -> KeyPair:
    """Raises ConfigError where others could read the secret, or the two keys do not belong together."""
    _check_owned(path, stat.S_IFREG, 0o600, "a file", f"chmod 600 {path}")
    public, secret = _load(path)
    if secret is None or not _is_key(secret):
        raise ConfigError(f"{path} holds no secret key; make it anew with `prefetcher keys`")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"the public and the secret key in {path} do not belong together; make both anew with `prefetcher keys`"
        )
    return KeyPair(public=public, secret=secret)


def load_public(path: Path) -> bytes:
    """Raises ConfigError where others could have changed it, or it holds a secret, which nobody should copy about."""
    _check_owned(path, stat.S_IFREG, 0o755, "a file", f"chmod 644 {path}")
    public, secret = _load(path)
    if secret is not None:
        raise ConfigError(f"{path} is for a public key, but holds a secret one; make both anew with `prefetcher keys`")
    return public


def check_folder(folder: Path) -> None:
    """Raises ConfigError where others could put keys of their own there."""
    _check_owned(folder, stat.S_IFDIR, 0o755, "a folder", f"chmod 700 {folder}")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} holds no key ({error}); make it anew with `prefetcher keys`") from error
    if not _is_key(public):
        raise ConfigError(f"{path} holds no public key of 40 characters; make it anew with `prefetcher keys`")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _check_owned(path: Path, kind: int, most: int, name: str, remedy: str) -> None:
    """That it is of this kind, of this user, and has no permission beyond `most`."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}); set transport.keys to a folder that `prefetcher keys` made"
        ) from error
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & ~most:
        raise ConfigError(
            f"{path} must be {name} of user {os.getuid()} with no more than mode {most:04o}, but is of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}; {remedy}"
        )
