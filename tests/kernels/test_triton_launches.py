"""What Triton's launcher hands to the driver, with a driver that only looks: no device is needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.support.repeats import count

ROOT = Path(__file__).parents[2]
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
EXTRA = 2  # scratch memory of Triton's own, which no kernel here has


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("stub")
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("stub_driver.c")
    options = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{HEADERS}"]
    subprocess.run([compiler, *options, f"-o{library}", str(source)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.kernels.launch_on_stub", str(library), *["--all"] * count(0, 1)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_parameter_of_every_launch_reaches_the_driver(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        assert launch["launches"] == 1, launch
        for what in ("grid", "threads", "stream"):
            assert launch[what][0] == launch[what][1], launch
        assert launch["parameters"] == len(launch["expected"]) + EXTRA, launch
        for (kind, value), got in zip(launch["expected"], launch["got"], strict=True):
            bits = 2**64 - 1 if kind == "pointer" else 2**32 - 1  # what comes after 32 bits is not the parameter's
            assert got & bits == value, launch


def test_every_kernel_is_launched_with_and_without_what_may_be_absent(launches: list[dict[str, Any]]) -> None:
    absent: dict[str, list[set[int]]] = {}
    for launch in launches:
        absent.setdefault(launch["kernel"], []).append(set(launch["absent"]))
    optional = {name: set.union(*found) for name, found in absent.items()}
    for name, numbers in optional.items():
        for number in numbers:
            assert any(number not in found for found in absent[name]), f"{name} never has argument {number}"
    assert {name: len(numbers) for name, numbers in optional.items()} == {
        "lookup_kernel": 3,  # offsets, weights, divisors
        "segments_kernel": 9,  # divisors, weights, look-up order; row gradients, or slots to rate; master
        "join_kernel": 6,
        "apply_kernel": 1,  # master
        "interact_kernel": 0,
        "interact_backward_kernel": 0,
    }
