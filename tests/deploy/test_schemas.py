"""The container files against published schemas: compose and Kubernetes, and hadolint for the Dockerfile."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, kubernetes
from tests.deploy.schemas import compose_fault, kubernetes_verdicts


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_follow_the_compose_specification(name: str) -> None:
    assert compose_fault(DEPLOY / name) == ""


@pytest.mark.parametrize("version", ["1.31", "1.35"])  # the first with all that is used, and a later one
def test_every_kubernetes_object_follows_the_schema_of_its_kind(version: str) -> None:
    verdicts = kubernetes_verdicts(DEPLOY / "kubernetes.yaml", version)
    assert len(verdicts) == len(kubernetes()) == 4
    assert all(" passed for resource " in verdict for verdict in verdicts), verdicts


def dockerfile_fault(path: Path) -> str:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "serving.Dockerfile"])
def test_hadolint_has_nothing_to_say_of_the_dockerfiles(name: str) -> None:
    assert dockerfile_fault(DEPLOY / name) == ""
