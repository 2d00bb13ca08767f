"""The container files against published schemas, hadolint, each other and the programs that they start."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rowcast.runtime.process
from rowcast.job.units import parse_seconds
from rowcast.protocol.transport.endpoint import MAX_PATH_BYTES, NAME_BYTES
from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, ConfigError, DataError, Mismatch, PeerLost
from tests.deploy.manifests import (
    DEPLOY,
    NAMES,
    ROOT,
    Container,
    compose,
    compose_container,
    compose_fault,
    dockerfile,
    instructions,
    kubernetes,
    kubernetes_container,
    kubernetes_verdicts,
    pod,
)

SHARED = ("/dev/shm", "/run/rowcast")
Both = dict[str, Container]


@pytest.fixture(params=["compose", "kubernetes"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    """The two processes' containers, as one of the deployments has them."""
    return {
        name: compose_container(name) if request.param == "compose" else kubernetes_container(name, tmp_path)
        for name in NAMES
    }


# the Dockerfile


def copied_from_the_context() -> list[str]:
    """Sources of COPY that are files of this repository."""
    copies = [shlex.split(value) for value in instructions("COPY") if not value.startswith("--from")]
    return [source for words in copies for source in words[:-1]]


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    sources = copied_from_the_context()
    assert {"protocol", "prefetcher", "trainer", "deploy/*.py", "pyproject.toml", "constraints.txt"} <= set(sources)
    for source in sources:
        found = list(ROOT.glob(source))
        assert found, f"COPY {source}: nothing in the repository has this name"


def test_every_package_that_is_installed_is_copied() -> None:
    copied = {source.partition("/")[0] for source in copied_from_the_context()}
    linked = {path.name for path in (ROOT / "rowcast").iterdir() if path.is_symlink()}
    assert {name for name in copied if (ROOT / name).is_dir()} == {"rowcast", *linked}


def test_the_image_makes_the_folders_that_its_environment_and_deployments_write(both: Both) -> None:
    environment = dockerfile().envs
    made = re.findall(r"install --directory --owner 10001 --group 10001 --mode 0750 ([^&]*)$", instructions("RUN")[-1])[
        0
    ].split()
    assert environment["XDG_RUNTIME_DIR"] == SHARED[1]
    assert len(f"{SHARED[1]}/rowcast") + NAME_BYTES <= MAX_PATH_BYTES
    for variable, name in [
        ("NUMBA_CACHE_DIR", "prefetcher"),
        ("XDG_RUNTIME_DIR", "prefetcher"),
        ("XDG_RUNTIME_DIR", "trainer"),
    ]:
        folder = environment[variable]
        mount = both[name].mount_of(folder)
        assert mount is not None, f"{variable} = {folder} is on the read-only root"
        assert not mount.read_only
        assert any(Path(folder).is_relative_to(one) for one in made)
    for container in both.values():
        assert container.mount_of(environment["HOME"]) is not None


# what the two processes need of each other


def test_both_command_lines_are_those_of_the_real_commands(both: Both) -> None:
    for name, container in both.items():
        assert container.command[:2] == [name, "run"]
        assert str(container.options["config"]) == "/job/job.toml"
        assert not container.options["fresh"], "a process that is started again would give up its run"


def test_both_processes_have_one_job(both: Both) -> None:
    assert both["prefetcher"].job.session_digest() == both["trainer"].job.session_digest()


def test_both_see_rings_sockets_and_runs_at_the_same_paths_as_the_same_user(both: Both) -> None:
    prefetcher, trainer = both.values()
    assert prefetcher.user == trainer.user == instructions("USER")[-1] == "10001:10001"
    for path in (*SHARED, str(prefetcher.job.run_dir)):
        mounts = prefetcher.mount_of(path), trainer.mount_of(path)
        assert mounts[0] is not None, f"{path} is on the read-only root"
        assert mounts[0] == mounts[1], f"{path} is not shared"
        assert not mounts[0].read_only
    assert prefetcher.mounts["/tmp"] != trainer.mounts["/tmp"]


def test_both_rings_fit_into_the_shared_memory_with_room_to_spare(both: Both) -> None:
    for container in both.values():
        ring_bytes = container.job.transport.ring_bytes
        assert ring_bytes is not None
        assert 2 * ring_bytes <= container.shm_bytes // 2


def test_neither_container_can_do_more_than_it_must(both: Both) -> None:
    for container in both.values():
        assert container.read_only_root
        assert container.dropped == ["ALL"]
        assert container.grace_s > rowcast.runtime.process.END_S, "a stop in order would be cut short"
    context = pod()["securityContext"]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(container["securityContext"]["allowPrivilegeEscalation"] for container in pod()["containers"])
    assert all("no-new-privileges:true" in service["security_opt"] for service in compose()["services"].values())


def test_the_config_map_holds_the_example_as_it_is() -> None:
    assert (
        kubernetes()["ConfigMap", "rowcast-job"]["data"]["job.toml"]
        == (ROOT / "examples" / "container.toml").read_text()
    )


# ports, probes, codes


def test_metrics_are_served_to_the_network_on_the_ports_that_everything_else_names(both: Both) -> None:
    ports = {name: getattr(container.job.metrics, name) for name, container in both.items()}
    assert ports == {"prefetcher": "0.0.0.0:9400", "trainer": "0.0.0.0:9401"}
    assert set(instructions("EXPOSE")[0].split()) == {"9400", "9401"}
    for container in pod()["containers"]:
        assert container["ports"] == [{"name": container["name"], "containerPort": int(ports[container["name"]][-4:])}]
    for name in NAMES:
        assert compose()["services"][name]["healthcheck"]["test"][-1] == ports[name][-4:]


def test_the_variables_of_compose_are_those_that_the_page_explains() -> None:
    used = set(re.findall(r"\$\{(\w+):-", (DEPLOY / "compose.yaml").read_text()))
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "deploy.md").read_text(), flags=re.MULTILINE))
    assert used == explained
    assert "ROWCAST_DATA" in used


def test_the_server_for_rows_is_an_option_that_only_the_other_containers_reach() -> None:
    service = compose()["services"]["redis"]
    assert service["profiles"] == ["redis"]
    assert "ports" not in service, "it has no password"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    program, *options = service["command"]
    assert program == "valkey-server"
    assert " ".join(options) == "--save  --appendonly no --maxmemory 4gb --maxmemory-policy noeviction"


@pytest.mark.parametrize("container", pod()["containers"], ids=lambda container: str(container["name"]))
def test_no_probe_fails_because_the_other_process_is_away(container: dict[str, Any]) -> None:
    """/readyz says so, by design: see runtime/telemetry/metrics.py."""
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": container["name"]}


def test_a_pod_is_replaced_unless_no_other_one_could_do_better(tmp_path: Path) -> None:
    spec = kubernetes()["Job", "rowcast"]["spec"]
    refused, unfinished, _ = (rule.get("onExitCodes", {}) for rule in spec["podFailurePolicy"]["rules"])
    assert set(refused["values"]) == {error.exit_code for error in (ConfigError, DataError, Mismatch)}
    assert PeerLost.exit_code not in refused["values"]
    code = kubernetes_container("prefetcher", tmp_path).options["unfinished_code"]
    assert unfinished["values"] == [code]
    assert code not in {0, 1, *ERRORS_BY_EXIT_CODE}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    for name in NAMES:
        transport = kubernetes_container(name, tmp_path).job.transport
        assert parse_seconds(transport.rejoin_timeout) == 0, "nothing would start the lost process again"


def test_compose_starts_a_lost_process_again_and_the_other_one_waits_for_it() -> None:
    for name in NAMES:
        assert compose()["services"][name]["restart"].startswith("on-failure")
        assert parse_seconds(compose_container(name).job.transport.rejoin_timeout) >= 60


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
