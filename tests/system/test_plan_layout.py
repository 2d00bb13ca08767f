"""A new array of a plan is a line in the table and one in the planner: a changed copy of the tree trains with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rowcast.job.tables import group_specs
from rowcast.protocol.session import PREFETCHER
from rowcast.runtime.errors import RowcastError
from rowcast.trainer.models import runner
from tests.hostile.peers import HostileRun, array_of
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings

ROOT = Path(__file__).parents[2]
PACKAGES = ("rowcast", "runtime", "job", "protocol", "prefetcher", "trainer", "analysis", "tests")
IN_THE_TABLE = (
    "protocol/plan_layout.py",
    "    # bag boundaries in slots;",
    '    bag_ranks: Annotated[A | None, ArrayLayout("i4", (G,), below=G)] = None\n',
)
IN_THE_PLANNER = (
    "prefetcher/planner/planner.py",
    "            weights=rows.weights,",
    "            bag_ranks=np.arange(np.max(bag_order(rows, order), initial=-1) + 1, dtype=np.int32)[::-1].copy(),\n",
)


def small_run() -> InProcessRun:
    job = small_job("adagrad")
    batches = small_batches(job, "single")
    return InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()


def train_in_the_copy() -> None:
    """Prints the losses. Every look-up has the new array, and a value outside its range is refused."""
    looked_up: list[Any] = []
    step_lookups = runner.step_lookups

    def noted(step: Any) -> Any:
        looked_up.extend(step_lookups(step))
        assert [own.bag_ranks[[0, -1]].tolist() for own in looked_up[-2:]] == [
            [len(own.slots) - 1, 0] for own in looked_up[-2:]
        ]
        return looked_up[-2:]

    runner.step_lookups = noted
    losses = [float(loss) for loss in small_run().results.losses]
    assert looked_up

    def lie(message: Any, content: Any) -> Any:
        own = array_of(message, content, "1.bag_ranks")
        if own is None:
            return None
        own[3] = 10**6
        return message

    with pytest.raises(RowcastError, match=r"1\.bag_ranks holds 1000000, which is not from 0 to"):
        HostileRun(PREFETCHER, lie).run()
    sys.stdout.write(json.dumps(losses))


def test_an_array_of_a_plan_is_added_with_a_line_in_the_table_and_one_in_the_planner(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    for path, before, line in (IN_THE_TABLE, IN_THE_PLANNER):
        source = (tmp_path / path).read_text()
        assert source.count(before) == 1
        (tmp_path / path).write_text(source.replace(before, line + before))
    code = "from tests.system.test_plan_layout import train_in_the_copy; train_in_the_copy()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout.splitlines()[-1]) == [float(loss) for loss in small_run().results.losses]
