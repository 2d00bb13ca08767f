"""The container files against published schemas: compose and Kubernetes, and hadolint for the Dockerfile."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, compose, kubernetes
from tests.deploy.schemas import compose_fault, kubernetes_verdicts


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_follow_the_compose_specification(name: str) -> None:
    assert compose_fault(DEPLOY / name) == ""


def test_a_misspelt_key_of_a_service_would_be_noticed(tmp_path: Path) -> None:
    content = compose()
    content["services"]["trainer"]["read_onyl"] = content["services"]["trainer"].pop("read_only")
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump(content))
    assert "read_onyl" in compose_fault(path)


@pytest.mark.parametrize("version", ["1.31", "1.35"])  # the first with all that is used, and a later one
def test_every_kubernetes_object_follows_the_schema_of_its_kind(version: str) -> None:
    verdicts = kubernetes_verdicts(DEPLOY / "kubernetes.yaml", version)
    assert len(verdicts) == len(kubernetes()) == 4
    assert all(" passed for resource " in verdict for verdict in verdicts), verdicts


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ("livenessProbe:", "livenessprobe:", "'livenessprobe' was unexpected"),
        ("containerPort: 9401", 'containerPort: "9401"', "is not of type 'integer'"),
        ("httpGet: { path: /healthz, port: trainer }", "httpGet: { path: /healthz }", "'port' is a required property"),
    ],
)
def test_a_mistake_in_the_manifest_would_be_noticed(good: str, bad: str, fault: str, tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert good in text
    path = tmp_path / "kubernetes.yaml"
    path.write_text(text.replace(good, bad))
    assert any(verdict.startswith("ERROR") and fault in verdict for verdict in kubernetes_verdicts(path, "1.31"))


def dockerfile_fault(path: Path) -> str:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "serving.Dockerfile"])
def test_hadolint_has_nothing_to_say_of_the_dockerfiles(name: str) -> None:
    assert dockerfile_fault(DEPLOY / name) == ""


@pytest.mark.parametrize(
    ("good", "bad", "rule"), [("EXPOSE 9400", "EXPOSE 94000", "DL3011"), ("WORKDIR /job", "WORKDIR job", "DL3000")]
)
def test_a_mistake_in_the_dockerfile_would_be_noticed(good: str, bad: str, rule: str, tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert good in text
    (tmp_path / "Dockerfile").write_text(text.replace(good, bad))
    assert rule in dockerfile_fault(tmp_path / "Dockerfile")
