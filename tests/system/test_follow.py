"""A run that follows a folder, is killed and goes on, against a replay by the ordinary job (`benchmarks/follow.py`)."""

import random
from pathlib import Path

import pytest

from benchmarks.follow import WAYS, Way, followed
from rowcast.trainer.report.report_json import read_report
from tests.support.repeats import count


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS[1 : count(2, len(WAYS))], ids=lambda way: "-".join(map(str, way)))
def test_killed_while_files_arrive_and_leave_a_run_has_the_bits_of_its_replay(way: Way, tmp_path: Path) -> None:
    outcome = followed(way, count(2, 6), tmp_path, random.Random(1))
    assert (outcome.losses_differ, outcome.exports_equal) == (0, True)
    assert outcome.removed > 0
    delay = read_report(tmp_path / "follow" / "report.json").data_delay
    assert delay is not None
    assert delay.waiting_files == 0
    assert delay.longest_s >= (delay.last_s or 0) > 0
    assert outcome.listed == 0, "all that END has closed is trained"
