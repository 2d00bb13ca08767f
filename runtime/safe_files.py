"""Files that run when they are loaded, such as compiled code: only those that no other user could have written.

owner            this user or root
others           may not write
its group        may write only if it is ours alone: named as we are (or root) and without other members, or
                     without a name here, as that of a Kubernetes volume with fsGroup
"""

import atexit
import errno
import getpass
import grp
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def why_unsafe(found: os.stat_result) -> str:
    """Returns which other user could have written a file or folder, or ""."""
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "every user may write there"
    if found.st_mode & stat.S_IWGRP and not is_private(found.st_gid):
        return f"group {found.st_gid} may write there"
    return ""


@cache
def is_private(group: int) -> bool:
    ours = {user.pw_name for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())}
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return True
    others = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group} | {*found.gr_mem}
    return found.gr_name in ours and others <= ours


@contextmanager
def opened_safely(path: str) -> Iterator[str]:
    """Yields a name of the open file: what stands at `path` may change meanwhile. Raises OSError, and PermissionError
    if another user could have written it or its folder."""
    with ExitStack() as stack:
        folder = os.open(os.path.dirname(path), FOLDER)
        stack.callback(os.close, folder)
        file = os.open(os.path.basename(path), FILE, dir_fd=folder)
        stack.callback(os.close, file)
        for place, descriptor in ((os.path.dirname(path), folder), (path, file)):
            if why := why_unsafe(os.fstat(descriptor)):
                raise PermissionError(errno.EPERM, why, place)
        yield f"/proc/self/fd/{file}"


def unsafe_below(folder: Path) -> str:
    """Returns a place in the folder that another user could have written and why, or ""."""
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            found = os.lstat(path)
            if why := ("it is a link" if stat.S_ISLNK(found.st_mode) else why_unsafe(found)):
                return f"{path}: {why}"
    return ""


def use_safe_caches() -> None:
    """Lets Triton and torch.compile, which load what lies in their cache folders, use new ones in place of folders that
    another user could have written, and says so."""
    folders = {
        "TRITON_CACHE_DIR": os.path.join(os.environ.get("TRITON_HOME", "~"), ".triton", "cache"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
    }
    for name, usual in folders.items():
        if why := unsafe_below(Path(os.environ.get(name) or usual).expanduser()):
            os.environ[name] = tempfile.mkdtemp(prefix="rowcast-")
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            sys.stderr.write(
                f"rowcast: compiled kernels are not loaded, but compiled: {why}; set {name} to a folder of your own\n"
            )  # a reader of versions has no structlog
