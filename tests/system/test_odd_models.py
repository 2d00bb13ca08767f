"""Models that people bring: with random numbers, with tied weights, without a use for their embeddings."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.plain_loop import run_plain_loop
from prefetcher.planner.capacity import divide_capacity, measure
from protocol.batch import Batch, ScheduledBatch
from protocol.job import Job
from protocol.tables import group_specs
from tests.driver import InProcessRun, Settings, start_state
from tests.system.test_exact import assert_equal_bits
from tests.workloads import BATCH_SIZE, NUM_DENSE, OPTIMIZERS, SmallModel, slots_for, small_batches, small_job
from trainer.dense import pack, unpack
from trainer.models import Embedded
from trainer.runner import StepRunner


class DropoutModel(SmallModel):
    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        return super().forward(nn.functional.dropout(dense, 0.5, self.training), embeddings)


class DenseOnlyModel(SmallModel):
    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        return super().forward(dense, [])


class TiedModel(SmallModel):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.same = self.hidden


def dropout_model(job: Job, num_dense: int) -> nn.Module:
    return DropoutModel(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables))


def dense_only_model(job: Job, num_dense: int) -> nn.Module:
    return DenseOnlyModel(num_dense)


def tied_model(job: Job, num_dense: int) -> nn.Module:
    return TiedModel(num_dense)


@pytest.mark.parametrize("factory", ["dropout_model", "dense_only_model"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_its_bits_are_the_plain_loops(factory: str, optimizer: str) -> None:
    job = small_job(optimizer, model={"kind": f"tests.system.test_odd_models:{factory}"})
    batches = small_batches(job, "single", num_steps=6, eval_at=(2,))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)


def test_tied_weights_are_saved_under_each_of_their_names() -> None:
    job = small_job("sgd", model={"kind": "tests.system.test_odd_models:tied_model"})
    groups = group_specs(job)
    runner = StepRunner(job, groups, [torch.zeros(4, group.record_floats) for group in groups], NUM_DENSE)
    tensors = unpack(pack(runner.state()))
    assert torch.equal(tensors["model.same.weight"], tensors["model.hidden.weight"])


def test_a_group_that_the_first_batches_leave_alone_has_slots_for_later() -> None:
    job = small_job("sgd", "empty")
    narrow, wide = group_specs(job)
    lookups = np.zeros((len(job.features), BATCH_SIZE), np.int64)
    lookups[list(narrow.feature_positions)] = 1
    batch = Batch(
        dense=np.zeros((BATCH_SIZE, NUM_DENSE), np.float32),
        labels=np.zeros(BATCH_SIZE, np.float32),
        ids=np.arange(lookups.sum()) % 100,
        offsets=np.concatenate([[0], np.cumsum(lookups)]),
    )
    scheduled = ScheduledBatch(step=0, kind="train", train_step=0, epoch=0, batch=batch)
    slots = divide_capacity((narrow, wide), measure((narrow, wide), [scheduled]), capacity_bytes=2**20)
    assert slots[wide.index] >= BATCH_SIZE, "room for a row a bag"
