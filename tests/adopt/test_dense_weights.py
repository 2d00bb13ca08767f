"""Ranks of a script whose dense weights come apart are refused soon, with the cause."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rowcast
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import Settings
from tests.support.script_ranks import ScriptRanks

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = 4
WITHOUT_A_SUM = (
    "after train step {} rank 1 has other dense weights than rank 0 (first: weight 0 of SGD, [8, 35]): each rank has "
    "trained or changed them for itself; wrap the model in DistributedDataParallel, or call "
    "rowcast.sum_gradients(model) after backward()"
)
ANOTHER_BEGINNING = (
    "after train step 0 rank 2 has other dense weights than rank 0 (first: weight 0 of SGD, [8, 35]), and had before "
    "the optimizer's step: make the model from one seed on all ranks (torch.manual_seed), and wrap the model in "
)


def refused(folder: Path, begin: Callable[[ScriptRanks], object]) -> str:
    job = small_job("adagrad", "multi", depth=1, horizon=4, ranks={"count": RANKS}, checkpoint={"every": 2})
    batches = small_batches(job, "multi", num_steps=7, eval_at=(2, 5, 6))[:-1]
    settings = Settings(slots=slots_for(group_specs(job), batches, "one batch"))
    with ScriptRanks(folder, job, batches, settings, RANKS) as run:
        begin(run)
        with pytest.raises(ConfigError) as error:
            run.run()
    return str(error.value)


@pytest.mark.parametrize(("since", "found"), [(0, 0), (4, 5)])
def test_a_script_that_adds_up_no_dense_gradients_is_refused_at_once_or_at_the_next_checkpoint(
    since: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up, calls = rowcast.sum_gradients, Counter[nn.Module]()

    def some(model: nn.Module) -> None:
        if calls[model] < since:
            add_up(model)
        calls[model] += 1

    monkeypatch.setattr(rowcast, "sum_gradients", some)
    assert refused(tmp_path, id) == WITHOUT_A_SUM.format(found)


def test_ranks_that_begin_with_other_weights_are_refused(tmp_path: Path) -> None:
    def begin(run: ScriptRanks) -> None:
        with torch.no_grad():
            next(iter(run.scripts[2].runner.model.parameters())).add_(1.0)

    assert refused(tmp_path, begin).startswith(ANOTHER_BEGINNING)
