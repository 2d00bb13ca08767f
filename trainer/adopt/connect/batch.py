"""Holds the loader's batches and the modules' results, and checks that a module looks up the last yielded batch.

The results have the interfaces of TorchRec's KeyedTensor and JaggedTensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from rowcast.protocol.batch import Kind
from rowcast.trainer.models.embedding import aligned
from rowcast.trainer.models.job_model import named_inputs
from rowcast.trainer.step.cache import Step

IDS_STAY = (
    "the ids of a batch stay with the prefetcher, and only its rows are here; give batch.sparse_features to the "
    "EmbeddingBagCollection, and what else the model needs to the batch as an array"
)
VALIDATION = (
    "batches of a validation set come from it too, if the factory returns a function of (split, epoch) that knows the "
    'split "eval", and connect has evaluate=True'
)
POSITIONS = {"dense": 0, "dense_features": 0, "sparse": 1, "sparse_features": 1, "labels": 2, "label": 2}


class SparseToken:
    """Replaces a batch's KeyedJaggedTensor: it identifies the batch and holds no ids."""

    def __init__(self, session: object, step: Step, keys: Sequence[str], device: torch.device) -> None:
        self.session, self.step, self.device = session, step.step, device
        self._batch_size, self._keys = step.header.batch_size, list(keys)

    def keys(self) -> list[str]:
        return list(self._keys)

    def stride(self) -> int:
        """The batch size, under KeyedJaggedTensor's name."""
        return self._batch_size

    def to(self, device: Any, non_blocking: bool = False) -> Self:
        require_device(self.device, device)
        return self

    def values(self, *args: Any) -> NoReturn:
        raise RuntimeError(IDS_STAY)

    lengths = offsets = weights = to_dict = __getitem__ = __iter__ = values


class LoadedBatch:
    """A batch in the script's own form: by attribute, by key, or unpacked as (dense, sparse, labels)."""

    def __init__(self, step: Step, session: object, keys: Sequence[str]) -> None:
        self.dense_features = copied(step.arrays["dense"])  # f32 [B, num_dense], on the device
        self.sparse_features = SparseToken(session, step, keys, self.dense_features.device)
        self.labels = copied(step.arrays["labels"])  # f32 [B] or [B, T], on the device
        # on the device, each [B, ...], or [n, ...] with an entry per look-up of a feature
        self.inputs = {name: copied(own) for name, own in named_inputs(step.arrays).items()}
        self.kind: Kind = step.header.kind
        self.train_step = step.header.train_step  # train batches before it
        self.epoch = step.header.epoch

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dense_features, self.sparse_features, self.labels))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str) and key in self.inputs:
            return self.inputs[key]
        if isinstance(key, str) and key not in POSITIONS:
            raise KeyError(f"{key}: a batch has dense, sparse, {', '.join([*self.inputs, 'labels'])}")
        return tuple(self)[POSITIONS[key] if isinstance(key, str) else key]

    def to(self, device: Any, non_blocking: bool = False) -> Self:
        require_device(self.dense_features.device, device)
        return self


def copied(array: Tensor) -> Tensor:
    """Returns a copy, because the plan's memory is reused a few steps later."""
    return aligned(array.clone())


def require_device(here: torch.device, wanted: Any) -> None:
    device = torch.device(wanted)
    if device.type != here.type or device.index not in (None, here.index):
        raise RuntimeError(
            f"a batch is on {here}, where its rows are, and cannot go to {device}; give "
            "EmbeddingBagCollection(device=...)"
        )


def check_features(features: Any, session: object, step: Step) -> None:
    """Raises RuntimeError unless `features` are the token of the step."""
    if not isinstance(features, SparseToken):
        raise RuntimeError(f"sparse features are {type(features).__name__}; {IDS_STAY}")
    if features.session is not session or features.step != step.step:
        raise RuntimeError(
            "sparse features are not those of the batch that the loader yielded last: they are of step "
            f"{features.step} and the batch of step {step.step}; only its rows are on the device, so look up each "
            f"batch before asking for the next; {VALIDATION}"
        )


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

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self._features)

    def length_per_key(self) -> list[int]:
        return [feature.shape[1] for feature in self._features.values()]

    def offset_per_key(self) -> list[int]:
        lengths = self.length_per_key()
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]
