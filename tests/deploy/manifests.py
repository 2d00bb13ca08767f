"""compose.yaml, kubernetes.yaml and the Dockerfile, read as data: what each says of each container, in one form."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main
import yaml
from dockerfile_parse import DockerfileParser
from typer.core import TyperGroup

import rowcast.command_line.prefetcher
import rowcast.command_line.trainer
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAMES = ("prefetcher", "trainer")
COMMANDS = {
    "prefetcher": typer.main.get_command(rowcast.command_line.prefetcher.app),
    "trainer": typer.main.get_command(rowcast.command_line.trainer.app),
}


def options_in(line: list[str]) -> dict[str, Any]:
    program, name, *arguments = line
    group = COMMANDS[program]
    assert isinstance(group, TyperGroup)
    _, command, _ = group.resolve_command(typer.Context(group), [name])
    assert command is not None
    return command.make_context(name, arguments).params


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    source: str  # a volume's name, or a path of the host
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class Container:
    """One of the two processes, as one deployment runs it."""

    name: str
    command: list[str]
    mounts: dict[str, Mount]  # by the path in the container
    user: str  # "uid:gid"
    read_only_root: bool
    dropped: list[str]  # capabilities
    grace_s: int
    job_file: Path  # of this machine, what the container sees as job.toml
    shm_bytes: int

    @property
    def options(self) -> dict[str, Any]:
        """What the real command line makes of `command`. Raises a usage error where it takes no such option."""
        return options_in(self.command)

    @property
    def job(self) -> Job:
        return load_job(self.job_file, tuple(self.options["overrides"] or ()))

    def mount_of(self, path: str) -> Mount | None:
        """The mount that holds a path."""
        holders = [target for target in self.mounts if Path(path).is_relative_to(target)]
        return self.mounts[max(holders, key=len)] if holders else None


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    """A compose file, its variables at their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / name).read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """The manifest's objects by kind and name."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = kubernetes()["Job", "rowcast"]["spec"]["template"]["spec"]
    return spec


def dockerfile() -> DockerfileParser:
    return DockerfileParser(path=str(DEPLOY / "Dockerfile"))


def instructions(name: str) -> list[str]:
    """What stands behind each instruction of this name in the Dockerfile, all stages together."""
    return [step["value"] for step in dockerfile().structure if step["instruction"] == name]


def health_check() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    command: list[str] = json.loads(re.findall(r"CMD (\[.*\])$", instructions("HEALTHCHECK")[0])[0])
    return command


def compose_container(name: str) -> Container:
    content = compose()
    service = content["services"][name]
    mounts = dict(map(compose_mount, service["volumes"]))
    mounts |= {entry.partition(":")[0]: Mount(source=f"tmpfs of {name}", read_only=False) for entry in service["tmpfs"]}
    rings = content["volumes"][mounts["/dev/shm"].source]["driver_opts"]["o"]
    return Container(
        name=name,
        command=service["command"],
        mounts=mounts,
        user=service["user"],
        read_only_root=service["read_only"],
        dropped=service["cap_drop"],
        grace_s=int(service["stop_grace_period"].removesuffix("s")),
        job_file=(DEPLOY / mounts["/job/job.toml"].source).resolve(),
        shm_bytes=parse_bytes(re.findall(r"size=(\d+)m", rings)[0] + "MiB"),
    )


def compose_mount(entry: str | dict[str, Any]) -> tuple[str, Mount]:
    if isinstance(entry, str):
        source, target, *mode = entry.split(":")
        return target, Mount(source=source, read_only="ro" in mode)
    return entry["target"], Mount(source=entry["source"], read_only=entry.get("read_only", False))


def kubernetes_container(name: str, folder: Path) -> Container:
    """`folder`: where the ConfigMap's job file is put."""
    spec = pod()
    (container,) = (found for found in spec["containers"] if found["name"] == name)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    job_file = folder / "job.toml"
    job_file.write_text(kubernetes()["ConfigMap", volumes["job"]["configMap"]["name"]]["data"]["job.toml"])
    context = spec["securityContext"]
    return Container(
        name=name,
        command=container["args"],
        mounts={
            mount["mountPath"]: Mount(
                source="/".join([mount["name"], *([mount["subPath"]] if "subPath" in mount else [])]),
                read_only=mount.get("readOnly", False),
            )
            for mount in container["volumeMounts"]
        },
        user=f"{context['runAsUser']}:{context['runAsGroup']}",
        read_only_root=container["securityContext"]["readOnlyRootFilesystem"],
        dropped=container["securityContext"]["capabilities"]["drop"],
        grace_s=spec["terminationGracePeriodSeconds"],
        job_file=job_file,
        shm_bytes=parse_bytes(volumes["rings"]["emptyDir"]["sizeLimit"] + "B"),
    )


def compose_fault(path: Path) -> str:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def kubernetes_verdicts(path: Path, version: str) -> list[str]:
    """A line for each object of a manifest."""
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", version, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("INFO", "ERROR"))]
