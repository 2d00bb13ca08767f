"""Parts: how a batch is cut, the order in which the parts' gradients are added, and training on their sum."""

from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.plain_loop import add_up, run_plain_loop
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.parts import belonging, part_bounds, part_of, part_seed
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.job_model import JobModel
from tests.support.batches import BAGS, NUM_DENSE, OPTIMIZERS, Bags, make_batch, small_batches, small_job
from tests.support.driver import start_state
from tests.support.facts import facts
from tests.support.full_capacity import bits

Outcome = tuple[list[float], dict[str, Tensor]]


def samples_of(batch: Batch, num_features: int) -> list[tuple[Any, ...]]:
    """Everything that a sample has: dense features, label, and of each feature ids and weights."""
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    lookups = [[slice(*offsets[f * batch.size + i :][:2]) for f in range(num_features)] for i in range(batch.size)]
    return [
        (
            batch.dense[i].tolist(),
            float(batch.labels[i]),
            [batch.ids[own].tolist() for own in lookups[i]],
            batch.weights is not None and [batch.weights[own].tolist() for own in lookups[i]],
        )
        for i in range(batch.size)
    ]


@settings(max_examples=60)
@given(st.sampled_from(("single", "multi", "weighted", "empty")), st.integers(1, 40), st.integers(1, 12), st.integers())
def test_parts_one_after_the_other_are_the_samples_of_the_batch_in_their_order(
    bags: Bags, size: int, parts: int, seed: int
) -> None:
    job = small_job("sgd", bags)
    batch = make_batch(job, bags, size, np.random.default_rng(abs(seed)))
    cut = [part_of(batch, part, parts, belonging(job)) for part in range(parts)]
    num_features = len(job.features)
    assert [sample for part in cut for sample in samples_of(part, num_features)] == samples_of(batch, num_features)
    assert max(part.size for part in cut) - min(part.size for part in cut) <= 1
    for part in cut:
        assert (part.offsets is None, part.weights is None) == (batch.offsets is None, batch.weights is None)
        assert part.offsets is None or len(part.offsets) == num_features * part.size + 1


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 16))
def test_the_parts_of_a_rank_are_the_slice_that_it_has_if_there_is_a_part_a_rank(
    size: int, ranks: int, parts_per_rank: int
) -> None:
    assert part_bounds(size, ranks * parts_per_rank)[::parts_per_rank] == part_bounds(size, ranks)


def test_a_batch_smaller_than_the_parts_has_empty_ones_between_the_others() -> None:
    assert part_bounds(3, 8) == [0, 0, 0, 1, 1, 1, 2, 2, 3]


def test_parts_and_steps_and_seeds_have_random_numbers_of_their_own() -> None:
    seeds = {part_seed(seed, step, part) for seed in (0, 1, 2**63 - 1) for step in range(20) for part in range(20)}
    assert len(seeds) == 3 * 20 * 20


class Term(str):
    """What a sum is made of, and in which order."""

    def __add__(self, other: str) -> "Term":
        return Term(f"({self}+{other})")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_parts_are_added_as_a_tree(parts: int, expected: str) -> None:
    ran: list[int] = []

    def gradients_of(part: int) -> Any:
        ran.append(part)
        return [Term(part)]

    assert [str(term) for term in add_up(range(parts), gradients_of)] == [expected]
    assert ran == list(range(parts))


def outcome(
    optimizer: str, bags: Bags, parts: int, batches: list[ScheduledBatch] | None = None, **more: Any
) -> Outcome:
    job = small_job(optimizer, bags, **more)
    return run_plain_loop(
        job, start_state(job, NUM_DENSE), small_batches(job, bags) if batches is None else batches, parts
    )


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in some.items() if not torch.equal(bits(tensor), bits(others[name]))]


@pytest.mark.parametrize(("optimizer", "bags"), [*zip(cycle(OPTIMIZERS), BAGS, strict=False)])
def test_parts_change_roundings_and_nothing_else(optimizer: str, bags: Bags) -> None:
    whole_losses, whole = outcome(optimizer, bags, 1)
    losses, end = outcome(optimizer, bags, 8)
    assert losses == pytest.approx(whole_losses, rel=1e-4)
    for name, tensor in end.items():
        assert torch.allclose(tensor.float(), whole[name].float(), rtol=1e-2, atol=2e-3), name
    assert differing(end, whole), "nothing was rounded otherwise: the parts were not added up one by one"


def test_a_part_without_samples_changes_nothing() -> None:
    job = small_job("adagrad", "multi")
    rng = np.random.default_rng(2)
    batches = [
        ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=make_batch(job, "multi", 2, rng))
        for step in range(4)
    ]
    of_two, of_eight = (outcome("adagrad", "multi", parts, batches) for parts in (2, 8))
    assert part_bounds(2, 8) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert of_two[0] == of_eight[0]
    assert not differing(of_two[1], of_eight[1])


def test_a_compiled_model_needs_parts_of_one_size() -> None:
    job = small_job("sgd", model={"compile": True})
    with pytest.raises(ConfigError, match=facts("batch_size = 64", "3 parts")):
        JobModel(job, NUM_DENSE, parts=3)
