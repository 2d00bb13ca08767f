"""What the trainer derives from a plan is on the device when the step is computed, whatever the order of the copies."""

import numpy as np
import pytest
import torch

from rowcast.job.tables import group_specs
from rowcast.trainer.kernels import GroupLookup
from rowcast.trainer.kernels.derived import cut_long_rows
from rowcast.trainer.models import runner
from rowcast.trainer.models.runner import StepInputs, step_lookups
from tests.support.batches import Bags, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings


@pytest.mark.parametrize("bags", ["single", "weighted", "apart"])
@pytest.mark.parametrize("ring_bytes", [2**15, 2**20])
def test_each_step_has_the_chunks_of_its_own_long_rows(
    bags: Bags, ring_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job("adagrad", bags)
    batches = small_batches(job, bags)
    seen: list[int] = []

    def checked(step: StepInputs) -> list[GroupLookup]:
        lookups = step_lookups(step)
        for lookup in lookups:
            expected = cut_long_rows(lookup.segment_offsets.numpy())
            assert all(map(torch.equal, lookup.chunks, map(torch.from_numpy, expected)))
            seen.append(len(expected.chunk_rows))
        return lookups

    monkeypatch.setattr("rowcast.trainer.kernels.derived.CHUNK_LOOKUPS", 2)
    monkeypatch.setattr(runner, "step_lookups", checked)
    slots = slots_for(group_specs(job), batches, "more")
    for seed in range(3):
        InProcessRun(job, batches, Settings(slots=slots, ring_bytes=ring_bytes, seed=seed)).run()
    assert np.count_nonzero(seen) > len(seen) // 2
