"""Joins the look-ups of a group's plan with the moves of its rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.prefetcher.planner.group_planner import NO_ROWS, GroupMoves
from rowcast.prefetcher.planner.grouping import Grouping, bags_of
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.protocol.plan_layout import LOOKUP_ARRAYS, LookupArrays
from rowcast.runtime.arrays import I32

Lookups = LookupArrays[npt.NDArray[Any]]


def group_plan(
    lookups: Lookups, moves: GroupMoves, tier: GroupMoves | None, share: GroupShare | None = None
) -> GroupPlan:
    return GroupPlan(
        **{name: getattr(lookups, name) for name in LOOKUP_ARRAYS},
        fetch_slots=moves.fetch.slots,
        fetch_keys=moves.fetch.keys,
        evict_keys=moves.evict.keys,
        num_dirty=moves.num_dirty,
        fill_after=moves.fill_after,
        load_keys=NO_ROWS if tier is None else tier.fetch.keys,
        spill_keys=NO_ROWS if tier is None else tier.evict.keys,
        share=share,
    )


def bag_order(grouping: Grouping, order: I32) -> I32:
    """The bag of each look-up, in `order`."""
    if grouping.offsets is None:
        return order
    bags = np.empty(len(order), np.int32)
    bags_of(order, grouping.offsets, bags)
    return bags
