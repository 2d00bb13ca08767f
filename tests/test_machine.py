"""What the kernel's files say about memory and cores."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rowcast.prefetcher.stores.memory_store import StoredRows
from rowcast.runtime import machine
from rowcast.runtime.machine import free_memory, mapped_bytes, usable_cores
from rowcast.runtime.stages import ThreadPool


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


SMAPS = """\
00400000-00a00000 r-xp 00000000 fe:00 12   /usr/bin/python
Size:               6144 kB
Rss:                3000 kB
AnonHugePages:         0 kB
VmFlags: rd ex mr mw me sd
7f0000000000-7f0000600000 rw-p 00000000 00:00 0
Size:               6144 kB
Rss:                5000 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:        0 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac nr sd hg
7f0000600000-7f0000800000 rw-s 00000000 00:01 7    /dev/shm/rows
Size:               2048 kB
Rss:                2048 kB
AnonHugePages:         0 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh
"""


@pytest.mark.parametrize(
    ("spans", "kib"),
    [
        ([], (0, 0)),
        ([(0x7F0000000000, 0x7F0000600000)], (5000, 4096)),
        ([(0x7F0000200000, 0x7F0000300000), (0x7F0000400000, 0x7F0000500000)], (5000, 4096)),
        ([(0x7F0000500000, 0x7F0000600001)], (7048, 6144)),
        ([(0x7F0000800000, 0x7F0000900000)], (0, 0)),
    ],
)
def test_maps_that_hold_rows_are_counted_once(
    spans: list[tuple[int, int]], kib: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SMAPS", tmp_path / "smaps")
    assert mapped_bytes(spans) == (0, 0), "the kernel does not say"
    (tmp_path / "smaps").write_text(SMAPS)
    assert mapped_bytes(spans) == (1024 * kib[0], 1024 * kib[1])


def test_rows_that_were_written_are_resident() -> None:
    rows = StoredRows(2**13, 528)
    before = mapped_bytes([rows.span])[0]
    rows.write(np.arange(2**13), np.ones((2**13, 528), np.uint8), ThreadPool())
    resident, huge = mapped_bytes([rows.span])
    assert resident - before >= 2**13 * 576 - 2**21, "the first huge page may have been there"
    assert 0 <= huge <= resident
