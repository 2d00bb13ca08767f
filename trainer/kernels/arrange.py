"""Makes `slots` and `bag_order` of a plan from its `order`, on the device that computes the step."""

from functools import cache

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.arrange import arrange as compiled_arrange
from rowcast.protocol.arrange import table_starts


def arrange(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Writes `slots` and `bag_order`, i32 [N]. `order` u16 [N], checked; the others as in `LookupArrays`."""
    batch_size = len(order) // group.num_features
    if order.device.type == "cpu":
        starts = table_starts(group, batch_size)
        arrays = (own.numpy() for own in (segment_offsets, unique_slots, slots, bag_order))
        compiled_arrange(0, len(starts) - 1, 0, order.numpy(), starts, *arrays)
    else:
        arrange_in_torch(group, order, segment_offsets, unique_slots, slots, bag_order)


def arrange_in_torch(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Does the same in a few operations of torch, without a wait for the device."""
    batch_size = len(order) // group.num_features
    by_feature = bag_order.view(group.num_features, batch_size)
    by_feature.copy_(order.view_as(by_feature))
    by_feature.add_(first_features(tuple(table_starts(group, 1).tolist()), order.device)[:, None], alpha=batch_size)
    positions = torch.arange(len(order), dtype=torch.int32, device=order.device)
    rows = torch.searchsorted(segment_offsets[1:], positions, right=True, out_int32=True)
    slots.index_copy_(0, bag_order.long(), unique_slots.index_select(0, rows))


@cache
def first_features(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns i32 [F]: for each feature the first one of its table. `starts`: each table's first feature, and the
    end."""
    firsts = torch.tensor(starts, dtype=torch.int32, device="cpu")
    return firsts[:-1].repeat_interleave(firsts.diff()).to(device)
