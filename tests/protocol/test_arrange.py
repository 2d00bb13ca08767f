"""What a trainer makes of a plan's `order`: on the host, and in torch as on a device."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.protocol.arrange import MOST_ORDERED, first_not_permuted, table_starts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.trainer.kernels.derived import arrange_in_torch
from rowcast.trainer.kernels.lookups import arranged, lookup_arrays
from tests.support.planner_runs import one_group, random_batch, two_groups

Arrays = LookupArrays[npt.NDArray[Any]]


@pytest.mark.parametrize("seed", range(4))
def test_slots_and_bags_are_those_of_a_stable_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = two_groups() if seed % 2 else one_group(3, 100_000, 40)
    group = groups[0]
    batch = random_batch(rng, groups, int(rng.integers(1, 300)), jagged=False, weighted=False)
    grouper = Grouper(group, len(batch.ids) // batch.size)
    looked_up = grouper.lookups(batch)
    grouping = grouper.group(looked_up)
    unique_slots = rng.permutation(grouping.num_unique).astype(np.int32)
    plan: Arrays = LookupArrays(
        order=grouping.order, unique_slots=unique_slots, segment_offsets=grouping.segment_offsets
    )
    tables = np.repeat(np.arange(len(group.tables)), np.diff(looked_up.table_starts))
    _, rows = np.unique(tables << 32 | looked_up.ids, return_inverse=True)
    expected = lookup_arrays(rows, unique_slots[rows])
    assert equal(arranged(plan, group), expected)
    assert equal(in_torch(plan, group), expected)


def in_torch(plan: Arrays, group: GroupSpec) -> Arrays:
    assert plan.order is not None
    slots, bag_order = torch.zeros(2, len(plan.order), dtype=torch.int32)
    order, segments, unique = map(torch.from_numpy, (plan.order, plan.segment_offsets, plan.unique_slots))
    arrange_in_torch(group, order, segments, unique, slots, bag_order)
    return replace(plan, order=None, **{"slots": slots.numpy(), "bag_order": bag_order.numpy()})


def equal(ours: Arrays, theirs: Arrays) -> bool:
    return ours.named().keys() == theirs.named().keys() and all(
        np.array_equal(array, theirs.named()[name]) for name, array in ours.named().items()
    )


def test_a_table_of_65536_look_ups_is_ordered_and_a_larger_one_is_refused() -> None:
    marks = np.full(MOST_ORDERED, 7, np.uint8)
    order = np.random.default_rng(0).permutation(MOST_ORDERED).astype(np.uint16)
    starts = table_starts(one_group(1, 1)[0], MOST_ORDERED)
    assert first_not_permuted(np.concatenate([order, order]), starts, marks) == -1
    assert first_not_permuted(np.concatenate([order, order[:-1], order[:1]]), starts, marks) == 1
    assert first_not_permuted(np.concatenate([order, order, order]), np.array([0, 3 * MOST_ORDERED]), marks) == 0
