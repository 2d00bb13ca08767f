"""What a model gets of a feature whose rows are not pooled (pooling = "none"): a row for each look-up, sample after sample.

    offsets         0      2 2         5
    values          a0 a1      c0 c1 c2       sample 0 has two look-ups, sample 1 none, sample 2 three
    padded(length)  .  a0 a1   .  .  .   c0 c1 c2
    mask            0  1  1    0  0  0   1  1  1

Here with length = 3. Look-ups stand in the order of the data, the newest last where that goes by time; where there are more than `length`,
the first ones are left away.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """n look-ups of B samples. Gradients flow to `values`."""

    values: Tensor  # f32 [n, D], in the order of the look-ups
    offsets: Tensor  # i32 [B + 1] where each sample's start, from 0 to n

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """f32 [B, length, D] and bool [B, length]: the last `length` look-ups of each sample, the newest at the right, zeros before them;
        and where there is a look-up. Nothing here waits for the device."""
        num_samples, (num_lookups, width) = self.offsets.shape[0] - 1, self.values.shape
        ends = self.offsets[1:].long()
        lookup = torch.arange(num_lookups, device=ends.device)
        sample = torch.searchsorted(ends, lookup, right=True)
        column = lookup - ends[sample] + length  # negative where the look-up is too old
        nowhere = num_samples * length  # a place behind all others, for those
        place = torch.where(column < 0, nowhere, sample * length + column)
        found = self.values.new_zeros(nowhere + 1, width).index_copy(0, place, self.values)
        columns = torch.arange(length, device=ends.device)
        mask = columns >= length - self.offsets.diff()[:, None]
        return found[:nowhere].view(num_samples, length, width), mask


# so that a model of them can be exported
torch.export.register_dataclass(Sequences, serialized_type_name="rowcast.Sequences")

Embedded = Tensor | Sequences  # of a feature: f32 [B, D], or its sequences
