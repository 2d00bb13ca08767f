"""A serving host needs the packages of deploy/serving.txt and no other: no torch, no server, no sockets."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT
from tests.serving.served_run import ServedRun, publish, serving_job

READER = Path(__file__).with_name("reader_alone.py")
MOST_MB = 480  # of installed packages, without Python, pip and setuptools
PINS = dict(
    line.split("==") for line in (DEPLOY / "serving.txt").read_text().splitlines() if line and not line.startswith("#")
)


def test_the_list_has_the_projects_pins_and_what_its_packages_require() -> None:
    assert set((ROOT / "constraints.txt").read_text().splitlines()) >= {f"{name}=={pin}" for name, pin in PINS.items()}
    needed = {
        re.split(r"[^A-Za-z0-9_-]", line)[0] for name in PINS for line in requires(name) or () if "extra ==" not in line
    }
    assert needed <= set(PINS)


def read(run_dir: Path, folder: Path, python: Sequence[str | Path], refused: Sequence[str] = ()) -> str:
    """What the reader prints; a second version comes while it has the first one open."""
    run = ServedRun(serving_job(run_dir))
    run.train_some(0.5)
    run.checkpoint()
    publish(run, folder)
    command = [*python, READER, folder, run_dir / "received", *refused]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(run_dir.parent / "numba")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            while not (run_dir / "received").exists() and process.poll() is None:
                time.sleep(0.01)
            run.train_some(0.1)
            run.checkpoint()
            publish(run, folder)
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0
    return out


def test_a_reader_opens_looks_up_and_refreshes_with_these_packages_alone(tmp_path: Path) -> None:
    others = [module for module, names in packages_distributions().items() if not set(names) & {*PINS, "rowcast"}]
    assert {"torch", "zmq", "structlog", "typer", "yaml"} <= set(others)
    alone = read(tmp_path / "a", tmp_path / "served_a", [sys.executable], others)
    assert alone == read(tmp_path / "b", tmp_path / "served_b", [sys.executable])
    assert alone.startswith("[1, 2] ")


def test_a_package_that_a_reader_needs_is_missed(tmp_path: Path) -> None:
    """So the test above can fail."""
    with pytest.raises(AssertionError):
        read(tmp_path / "run", tmp_path / "served", [sys.executable], ["numba"])


def installed(folder: Path) -> Path:
    """An environment with these packages and rowcast alone, as deploy/serving.Dockerfile makes it. Skips without a
    registry."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    done = subprocess.run([*pip, "--requirement", DEPLOY / "serving.txt"], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no registry has them here: {done.stderr[-200:]}")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rowcast", source / "rowcast")  # with what its links lead to
    subprocess.run([*pip, "--no-deps", source], check=True)
    return folder / "bin" / "python"


@pytest.mark.timeout(900)
def test_an_installed_reader_serves_without_torch_and_is_small(tmp_path: Path) -> None:
    python = installed(tmp_path / "env")
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    nbytes = sum(path.lstat().st_size for path in packages.rglob("*"))
    assert nbytes < MOST_MB * 10**6
    assert not (packages / "torch").exists()
    assert read(tmp_path / "run", tmp_path / "served", [python, "-P"]).startswith("[1, 2] ")
