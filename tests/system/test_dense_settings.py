"""Every setting of the dense side and of learning gives the plain loop's bits with that setting, not without it."""

import shutil
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job, Optimizer
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from tests.support.batches import NUM_DENSE, OPTIMIZERS, slots_for, small_batches, small_job
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state

DCNV2 = {"kind": "dcnv2", "bottom_mlp": [6, 5], "top_mlp": [7, 1], "cross_layers": 2, "cross_rank": 3}
TWO_TOWERS = {"kind": "tests.system.odd_models:two_tower_model"}
WARM = {"warmup": 3}
DECAYING = {"warmup": 2, "kind": "polynomial", "decay_start": 4, "decay_steps": 5, "final": 0.001}
COSINE = {"kind": "cosine", "decay_steps": 8}
Sections = Mapping[str, dict[str, Any]]  # of model, sparse and dense optimizer: what is set there
CASES: dict[str, Sections] = {
    "bf16": {"model": {"precision": "bf16"}},
    "clipped rows": {"sparse": {"clip_rows": 1e-3}},
    "clipped norm": {"dense": {"clip_norm": 0.05}},
    "clipped value": {"dense": {"clip_value": 1e-3}},
    "schedules": {"sparse": {"schedule": DECAYING}, "dense": {"schedule": COSINE}},
    "dcnv2": {"model": DCNV2},
    "own loss": {"model": TWO_TOWERS},
    "own loss in bf16": {"model": {**TWO_TOWERS, "precision": "bf16"}},
    "all together": {
        "model": {**DCNV2, "precision": "bf16"},
        "sparse": {"clip_rows": 1e-3, "schedule": COSINE},
        "dense": {"kind": "adam", "clip_norm": 0.05, "clip_value": 0.01, "schedule": WARM},
    },
}


def job_of(optimizer: str, sections: Sections) -> Job:
    sparse = {"kind": optimizer, "lr": 0.05, **sections.get("sparse", {})}
    dense = {"kind": "sgd", "lr": 0.05, **sections.get("dense", {})}
    job = small_job(optimizer, "multi", model=dict(sections.get("model", {})))
    return msgspec.structs.replace(job, optimizer=msgspec.convert({"sparse": sparse, "dense": dense}, Optimizer))


def plain(job: Job, batches: list[ScheduledBatch]) -> tuple[list[float], dict[str, Tensor]]:
    return run_plain_loop(job, start_state(job, NUM_DENSE), batches)


@pytest.mark.parametrize(("case", "optimizer"), [*zip(CASES, cycle(OPTIMIZERS), strict=False)])
def test_its_bits_are_the_plain_loops_with_the_same_settings(case: str, optimizer: str) -> None:
    job, without = job_of(optimizer, CASES[case]), job_of(optimizer, {})
    batches = small_batches(job, "multi")
    losses, end = plain(job, batches)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)
    assert losses != plain(without, batches)[0], "the settings change nothing"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
# both are of torch.compile's own code, which hides the second
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("model", [{}, TWO_TOWERS])
def test_a_compiled_model_has_the_bits_of_the_plain_loop_with_a_compiled_model(model: dict[str, Any]) -> None:
    job = job_of("adagrad", {"model": {**model, "compile": True}, "dense": {"kind": "adam"}})
    batches = small_batches(job, "multi")
    losses, end = plain(job, batches)
    torch._dynamo.utils.counters.clear()
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, (
        "the model, once, and what tells whether there is a compiler"
    )
    assert_equal_bits(run, losses, end)
    assert len(run.results.evaluations) == 2
    assert np.isfinite(losses).all()
    uncompiled = plain(job_of("adagrad", {"model": model, "dense": {"kind": "adam"}}), batches)
    assert end.keys() == uncompiled[1].keys(), "a compiled model's weights have other names"
    assert losses == pytest.approx(uncompiled[0], rel=0.02)
