"""Runs a command of the project in a process of its own."""

import subprocess
import sys


def command(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{module} {' '.join(arguments)} ended with code {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
