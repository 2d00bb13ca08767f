"""A command as Docker would run it for compose.yaml, as far as this machine can without a container engine.

bubblewrap gives it a read-only root, the user, mounts and tmpfs of compose.yaml, the environment of the Dockerfile and
nothing else, no capabilities, and namespaces of its own for processes, IPC and network. The programs are those of this
tree and this Python.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.deploy.manifests import ROOT, Container, compose_container, dockerfile
from tests.support.processes import Process

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
UNSHARED = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net")
OWNER_ONLY = 0o077  # the strictest umask that somebody could set


class Host:
    """Folders for the volumes of compose.yaml, and the job file that a container would see."""

    def __init__(self, folder: Path, rings: Path) -> None:
        self.folder = folder
        self._rings = rings

    def source(self, volume: str) -> Path:
        path = self._rings if volume == "rings" else self.folder / "volumes" / volume
        path.mkdir(parents=True, exist_ok=True)
        return path

    def lay_in_compiled_loops(self) -> Path:
        """Puts this tree's compiled loops where numba looks for them, and returns that folder. Missing ones are
        compiled: all of them take a minute.
        """
        numba = self.source("compiled") / "numba"
        numba.mkdir()
        if "NUMBA_CACHE_DIR" in os.environ:
            shutil.copytree(os.environ["NUMBA_CACHE_DIR"], numba, dirs_exist_ok=True)
        for cache in (ROOT / "prefetcher").rglob("__pycache__"):
            package = ROOT / "rowcast" / cache.parent.relative_to(ROOT)  # as the modules are imported
            folder = numba / f"{package.name}_{hashlib.sha1(str(package).encode()).hexdigest()}"
            if not folder.exists():
                shutil.copytree(cache, folder)
        return numba

    def start(self, name: str, *options: str, number: int = 0) -> "Confined":
        """The command of a service of compose.yaml, with `options` behind it."""
        container = compose_container(name)
        return Confined(self, container, [*container.command, *options], f"{name}-{number}")


class Confined:
    """One confined process, started; `process` is bubblewrap's own."""

    def __init__(self, host: Host, container: Container, command: list[str], log: str) -> None:
        self._folder = host.folder / log
        self._folder.mkdir()
        self._command = [*bubblewrap(host, container), "--", *command]
        self._inner = 0
        self.process = Process([], self._folder, {}, self._launch)

    def _launch(
        self, arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Also waits until bubblewrap has told the id of the first process of the new namespace."""
        read_end, write_end = os.pipe()
        command = [self._command[0], "--info-fd", str(write_end), *self._command[1:]]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[write_end],
                umask=OWNER_ONLY,
            )
        os.close(write_end)
        with os.fdopen(read_end) as info:
            told = info.read()
        self._inner = json.loads(told)["child-pid"] if told else 0
        return process

    def stop(self) -> None:
        """SIGTERM to the command itself, which tini would hand on."""
        (child,) = Path(f"/proc/{self._inner}/task/{self._inner}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)

    def inside(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command beside this one, as `docker exec` and HEALTHCHECK do."""
        enter = ["nsenter", f"--target={self._inner}", "--user", "--mount", "--net", "--pid", "--preserve-credentials"]
        return subprocess.run(
            [*enter, *command], capture_output=True, text=True, check=False, env=environment_of_the_image(), cwd="/"
        )


def environment_of_the_image() -> dict[str, str]:
    """The Dockerfile's, with this Python where the image has its own."""
    environment = {**dockerfile().envs, "PYTHONPATH": str(ROOT)}
    return environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}


def bubblewrap(host: Host, container: Container) -> list[str]:
    uid, _, gid = container.user.partition(":")
    arguments = [
        "bwrap",
        *UNSHARED,
        "--uid",
        uid,
        "--gid",
        gid,
        "--cap-drop",
        "ALL",
        "--clearenv",
        "--die-with-parent",
        "--new-session",
    ]
    arguments += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    for folder in {sys.base_prefix, sys.prefix, str(ROOT)}:
        arguments += ["--ro-bind", folder, folder]
    for target, mount in container.mounts.items():
        if not mount.source.startswith("tmpfs"):
            source = container.job_file if target == "/job/job.toml" else host.source(mount.source)
            arguments += ["--ro-bind" if mount.read_only else "--bind", str(source), target]
    for name, value in environment_of_the_image().items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--remount-ro", "/", "--chdir", "/job"]


@contextmanager
def host(folder: Path) -> Iterator[Host]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-rings-") as rings:
        yield Host(folder, Path(rings))


def why_not() -> str | None:
    """Why nothing can be confined here; None where it can."""
    if shutil.which("bwrap") is None or shutil.which("nsenter") is None:
        return "needs bubblewrap and nsenter (Debian: apt-get install bubblewrap util-linux)"
    tried = subprocess.run(
        ["bwrap", *UNSHARED, "--ro-bind", "/", "/", "true"], capture_output=True, text=True, check=False
    )
    return None if tried.returncode == 0 else f"bubblewrap may not make namespaces here: {tried.stderr.strip()}"
