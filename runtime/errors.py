"""Defines the errors that end a run. Each has one sentence for the user and the exit code of the process."""

import difflib
import errno
from collections.abc import Collection, Sequence

OS_ADVICE = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "this host has no file handle left: end other processes, or raise fs.file-max",
    errno.ENOMEM: "free memory on this host",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise this user's quota",
    errno.EROFS: "it is read-only; choose another",
    errno.EIO: "its disk or the way to it fails: look at the kernel's log (`dmesg`) before another try",
    errno.ESTALE: "its file server has given it up: mount it again",
}


def advice(number: int | None, otherwise: str) -> str:
    """Returns what to change after an `errno`; `otherwise`: for the errors that depend on what was tried."""
    return OS_ADVICE.get(number or 0, otherwise)


class RowcastError(Exception):
    """Base of every error that a command reports as one sentence instead of a traceback."""

    exit_code = 1
    is_peers = False  # True if the peer failed with it and sent it


class ConfigError(RowcastError):
    """The job file, the command line or this machine does not allow the run (wrong key, no memory, port in use)."""

    exit_code = 2


class PeerLost(RowcastError):
    """The other process never connected, has left, or makes no progress."""

    exit_code = 3


class PeerNeverCame(PeerLost):
    """No other process connected within the time-out."""


class PeerKilled(PeerLost):
    """A signal ended the other process, by a note of its parent."""


class RanksDiffer(PeerLost):
    """The ranks' prefetchers began at different checkpoints. They look again, and the same trainers connect."""


class StoreLost(RowcastError):
    """A server that holds rows is lost, or has lost rows. The next start continues from the newest checkpoint.

    It has the exit code of a lost peer: the other process loses its peer, and a supervisor that restarts lost processes
    may restart this one. It ends this process, because its rows are gone."""

    exit_code = 3


class DataError(RowcastError):
    """A data file or a checkpoint holds something that cannot be trained on."""

    exit_code = 4


class Unreadable(RowcastError):
    """This host cannot read a file that exists. It may be whole, so nothing may continue without it."""


class Mismatch(RowcastError):
    """The two processes run different versions or different job files, or a checkpoint belongs to another job."""

    exit_code = 5


class ProtocolError(RowcastError):
    """A received or sent message is not allowed at this point of the conversation."""


class LocalProtocolError(ProtocolError):
    """This process tried to send a message that the conversation does not allow: our bug."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a message that the conversation does not allow: its bug, or an attack."""


class Diverged(RowcastError):
    """Training diverged: a loss, a row or a dense parameter is NaN or infinite."""


MAX_PEER_SENTENCE = 4000  # characters
ERRORS_BY_EXIT_CODE: dict[int, type[RowcastError]] = {
    error.exit_code: error for error in (ConfigError, PeerLost, DataError, Mismatch)
}


def peer_failure(code: int, sentence: str) -> RowcastError:
    """Returns the error for a peer's `Failure` message, so that both processes exit with the same code.

    It cleans the sentence, which is printed and logged."""
    error = ERRORS_BY_EXIT_CODE.get(code, RowcastError)(cleaned(sentence))
    error.is_peers = True
    return error


def cleaned(text: str) -> str:
    """Returns a peer's text, truncated, with control characters replaced by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MAX_PEER_SENTENCE])


def printable(text: str) -> str:
    """Escapes control characters, which a terminal would obey: of the names and cells of a user's files."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def told(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the sentence to send to the peer of a process that fails with `error`."""
    if isinstance(error, RowcastError):
        return error.exit_code, str(error)
    return 1, f"{type(error).__name__}: {error}"


MOST_LISTED = 12  # names in one sentence


def closest(name: str, names: Collection[str]) -> str | None:
    """Returns the name that was most likely meant; None if none is near."""
    by_small = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), by_small, n=1)
    return by_small[matches[0]] if matches else None


def nearest(name: str, names: Collection[str]) -> str:
    """Returns `, the nearest is price`, or "" if none is near."""
    match = closest(name, names)
    return "" if match is None else f", the nearest is {match}"


def instead(names: Sequence[str], others: Sequence[str]) -> str:
    """Returns `int_1 instead of int_0`: what only one of two lists has."""
    pairs = ((names, others), (others, names))
    return " instead of ".join(
        listed([name for name in names if name not in other]) or "none" for names, other in pairs
    )


def listed(names: Sequence[str], most: int = MOST_LISTED, between: str = ", ") -> str:
    """Lists one extra name instead of writing `and 1 more`."""
    if len(names) <= most + 1:
        return between.join(names)
    return f"{between.join(names[:most])} and {len(names) - most} more"
