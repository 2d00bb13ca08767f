"""Memory of exchanges is dropped only when the steps that use it are complete: what is dropped before is overwritten.

On a device, torch gives dropped memory to whoever asks next, while earlier work may still wait for its turn. Here it
becomes NaN at once, when the runner does not hold it any more.
"""

import gc
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from rowcast.trainer.models.row_exchange import Reused
from rowcast.trainer.models.shared_runner import SharedRunner
from tests.support.batches import NUM_DENSE, PLACED, batches_of_sizes, placed, slots_for, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import Settings, start_state
from tests.support.ranked_run import RankedRun
from tests.support.repeats import count

OWN = "rowcast.trainer.models"


class Dropped:
    """Overwrites what runners have dropped, after each of their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[Tensor] = []  # that some runner holds or held
        self.overwritten = 0
        self._runners: list[SharedRunner] = []
        rows = Reused.rows

        def noted(own: Reused, *arguments: Any) -> Tensor:
            found = rows(own, *arguments)
            if not any(flat is own._flat for flat in self.kept):
                self.kept.append(own._flat.fill_(torch.nan))
            return found

        monkeypatch.setattr(Reused, "rows", noted)
        for name in ("issue_train", "issue_evaluate", "completed"):
            monkeypatch.setattr(SharedRunner, name, self._followed(getattr(SharedRunner, name)))

    def _followed(self, method: Any) -> Any:
        def followed(runner: SharedRunner, *arguments: Any) -> None:
            method(runner, *arguments)
            if not any(runner is own for own in self._runners):
                self._runners.append(runner)
            held = {address for own in self._runners for address in memory_of(own)}
            for flat in [own for own in self.kept if own.untyped_storage().data_ptr() not in held]:
                flat.fill_(torch.nan)
                self.overwritten += 1
                self.kept = [own for own in self.kept if own is not flat]

        return followed


def memory_of(runner: SharedRunner) -> set[int]:
    """The addresses of all tensors that it holds, itself or in lists, dictionaries and objects of its package."""
    found, seen, left = set[int](), set[int](), deque[Any]([vars(runner)])
    while left:
        one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.add(one.untyped_storage().data_ptr())
        elif isinstance(one, (dict, list, tuple, deque)) or type(one).__module__.startswith(OWN):
            left.extend(gc.get_referents(one))
    return found


@pytest.mark.parametrize("first", range(0, count(6, soak=60), 2))
def test_steps_that_grow_drop_memory_only_when_no_step_uses_it(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = placed(small_job("adagrad", "multi", depth=4, horizon=6), PLACED, 2, 4)
    batches = batches_of_sizes(job, "multi", (6, 9, 14, 21, 32, 48, 64), eval_at=(4,), seed=5)
    expected = run_plain_loop(job, start_state(job, NUM_DENSE), batches, 4)
    settings = Settings(slots=slots_for(group_specs(job), batches, "everything"))
    dropped = Dropped(monkeypatch)
    for seed in range(first, first + 2):
        run = RankedRun(job, batches, Settings(slots=settings.slots, seed=seed), ranks=2, parts=4).run()
        assert_equal_bits(run, *expected)
    assert dropped.overwritten > 0
