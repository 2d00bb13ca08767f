"""Training goes on where stdout, stderr and the prefetcher's log cannot be written."""

import subprocess
import sys

import pytest

from rowcast.trainer.report.report_json import read_report
from tests.support.processes import ROOT, Session

ENDS = {"full": ">/dev/full 2>/dev/full", "closed": ">&- 2>&- <&-"}


@pytest.mark.parametrize("end", ENDS)
def test_training_goes_on_without_a_terminal_or_a_log(end: str, session: Session) -> None:
    session.run_dir.mkdir()
    (session.run_dir / "prefetcher.log").symlink_to("/dev/full")
    command = f'exec "$0" -m rowcast train --config="$1" --max-steps=3 {ENDS[end]}'
    arguments = ["bash", "-c", command, sys.executable, str(session.config)]
    done = subprocess.run(arguments, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0
    report = read_report(session.run_dir / "report.json")
    assert report.train_steps == 3
    assert (report.lines_lost > 0) == (end == "full")
