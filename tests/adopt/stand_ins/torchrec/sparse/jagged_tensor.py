import torch
from torch import Tensor


class JaggedTensor:
    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def lengths(self) -> Tensor:
        return self._lengths

    def to_padded_dense(self, desired_length: int) -> Tensor:
        """Cuts and pads at the right."""
        rows = [own[:desired_length] for own in torch.split(self._values, self._lengths.tolist())]
        return torch.stack([torch.cat([own, own.new_zeros(desired_length - len(own), own.shape[1])]) for own in rows])


class KeyedJaggedTensor:
    """Values and lengths feature-major."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor) -> None:
        self._keys, self._values, self._lengths = keys, values, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def stride(self) -> int:
        return len(self._lengths) // len(self._keys)

    def weights_or_none(self) -> Tensor | None:
        return None

    def of(self, feature: str) -> tuple[Tensor, Tensor]:
        """Ids of one feature, and the offsets of its bags."""
        lengths = self._lengths.view(len(self._keys), -1)
        at = self._keys.index(feature)
        first = int(lengths[:at].sum())
        offsets = torch.cat([lengths.new_zeros(1), lengths[at].cumsum(0)])
        return self._values[first : first + int(offsets[-1])], offsets
