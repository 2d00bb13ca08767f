"""Holds the modules' results, with the interfaces of TorchRec's KeyedTensor and JaggedTensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class JaggedTensor:
    """The rows of a feature that is not pooled: n look-ups of B samples, in their order."""

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        """values: f32 [n, D]. offsets: i32 [B + 1], from 0 to n."""
        self._values, self._offsets = values, offsets

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def lengths(self) -> Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> None:
        return None

    def device(self) -> torch.device:
        return self._values.device

    def to_dense(self) -> list[Tensor]:
        """Returns the rows of each sample. Waits for the device."""
        return list(self._values.split_with_sizes(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Returns f32 [B, length, D]: the first rows of each sample, padded at the right.

        desired_length: columns of the result; without it, those of the longest sample, and this waits for the device.
        """
        longest = int(self.lengths().max()) if desired_length is None else desired_length
        starts, ends = self._offsets[:-1].long(), self._offsets[1:].long()
        lookup = torch.arange(len(self._values), device=ends.device)
        sample = torch.searchsorted(ends, lookup, right=True)
        column, dropped = lookup - starts[sample], len(ends) * longest
        position = torch.where(column < longest, sample * longest + column, dropped)
        # not by torch.ops.aten._jagged_to_padded_dense_forward, which has no derivative
        padded = self._values.new_full((dropped + 1, self._values.shape[1]), padding_value)
        return padded.index_copy(0, position, self._values)[:dropped].view(len(ends), longest, -1)


class KeyedEmbeddings:
    """Keys are in the order of the tables and their features, as in TorchRec."""

    def __init__(self, keys: Sequence[str], features: Sequence[Tensor]) -> None:
        """`features`: f32 [B, D] of each key."""
        self._features = dict(zip(keys, features, strict=True))

    def keys(self) -> list[str]:
        return list(self._features)

    def values(self) -> Tensor:
        """f32 [B, sum of D]."""
        return torch.cat(list(self._features.values()), dim=1)

    def __getitem__(self, key: str) -> Tensor:
        return self._features[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self._features)

    def length_per_key(self) -> list[int]:
        return [feature.shape[1] for feature in self._features.values()]

    def offset_per_key(self) -> list[int]:
        lengths = self.length_per_key()
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def key_dim(self) -> int:
        return 1

    def device(self) -> torch.device:
        return next(iter(self._features.values())).device
