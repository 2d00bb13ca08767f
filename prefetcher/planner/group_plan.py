"""Makes a group's plan from its look-ups and the moves of its rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.prefetcher.planner.group_planner import NO_ROWS, GroupMoves
from rowcast.prefetcher.planner.grouping import Grouping, bags_of
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import I32


def group_plan(
    lookups: LookupArrays[npt.NDArray[Any]],
    moves: Sequence[GroupMoves],
    share: GroupShare | None = None,
) -> GroupPlan:
    """`moves`: of each level, from the device down."""
    device, *below = moves
    return GroupPlan(
        **lookups.named(),
        fetch_slots=device.fetch.slots,
        fetch_keys=device.fetch.keys,
        evict_keys=device.evict.keys,
        num_dirty=device.num_dirty,
        fill_after=device.fill_after,
        load_keys=below[0].fetch.keys if below else NO_ROWS,
        spill_keys=below[0].evict.keys if below else NO_ROWS,
        share=share,
    )


def bag_order(grouping: Grouping, order: I32) -> I32:
    """Returns the bag of each look-up, in `order`."""
    if grouping.offsets is None:
        return order
    bags = np.empty(len(order), np.int32)
    bags_of(order, grouping.offsets, bags)
    return bags
