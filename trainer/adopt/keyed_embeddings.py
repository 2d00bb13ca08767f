"""Holds the module's result, pooled embeddings by feature, with the interface of TorchRec's KeyedTensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


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
