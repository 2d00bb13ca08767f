"""Groups of look-ups and records for tests of kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.trainer.kernels import Chunks, GroupLookup, RecordViews, Rule, rule_at
from rowcast.trainer.kernels.choose import fill_randomly, group_lookup, lookup_arrays

KINDS = tuple(ROW_OPTIMIZERS)
PRECISIONS = (
    (torch.float32, False),
    (torch.float16, False),
    (torch.float16, True),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
)
Array = npt.NDArray[np.int64]


def rule_of(kind: str, clip: float | None = None, step: int = 3) -> Rule:
    settings = ROW_OPTIMIZERS[kind].settings(kind=kind, lr=0.037 * step, eps=1e-8, clip_rows=clip)
    return rule_at(settings, step - 1)


def group_of(ids: Array, counts: Array | None, weights: Tensor | None, slots: Tensor) -> GroupLookup:
    """The plan of look-ups `ids` [N] in bags of `counts` look-ups, or of one each; row i is in slots[i]."""
    arrays = lookup_arrays(ids, slots.numpy()[ids], counts, None if weights is None else weights.numpy())
    group = group_lookup(arrays, len(ids) if counts is None else len(counts))
    # Triton's interpreter takes memories of one address for one, as an empty array and its neighbour have
    return replace(group, chunks=Chunks(*(array.clone() for array in group.chunks)))


def random_group(
    seed: int, num_rows: int, num_bags: int, most: int, weighted: bool = False, spare: int = 3
) -> GroupLookup:
    """Bags of up to `most` look-ups, some empty; of one each where `most` is 0. Half of all look-ups are of one row."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most, num_bags, endpoint=True) if most else None
    num_lookups = num_bags if counts is None else int(counts.sum())
    ids = rng.integers(0, num_rows, num_lookups) * rng.integers(0, 2, num_lookups)
    weights = torch.from_numpy(rng.standard_normal(num_lookups, np.float32)) if weighted else None
    slots = torch.from_numpy(rng.permutation(num_rows + spare)[:num_rows].astype(np.int32))
    return group_of(ids, counts, weights, slots)


def divisors_of(group: GroupLookup) -> Tensor:
    """As if every other bag were a mean."""
    assert group.offsets is not None
    counts = group.offsets.diff().clamp(min=1).float()
    return torch.where(torch.arange(len(counts)) % 2 == 0, counts, 1.0)[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The parts of a record: weights, master, states, each at a multiple of 16 bytes."""

    dim: int
    kind: str = "sgd"
    dtype: torch.dtype = torch.float32
    master: bool = False

    def parts(self) -> list[tuple[int, int]]:
        """Where each fp32 part starts, and its width; and the end."""
        states = [state.width(self.dim) for state in ROW_OPTIMIZERS[self.kind].states]
        end = -(-self.dim * self.dtype.itemsize // 16) * 4
        found = []
        for width in [*([self.dim] if self.master else []), *states]:
            found.append((end, width))
            end += -(-width // 4) * 4
        return [*found, (end, 0)]

    def records(self, num_slots: int, seed: int = 0) -> Tensor:
        """f32 [num_slots, record]: parts with values that training may have left, and all bytes between them 9.0."""
        generator = torch.Generator().manual_seed(seed)
        records = torch.full((num_slots, self.parts()[-1][0]), 9.0)
        fill_randomly(self.rows(records), generator)
        return records

    def rows(self, records: Tensor) -> RecordViews:
        parts = [records[:, start : start + width] for start, width in self.parts()[:-1]]
        master = parts.pop(0) if self.master else None
        return RecordViews(weight=records.view(self.dtype)[:, : self.dim], master=master, states=tuple(parts))


def random_gradients(num_rows: int, dim: int, seed: int = 1) -> Tensor:
    """Of very different sizes, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(num_rows, dim, generator=generator) * 10 ** (
        torch.rand(num_rows, 1, generator=generator) * 6 - 5
    )
    grads[torch.rand(num_rows, dim, generator=generator) < 0.1] = 0
    return grads


def trained(layout: Layout, records: Tensor, train: Callable[[RecordViews], None]) -> Tensor:
    """The records after `train`, as bits."""
    after = records.clone()
    train(layout.rows(after))
    return after.view(torch.int32)
