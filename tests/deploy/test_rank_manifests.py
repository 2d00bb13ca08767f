"""compose.ranks.yaml and kubernetes.ranks.yaml: their numbers against each other, commands and torchrun's options."""

import re
from argparse import Namespace
from typing import Any

import pytest
import yaml
from torch.distributed import run

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes
from rowcast.runtime.process import END_S
from tests.deploy.manifests import DEPLOY, NAMES, ROOT, compose, compose_fault, kubernetes_verdicts, options_in

MANIFEST = DEPLOY / "kubernetes.ranks.yaml"
JOB_FILE = ROOT / "examples" / "container.toml"
TORCHRUN = ["python", "-P", "-m", "rowcast.deploy.torchrun"]


def objects() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())} | {
        document["metadata"]["name"]: document
        for document in yaml.safe_load_all(MANIFEST.read_text())
        if document["kind"] == "PersistentVolumeClaim"
    }


def of_kubernetes(name: str) -> list[str]:
    """A container's command, on host 1."""
    containers = objects()["Job"]["spec"]["template"]["spec"]["containers"]
    (container,) = (found for found in containers if found["name"] == name)
    assert [variable["name"] for variable in container["env"]] == ["HOST"]
    return [word.replace("$(HOST)", "1") for word in container["args"]]


def of_compose(name: str) -> list[str]:
    command: list[str] = compose("compose.ranks.yaml")["services"][name]["command"]
    return command


COMMAND_LINES = pytest.mark.parametrize("command_of", [of_kubernetes, of_compose])


def parsed(command: list[str]) -> tuple[Namespace | None, dict[str, Any], Job]:
    """torchrun's options (None for a prefetcher), the command's options, and the job."""
    torchrun = None
    if command[: len(TORCHRUN)] == TORCHRUN:
        torchrun = run.parse_args(command[len(TORCHRUN) :])  # type: ignore[no-untyped-call]
        assert torchrun.no_python
        command = [torchrun.training_script, *torchrun.training_script_args]
    options = options_in(command)
    assert str(options["config"]) == "/job/job.toml"
    return torchrun, options, load_job(JOB_FILE, tuple(options["overrides"]))


def hosts(torchrun: Namespace) -> int:
    return int(torchrun.nnodes.partition(":")[0])


@COMMAND_LINES
def test_both_commands_have_one_job_and_start_all_of_its_ranks(command_of: Any) -> None:
    (_, _, prefetcher), (torchrun, _, trainer) = (parsed(command_of(name)) for name in NAMES)
    assert prefetcher.session_digest() == trainer.session_digest()
    ranks = trainer.ranks
    assert torchrun is not None
    assert int(torchrun.nproc_per_node) == (ranks.per_host or ranks.count)
    assert hosts(torchrun) * int(torchrun.nproc_per_node) == ranks.count > 1
    assert torchrun.max_restarts > 0


def test_the_hosts_of_the_job_are_those_of_torchrun_and_find_the_first_one() -> None:
    job = objects()["Job"]
    torchrun, _, _ = parsed(of_kubernetes("trainer"))
    assert torchrun is not None
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == hosts(torchrun)
    service = objects()["Service"]
    assert torchrun.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    pod = job["spec"]["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "trainers meet before anything is ready"
    assert torchrun.node_rank == 1
    _, options, _ = parsed(of_kubernetes("prefetcher"))
    assert options["host"] == 1
    assert pod["spec"]["terminationGracePeriodSeconds"] > END_S


def test_the_rings_of_all_pairs_of_a_host_fit() -> None:
    volumes = {volume["name"]: volume for volume in objects()["Job"]["spec"]["template"]["spec"]["volumes"]}
    _, _, job = parsed(of_kubernetes("prefetcher"))
    rings = compose()["volumes"]["rings"]["driver_opts"]["o"]
    for shm, pairs in (
        (parse_bytes(volumes["rings"]["emptyDir"]["sizeLimit"] + "B"), job.ranks.per_host or 0),
        (parse_bytes(re.findall(r"size=(\d+)m", rings)[0] + "MiB"), 2),
    ):
        assert job.transport.ring_bytes is not None
        assert 0 < 2 * job.transport.ring_bytes * pairs <= shm // 2


def ports(name: str) -> list[str]:
    """Those of the two ranks of a host."""
    base = {"prefetcher": 9400, "trainer": 9401}[name]
    return [str(base), str(base + 2)]


def test_every_rank_has_its_port_wherever_ports_are_named() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "ranks.yml").read_text())["scrape_configs"][0]["static_configs"]
    for name in NAMES:
        assert compose("compose.ranks.yaml")["services"][name]["healthcheck"]["test"][-2:] == ports(name)
        assert {"targets": [f"{name}:{port}" for port in ports(name)], "labels": {"role": name}} in scraped
    containers = {one["name"]: one for one in objects()["Job"]["spec"]["template"]["spec"]["containers"]}
    for name in NAMES:
        named = {port["name"]: str(port["containerPort"]) for port in containers[name]["ports"]}
        assert [named[f"{name}-{local}"] for local in (0, 1)] == ports(name)
    assert containers["prefetcher"]["livenessProbe"]["exec"]["command"][-2:] == ports("prefetcher")
    assert "livenessProbe" not in containers["trainer"], "no trainer runs while those of another Pod are replaced"


def test_they_follow_the_schemas() -> None:
    assert compose_fault(DEPLOY / "compose.ranks.yaml") == ""
    for version in ("1.31", "1.35"):
        verdicts = kubernetes_verdicts(MANIFEST, version)
        assert len(verdicts) == 5
        assert all(" passed for resource " in verdict for verdict in verdicts), verdicts
