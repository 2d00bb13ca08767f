"""Models that people bring: with random numbers, tied weights, embeddings that are not used, or a loss of their own."""

import numpy as np
import pytest
import torch

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import divide_capacity, measure
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.trainer.models.evaluate import RANK_BINS, ranking_figures
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.model_state import pack, unpack
from rowcast.trainer.models.runner import StepRunner
from tests.support.batches import (
    BATCH_SIZE,
    NUM_DENSE,
    OPTIMIZERS,
    slots_for,
    small_batches,
    small_job,
)
from tests.support.comparisons import assert_equal_bits
from tests.support.driver import InProcessRun, Settings, start_state
from tests.support.ranked_run import RankedRun


@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [*zip(("dropout_model", "dense_only_model", "hinge_model", "two_tower_model"), OPTIMIZERS, strict=True)],
)
def test_its_bits_are_the_plain_loops(factory: str, optimizer: str) -> None:
    job = small_job(optimizer, model={"kind": f"tests.system.odd_models:{factory}"})
    batches = small_batches(job, "single", num_steps=6, eval_at=(2,))
    losses, end = run_plain_loop(job, start_state(job, NUM_DENSE), batches)
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    assert_equal_bits(run, losses, end)


@pytest.mark.parametrize("factory", ["hinge_model", "two_tower_model"])
def test_an_evaluation_has_the_mean_of_the_models_own_loss_and_auc_only_of_logits(factory: str) -> None:
    job = small_job("sgd", model={"kind": f"tests.system.odd_models:{factory}"})
    batches = small_batches(job, "single", num_steps=1, eval_at=(1, 2))
    run = InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"))).run()
    [result] = run.results.evaluations
    end = run.state()
    side = JobModel(job, NUM_DENSE)
    side.model.load_state_dict({name: end[name] for name in side.model.state_dict()})
    tables = [PlainTable(table, job.features.index(table.features[0]), job, end) for table in job.tables]
    losses = []
    for batch in (own.batch for own in batches if own.kind == "eval"):
        embeddings = [feature for table in tables for feature in table.forward(batch)]
        outputs = side.forward(torch.tensor(batch.dense), embeddings, {}, training=False)
        losses.append((side.loss(outputs, torch.tensor(batch.labels)).item(), batch.size))
    assert [size for _, size in losses] == [BATCH_SIZE, BATCH_SIZE // 3]
    assert result.logloss == pytest.approx(
        sum(loss * size for loss, size in losses) / sum(size for _, size in losses), rel=1e-6
    )
    assert (result.auc is None, result.accuracy is None) == (factory == "two_tower_model",) * 2


def test_ranks_of_positives_are_the_same_for_any_parts_and_trainers() -> None:
    job = small_job("sgd", model={"kind": "tests.system.odd_models:ranking_model"})
    batches = small_batches(job, "single", num_steps=3, eval_at=(1, 2))
    settings = Settings(slots=slots_for(group_specs(job), batches, "two batches"))
    found = [
        InProcessRun(job, batches, settings).run().results.evaluations,
        *(
            RankedRun(job, batches, settings, ranks=ranks, parts=parts).run().pairs[0].results.evaluations
            for ranks, parts in ((1, 2), (2, 2), (2, 4))
        ),
    ]
    firsts = np.concatenate([own.batch.dense[:, 0] for own in batches if own.kind == "eval"])
    ranks = np.abs(firsts * 20).astype(np.int64)
    expected = ranking_figures(np.bincount(ranks + 1, minlength=RANK_BINS).tolist(), job.eval.ranks)
    assert 0 < expected["hr@1"] < expected["hr@50"]
    for [evaluation] in found:
        assert evaluation.ranking == expected
        assert evaluation.is_own_loss


def test_tied_weights_are_saved_under_each_of_their_names() -> None:
    job = small_job("sgd", model={"kind": "tests.system.odd_models:tied_model"})
    runner = StepRunner(job, [torch.zeros(4, group.record_floats) for group in group_specs(job)], NUM_DENSE)
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
    scheduled = ScheduledBatch.at(step=0, kind="train", train_step=0, epoch=0, batch=batch)
    slots = divide_capacity((narrow, wide), measure((narrow, wide), [scheduled]), capacity_bytes=2**20)
    assert slots[wide.index] >= BATCH_SIZE, "room for a row a bag"
