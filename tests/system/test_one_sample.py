"""Batches, and parts of batches, of one sample give the plain loop's bits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from examples.plain_loop import run_plain_loop
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from tests.support.batches import NUM_DENSE, make_batch, slots_for
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.jobs import job, table

DLRM = {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [4, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": DLRM,
    "dlrm, fused": {**DLRM, "interaction": "fused"},
    "dcnv2": {"kind": "dcnv2", "bottom_mlp": [4], "top_mlp": [4, 1], "cross_layers": 2, "cross_rank": 2},
    "wide-deep": {"kind": "wide-deep", "top_mlp": [4, 1]},
}
SIZES = {"65 samples in batches of 64": (64, 1, 64, 1), "batch_size = 1": (1,) * 9}


def batches_of(own: Any, sizes: Sequence[int]) -> list[ScheduledBatch]:
    rng = np.random.default_rng(7)
    made = [make_batch(own, "multi", size, rng) for size in sizes]
    return [
        ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=batch)
        for step, batch in enumerate(made)
    ]


def job_of(model: str) -> Any:
    linear = model == "wide-deep"
    tables = [table("a", 60, 4, "f0", "f1", linear=linear), table("b", 20, 4, "f2", linear=linear)]
    return job(tables=tables, model=MODELS[model], optimizer={"sparse": {"kind": "adagrad", "lr": 0.1}})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_one_sample_gives_the_bits_of_the_plain_loop(model: str, sizes: str) -> None:
    own = job_of(model)
    batches = batches_of(own, SIZES[sizes])
    losses, end = run_plain_loop(own, start_state(own, NUM_DENSE), batches)
    run = InProcessRun(own, batches, Settings(slots=slots_for(group_specs(own), batches, "more"))).run()
    assert_equal_bits(run, losses, end)
