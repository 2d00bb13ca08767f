"""What the kernel's files say about memory and cores."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rowcast.runtime.machine import free_memory, usable_cores


def kernel(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}


def test_memory_is_the_machines_where_no_group_has_a_limit(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.current": "5\n",
    }
    alone = kernel(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert free_memory(alone) == 8000 * 1024
    grouped = kernel(tmp_path, {**unlimited, "sys/fs/cgroup/a/memory.stat": "anon 5\n"})
    assert free_memory(grouped) == 8000 * 1024


def test_the_tightest_group_around_a_process_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/container\n"}
    for folder, limit, usage, droppable in (("pod", 10**6, 600_000, 50_000), ("pod/container", 2 * 10**6, 600_000, 0)):
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{usage}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = f"anon 1\ninactive_file {droppable}\n"
    root = kernel(tmp_path, {**MEMINFO, **files})
    assert free_memory(root) == 450_000


def test_the_older_kind_of_group_counts_too(tmp_path: Path) -> None:
    """A container sees its own group at the root, under a path that is the host's."""
    files = {
        "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
    }
    root = kernel(tmp_path, {**MEMINFO, **files})
    assert free_memory(root) == 2_500_000


def test_this_machine_has_free_memory() -> None:
    assert 2**20 < free_memory() < 2**50


PAGES_BACK = """
import resource
import numpy as np
from rowcast.runtime.machine import keep_freed_memory
if {kept}:
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(600_000) for _ in range(20)]  # 5 MB each, less than what numpy asks large pages for
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    last = faults()
print(last)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
def test_memory_that_is_kept_costs_no_page_faults_when_it_comes_back() -> None:
    def faults(*, kept: bool) -> int:
        code = PAGES_BACK.format(kept=kept)
        return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    assert faults(kept=True) < 100 < faults(kept=False)


ALLOWED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000\n", ALLOWED),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("1 100000\n", 1),
        ("150000 100000\n", min(2, ALLOWED)),
        ("99900000 100000\n", ALLOWED),
        ("nonsense\n", ALLOWED),
        (None, ALLOWED),
    ],
)
def test_a_quota_bounds_the_cores_that_a_process_may_run_on(content: str | None, cores: int, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path) == cores
