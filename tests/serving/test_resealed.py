"""Versions with right checksums and impossible contents are refused or served as they are: no crash, no hang."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.serving.served_run import versions_of
from tests.support.processes import ROOT
from tests.support.repeats import count

AT_A_TIME, LIMIT_S = 150, 240
PATTERN = re.compile(r"^(\d+) (.*): (DataError|served|DataError and served)$", re.MULTILINE)


@pytest.mark.timeout(3000)
def test_versions_that_were_changed_and_resealed_raise_data_errors_or_are_served(tmp_path: Path) -> None:
    folder, results, total = versions_of(tmp_path, "served"), Counter[str](), count(AT_A_TIME, 1500)
    for first in range(0, total, AT_A_TIME):
        command = [sys.executable, "-W", "error", "-W", "ignore::UserWarning", "-m", "tests.serving.resealing"]
        given = [*command, str(folder), str(first), str(AT_A_TIME)]
        ended = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert ended.returncode == 0, f"{ended.stdout[-500:]}\n{ended.stderr[-3000:]}"
        results.update(found[2] for found in PATTERN.findall(ended.stdout))
    assert results.total() == total
    assert results["DataError"] > total / 3
    assert results["served"] > total / 10
