"""Both commands of compose.yaml, confined like containers: they meet, are healthy, stop when asked, and finish."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.runtime.run_directory import COMPLETE
from tests.deploy.confined import Confined, Host, host, why_not
from tests.deploy.manifests import NAMES, compose, compose_container, health_check

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

SMALLER = [  # container.toml on a machine that has better things to do
    "data.batch_size=256", "data.synthetic.scale=0.001", "data.eval_fraction=0.001", "cache.capacity=2MiB",
    "checkpoint.every=40", "model.bottom_mlp=[8, 16]", "model.top_mlp=[8, 1]", "trainer.threads=1",
]  # fmt: skip
A_LOOP = "row_loops.set_bits"
OPTIONS = [f"--set={override}" for override in SMALLER]
PROBE = """
import os, pathlib
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
def writes(folder):
    try: pathlib.Path(folder, "x").touch()
    except OSError as error: return error.strerror
    return "yes"
writable = [writes(folder) for folder in ("/", "/etc", "/job", "/tmp", "/runs")]
print(os.getuid(), int(status["CapEff"], 16), int(status["NoNewPrivs"]), writable)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path) as made:
        yield made


def test_the_confinement_is_that_of_the_image(machine: Host) -> None:
    container = compose_container("trainer")
    process = Confined(machine, container, [sys.executable, "-c", PROBE], "probe").process
    said = process.ended().quiet().stdout
    assert said.split("[")[0].split() == ["10001", "0", "1"]
    assert re.findall(r"'(.*?)'", said) == ["Read-only file system"] * 3 + ["yes"] * 2


def test_a_run_in_two_containers_is_healthy_stops_in_order_and_goes_on_to_the_end(machine: Host) -> None:
    compiled = machine.lay_in_compiled_loops()
    for path in compiled.rglob(f"{A_LOOP}*"):
        path.unlink()
    unfinished = {"prefetcher": ["--unfinished-code=75"], "trainer": []}
    started = {name: machine.start(name, *OPTIONS, *unfinished[name]) for name in NAMES}
    prefetcher, trainer = (confined.process for confined in started.values())
    # it compiles its loops first
    prefetcher.until(lambda: "trainer connected" in prefetcher.stderr, "trainer connected", timeout_s=150)
    for name, confined in started.items():
        for_any, for_one = health_check(), compose_command(name)
        assert confined.inside(*for_any).stdout.count(": ok\n") == 1, "the other one is in another network"
        assert confined.inside(*for_one).returncode == 0
    run_dir = machine.source("runs") / "container"
    prefetcher.until(lambda: any(run_dir.glob("checkpoints/*/manifest.json")), "checkpoint")
    started["trainer"].stop()
    assert (prefetcher.ended().code, trainer.ended().code) == (75, 0), prefetcher.stderr + trainer.stderr
    assert not (run_dir / COMPLETE).exists()
    newest = newest_checkpoint(run_dir)
    assert newest is not None, "a stop in order leaves a checkpoint"
    end = read_manifest(newest).train_steps + 30
    last = {"prefetcher": ["--unfinished-code=75", f"--max-steps={end}"], "trainer": []}
    again = [machine.start(name, *OPTIONS, *last[name], number=1) for name in NAMES]
    for confined in again:
        confined.process.ended().quiet()
    assert json.loads((run_dir / COMPLETE).read_text()) == {"train_steps": end, "epochs": 1, "max_steps": end}
    assert json.loads((run_dir / "report.json").read_text())["finished"]
    assert list(compiled.rglob(f"{A_LOOP}*.nbc")), "the prefetcher compiled a loop and did not keep it"
    assert not list(machine.source("rings").iterdir())
    assert not list(machine.source("sockets").rglob("*.sock"))


def compose_command(name: str) -> list[str]:
    test: list[str] = compose()["services"][name]["healthcheck"]["test"]
    assert test[0] == "CMD"
    return test[1:]
