"""What published schemas say of a compose file and of a Kubernetes manifest."""

import subprocess
import sys
from pathlib import Path


def compose_fault(path: Path) -> str:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def kubernetes_verdicts(path: Path, version: str) -> list[str]:
    """A line for each object of a manifest."""
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", version, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("INFO", "ERROR"))]
