"""Defines `Sequences`: the rows of a feature that is not pooled (pooling = "none"), one per look-up, sample by sample.

    offsets         0      2 2         5
    values          a0 a1      c0 c1 c2       sample 0 has two look-ups, sample 1 none, sample 2 three
    padded(length)  .  a0 a1   .  .  .   c0 c1 c2
    mask            0  1  1    0  0  0   1  1  1

Here length = 3. Look-ups keep the order of the data, the newest last if that is ordered by time; beyond `length`
look-ups, the first ones are dropped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The looked-up rows of a feature that is not pooled: n look-ups of B samples.

    values: f32 [n, D], in the order of the look-ups; gradients flow to them. Or an array with an entry per look-up,
        [n, ...].
    offsets: i32 [B + 1], the start of each sample's look-ups, from 0 to n.
    """

    values: Tensor
    offsets: Tensor

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the last `length` look-ups of each sample, padded at the left with zeros, and a mask.

        length: columns of the result.

        The values are f32 [B, length, D], or [B, length, ...] of an array, the newest look-up at the right; the mask is
        bool [B, length], True at a look-up. Does not wait for the device."""
        num_samples, (num_lookups, *width) = self.offsets.shape[0] - 1, self.values.shape
        ends = self.offsets[1:].long()
        lookup = torch.arange(num_lookups, device=ends.device)
        sample = torch.searchsorted(ends, lookup, right=True)
        column = lookup - ends[sample] + length  # negative where the look-up is too old
        dropped = num_samples * length  # a position after all others, for look-ups that are too old
        position = torch.where(column < 0, dropped, sample * length + column)
        padded = self.values.new_zeros(dropped + 1, *width).index_copy(0, position, self.values)
        columns = torch.arange(length, device=ends.device)
        mask = columns >= length - self.offsets.diff()[:, None]
        return padded[:dropped].view(num_samples, length, *width), mask


# so that torch.export accepts a model with them as inputs
torch.export.register_dataclass(Sequences, serialized_type_name="rowcast.Sequences")

Embedded = Tensor | Sequences  # a feature's input to the model: f32 [B, D] if it is pooled
