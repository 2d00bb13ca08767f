import os
from pathlib import Path

import pytest

from rowcast.runtime.machine import usable_cores

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
