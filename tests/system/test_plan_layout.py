"""A new array of a plan is a line in each of four places: a changed copy of the tree trains with a required one."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.protocol.session import PREFETCHER
from rowcast.runtime.errors import RowcastError
from rowcast.trainer.kernels import torch_ops
from rowcast.trainer.kernels.self_check import difference
from rowcast.trainer.models import runner, shared_runner
from tests.hostile.peers import HostileRun, array_of
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts
from tests.support.planner_oracle import oracle_entries
from tests.support.planner_runs import assert_same, entries_of, random_run, two_groups
from tests.support.ranked_run import RankedRun

ROOT = Path(__file__).parents[2]
PACKAGES = ("rowcast", "runtime", "job", "protocol", "prefetcher", "trainer", "analysis", "examples", "tests")
# file -> the line that comes after the new one, the new one: how many look-ups each distinct row has
IN_THE_TABLE = {
    "protocol/plan_layout.py": (
        "    # bag boundaries in slots;",
        '    row_counts: Annotated[A, ArrayLayout("i4", (U,), below=N + 1)]\n',
    ),
}
WHERE_IT_IS_MADE = {
    "prefetcher/planner/planner.py": (
        "            offsets=rows.offsets,",
        "            row_counts=np.diff(rows.segment_offsets),\n",
    ),
    "prefetcher/planner/exchange.py": (
        "            offsets=joined_offsets([part.offsets",
        "            row_counts=np.concatenate([np.diff(part.segment_offsets) for part in parts]),\n",
    ),
    "trainer/kernels/lookups.py": (
        "        offsets=None if counts is None",
        "        row_counts=uses.astype(np.int32),\n",
    ),
}


def small_run() -> InProcessRun:
    job = small_job("adagrad")
    batches = small_batches(job, "single")
    return InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()


def ranked_run() -> RankedRun:
    job = small_job("adagrad", "weighted")
    batches = small_batches(job, "weighted", num_steps=4, eval_at=(2,))
    return RankedRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more")), ranks=2, parts=4).run()


def losses_of(run: InProcessRun) -> list[float]:
    return [float(loss) for loss in run.results.losses]


def train_in_the_copy() -> None:
    """Prints the losses. Every look-up has the new array, and a value outside its range is refused."""
    looked_up: list[Any] = []
    step_lookups = runner.step_lookups

    def noted(step: Any) -> Any:
        lookups: Any = step_lookups(step)
        assert all(torch.equal(own.row_counts, own.segment_offsets.diff()) for own in lookups)
        looked_up.extend(lookups)
        return lookups

    with patch.object(runner, "step_lookups", noted), patch.object(shared_runner, "step_lookups", noted):
        losses = [losses_of(small_run())]
        undivided = len(looked_up)
        losses.append(losses_of(ranked_run().pairs[0]))
    assert len(looked_up) > undivided > 0

    # without a planner
    job, run = (
        small_job("adagrad"),
        random_run(seed=5, groups=two_groups(), num_steps=6, batch_size=5, depth=2, horizon=3),
    )
    assert difference(torch_ops, group_specs(job)) is None
    assert_same(entries_of(run), oracle_entries(run))

    def lie(message: Any, content: Any) -> Any:
        own = array_of(message, content, "1.row_counts")
        if own is None:
            return None
        own[3] = 10**6
        return message

    with pytest.raises(RowcastError, match=facts("1.row_counts", 1000000)):
        HostileRun(PREFETCHER, lie).run()
    sys.stdout.write(json.dumps(losses))


def test_an_array_of_a_plan_is_added_with_a_line_in_the_table_and_one_in_each_place_that_makes_look_ups(
    tmp_path: Path,
) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    places = {**IN_THE_TABLE, **WHERE_IT_IS_MADE}
    for path, (before, line) in places.items():
        source = (tmp_path / path).read_text()
        assert source.count(before) == 1
        (tmp_path / path).write_text(source.replace(before, line + before))
    code = "from tests.system.test_plan_layout import train_in_the_copy; train_in_the_copy()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    losses = json.loads(child.stdout.splitlines()[-1])
    assert losses == [losses_of(small_run()), losses_of(ranked_run().pairs[0])]
    recipes = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`{path}`" in recipes for path in places)


def test_look_ups_are_made_nowhere_else() -> None:
    makers = {
        str(file.relative_to(ROOT))
        for package in (*PACKAGES[1:], "benchmarks")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and "bag_order" in {keyword.arg for keyword in node.keywords}
    }
    assert makers == set(WHERE_IT_IS_MADE)
