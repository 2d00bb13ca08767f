"""Two hosts of one network: network namespaces, where the system allows them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest


def on(host: str) -> tuple[str, ...]:
    """What a command that runs there begins with."""
    return "ip", "netns", "exec", host


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that reach each other as 10.77.0.1 and 10.77.0.2; skips where they cannot be made."""
    if not shutil.which("ip"):
        pytest.skip("needs iproute2")
    names = f"rowcast{os.getpid()}a", f"rowcast{os.getpid()}b"
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "veth0")
                for link in ("veth0", "lo"):
                    ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names
