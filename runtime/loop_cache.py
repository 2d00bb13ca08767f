"""Keeps compiled loops on disk, as numba does; of processes that start beside each other, one compiles a loop.

The others wait until it is in the cache. A lock is a byte of a file, for each loop another, and ends with its process:

    <cache folder>/rowcast.loops     a line for what `rowcast prepare` has compiled these loops for; also the lock file

numba's files are pickles: what is loaded can run anything. So only those are that no other user could have written.
"""

import fcntl
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target

from rowcast.runtime.safe_files import opened_safely

WAIT_S, POLL_S = 120.0, 0.05  # a loop takes some seconds; a holder that is stopped keeps the others no longer
SHOWN = 200  # characters of a signature
NOTES_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


TOLD = "ROWCAST_TOLD_OF_LOOPS"  # in the environment, so that a child does not tell it again


class SafeFiles(IndexDataCacheFile):  # type: ignore[misc]
    _index_path: str

    def _load_index(self) -> Any:
        named = self._index_path
        try:
            with opened_safely(named) as self._index_path:
                return super()._load_index()
        except FileNotFoundError:
            return {}
        except OSError as error:
            if TOLD not in os.environ:
                os.environ[TOLD] = "1"
                sys.stderr.write(
                    f"rowcast: compiled loops are not loaded, but compiled: {error.filename}: {error.strerror}\n"
                )  # a reader of versions has no structlog
            return {}
        finally:
            self._index_path = named

    def _load_data(self, name: str) -> Any:
        with opened_safely(self._data_path(name)) as path:
            return super()._load_data(path)

    @contextmanager
    def _open_for_write(self, path: str) -> Iterator[Any]:
        with super()._open_for_write(path) as file:
            os.fchmod(file.fileno(), 0o600)
            yield file


class LoopCache(FunctionCache):  # type: ignore[misc]
    """numba calls both under its lock: first `load_overload`, and `save_overload` once it has compiled."""

    say: Callable[..., None] | None = None  # a start sets it to hear of the first loop that should have been prepared
    lost: OSError | None = None  # why a loop could not be kept

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = SafeFiles(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._whole(sig, target_context)
        if found is not None:
            return found
        until = time.monotonic() + WAIT_S
        while not self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB) and time.monotonic() < until:
            time.sleep(POLL_S)
            if (found := self._whole(sig, target_context)) is not None:
                return found
        found = self._whole(sig, target_context)  # another process may have compiled it in between
        if found is not None:
            self._locked(fcntl.LOCK_UN)
        else:
            self._explain(sig)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            LoopCache.lost = error
        finally:
            self._locked(fcntl.LOCK_UN)

    def _whole(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - pickle raises errors of many types where a file is damaged
            self.flush()
            return None

    def _locked(self, operation: int) -> bool:
        """Returns whether nobody else has the loop's lock, or nobody can have one here."""
        try:
            file = notes(self.cache_path)
        except OSError:  # that of another user, or a link
            return True
        try:
            fcntl.lockf(file, operation, 1, zlib.crc32(self._impl.filename_base.encode()))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _explain(self, sig: Any) -> None:
        prepared = prepared_for(self.cache_path)
        if LoopCache.say is None or not prepared:
            return
        cause = "its code or its types are not those of then" if here() in prepared else f"this is {here()}"
        LoopCache.say(
            "a loop is compiled, although they were prepared",
            loop=f"{self._py_func.__module__}.{self._py_func.__name__}",
            signature=", ".join(map(str, sig))[:SHOWN],
            prepared="; ".join(prepared),
            cause=cause,
        )
        LoopCache.say = None


@cache
def notes(folder: str) -> int:
    """Returns a descriptor that stays open: closing one would end all locks of this process. Raises OSError."""
    return os.open(os.path.join(folder, "rowcast.loops"), NOTES_FLAGS, 0o600)


def prepared_for(folder: str) -> list[str]:
    try:
        return os.pread(notes(folder), 2**16, 0).decode(errors="replace").splitlines()
    except OSError:
        return []


def note_prepared(folder: str) -> None:
    """Raises OSError."""
    if here() not in prepared_for(folder):
        os.write(notes(folder), f"{here()}\n".encode())


@cache
def here() -> str:
    """Names what a compiled loop depends on, besides its source."""
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    kind = f"{processor} {zlib.crc32(features.encode()):08x}"
    return f"numba {numba.__version__}, processor {kind}"
