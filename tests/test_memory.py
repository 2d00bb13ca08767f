"""What the kernel's files say about memory."""

from pathlib import Path

from rowcast.runtime.memory import free_memory, memory_limit


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
    assert (free_memory(alone), memory_limit(alone)) == (8000 * 1024, 9000 * 1024)
    grouped = kernel(tmp_path, {**unlimited, "sys/fs/cgroup/a/memory.stat": "anon 5\n"})
    assert (free_memory(grouped), memory_limit(grouped)) == (8000 * 1024, 9000 * 1024)


def test_the_tightest_group_around_a_process_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/container\n"}
    for folder, limit, usage, droppable in (("pod", 10**6, 600_000, 50_000), ("pod/container", 2 * 10**6, 600_000, 0)):
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{usage}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = f"anon 1\ninactive_file {droppable}\n"
    root = kernel(tmp_path, {**MEMINFO, **files})
    assert (free_memory(root), memory_limit(root)) == (450_000, 10**6)


def test_the_older_kind_of_group_counts_too(tmp_path: Path) -> None:
    """A container sees its own group at the root, under a path that is the host's."""
    files = {
        "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
    }
    root = kernel(tmp_path, {**MEMINFO, **files})
    assert (free_memory(root), memory_limit(root)) == (2_500_000, 3_000_000)


def test_this_machine_has_free_memory() -> None:
    assert 2**20 < free_memory() < memory_limit() < 2**50
