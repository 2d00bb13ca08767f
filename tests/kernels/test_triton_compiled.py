"""What a device would run, read from what the compiler makes, and each launch on a stub of its driver."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.support.repeats import count

ROOT = Path(__file__).parent.parent.parent
# small numbers taken for zero, divisions and roots that are near
NEVER = (r"\.ftz", r"div\.full", r"\.approx", r"\batom\.", r"\bred\.")


@pytest.fixture(scope="module", params=[90, 80][: count(1, 2)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = compile_for(str(request.param), environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compile_for(target: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.compile_for_device", target]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_kernel_compiles_for_amd(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = compile_for("gfx942", environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == {"lookup_kernel", "segments_kernel", "join_kernel", "apply_kernel"}
    assert all("gfx942" in kernel["ptx"] for kernel in kernels)


def test_each_kernel_is_compiled_once_for_all_sizes_rates_and_steps(compiled: list[dict[str, Any]]) -> None:
    counts = Counter((kernel["name"], kernel["dim"], kernel["kind"]) for kernel in compiled)
    assert len(counts) == 3 * (1 + 2 + 2 + 1)  # look-up; segments and join, to reduce and to train; apply
    # bags of one, and others
    variants = {"lookup_kernel": 2, "segments_kernel": 2, "join_kernel": 1, "apply_kernel": 1}
    assert {name: max(count for key, count in counts.items() if key[0] == name) for name in variants} == variants


def test_each_operation_is_rounded_by_itself(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        for never in NEVER:
            assert not re.search(never, kernel["ptx"]), (kernel["name"], never)
        fused = len(re.findall(r"\bfma\.", kernel["ptx"]))
        assert bool(fused) == (kernel["kind"] == "adagrad"), kernel["name"]  # where torch's own operation is one
    roots = [kernel for kernel in compiled if "sqrt.rn.f32" in kernel["ptx"] and "div.rn.f32" in kernel["ptx"]]
    assert len(roots) == sum(kernel["kind"] is not None for kernel in compiled)


def test_rows_are_moved_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        if kernel["dim"] % 4 == 0 and kernel["name"] != "join_kernel":  # its threads have a column each
            assert wide_and_narrow(kernel, "ld")[0], kernel["name"]
            assert wide_and_narrow(kernel, "st")[0], kernel["name"]


def test_the_parts_of_a_record_are_moved_16_bytes_at_a_time_at_any_width(compiled: list[dict[str, Any]]) -> None:
    lookups = [kernel for kernel in compiled if kernel["name"] == "lookup_kernel"]
    of_33, of_128 = ([wide_and_narrow(own, "ld") for own in lookups if own["dim"] == dim] for dim in (33, 128))
    assert of_33 == of_128  # narrow ones are of slots and offsets
    training = [own for own in compiled if own["dim"] == 33 and own["kind"] and own["name"] != "join_kernel"]
    assert len(training) >= 2
    for kernel in training:  # weight and sum, and the sums of chunks
        assert wide_and_narrow(kernel, "ld")[0] >= 2, kernel["name"]
        assert wide_and_narrow(kernel, "st")[0] >= 2, kernel["name"]
        assert wide_and_narrow(kernel, "st")[1] == 0, kernel["name"]


def wide_and_narrow(kernel: dict[str, Any], instruction: str) -> tuple[int, int]:
    """How many accesses to global memory move 16 bytes, and how many fewer."""
    accesses = re.findall(rf"\b{instruction}\.global\S*", kernel["ptx"])
    wide = sum(".v4.b32" in access for access in accesses)
    return wide, len(accesses) - wide


def test_weights_are_rounded_to_the_nearest(compiled: list[dict[str, Any]]) -> None:
    narrow = [kernel for kernel in compiled if kernel["dim"] == 16 and kernel["kind"]]
    assert len(narrow) >= 3
    assert all(re.search(r"cvt\.rn\.bf16", kernel["ptx"]) for kernel in narrow)


def test_sums_of_rows_of_128_columns_have_eight_loads_of_a_row_under_way(compiled: list[dict[str, Any]]) -> None:
    """In the machine code, because only there is known what waits for what."""
    wide = [kernel for kernel in compiled if kernel["dim"] == 128]
    if not any(kernel["machine_code"] for kernel in wide):
        pytest.skip("no disassembler")
    for kernel in wide:
        under_way = sorted(loads_under_way(kernel["machine_code"]))
        if kernel["name"] == "segments_kernel":  # chunks of a long row; and other rows, which are several
            assert under_way[-1] >= 8, (kernel["kind"], under_way[-4:])
            assert under_way[-2] >= 4, under_way
        if kernel["name"] == "join_kernel":
            assert under_way[-1] >= 8, (kernel["kind"], under_way[-4:])


def loads_under_way(machine_code: str) -> list[int]:
    """For each block between labels: the most loads of values that were issued before one of them was used.

    A load of a row is the widest of the kernel.
    """
    instructions = [line.partition("\t")[2] or line for line in machine_code.splitlines()]
    widest = max(re.findall(r"\bLDG\.E[.\w]*", machine_code), key=registers_of)
    found, waiting = [0], list[set[int]]()
    for instruction in instructions:
        if instruction.endswith(":"):
            found.append(0)
            waiting = []
        numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", instruction)]
        if re.search(rf"\b{re.escape(widest)}\b", instruction):
            waiting = [target for target in waiting if not target & set(numbers[1:])]
            waiting.append(set(range(numbers[0], numbers[0] + registers_of(widest))))
            found[-1] = max(found[-1], len(waiting))
        else:
            waiting = [target for target in waiting if not target & set(numbers)]
    return found


def registers_of(load: str) -> int:
    return 4 if ".128" in load else 2 if ".64" in load else 1


CHECKOUT = Path(__file__).parents[2]
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
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)
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
