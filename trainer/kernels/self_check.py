"""Compares kernels with `torch_ops` on a thousand random rows, before they are used on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowcast.job.schema import SparseOptimizer
from rowcast.job.tables import GroupSpec
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, torch_ops
from rowcast.trainer.kernels.chunks import Chunks
from rowcast.trainer.kernels.record_views import rows_of, rule_at

NUM_ROWS, NUM_LOOKUPS, NUM_STEPS = 1000, 2500, 2
LONGEST_BAG = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A step to try."""

    name: str
    lookup: GroupLookup
    divisors: Tensor | None
    num_bags: int


def difference(kernels: Kernels, groups: Sequence[GroupSpec], settings: SparseOptimizer) -> str | None:
    """Names the first result whose bits differ from `torch_ops` for these groups and optimizer; None: no result."""
    with torch.device("cpu"):  # independent of torch's default device
        return first_difference(kernels, groups, settings)


def first_difference(kernels: Kernels, groups: Sequence[GroupSpec], settings: SparseOptimizer) -> str | None:
    generator = torch.Generator().manual_seed(1)
    for group in groups:
        for trial in trials(generator):
            records = [random_records(group, generator)]
            records.append(records[0].clone())
            for step in range(NUM_STEPS):
                grad = random_gradient(trial.num_bags, group.embedding_dim, generator)
                pooled = []
                for group_records, implementation in zip(records, (kernels, torch_ops), strict=True):
                    rows = rows_of(group_records, group)
                    pooled.append(implementation.lookup(rows, trial.lookup, trial.divisors))
                    implementation.update(rows, grad, trial.lookup, trial.divisors, rule_at(settings, step))
                if not equal_bits(*pooled):
                    return f"look-ups of {trial.name} in {group.name}"
                if not equal_bits(*records):
                    return f"updates by {trial.name} in {group.name}"
    return None


def trials(generator: torch.Generator) -> Iterator[Trial]:
    lengths = torch.randint(0, LONGEST_BAG + 1, (NUM_LOOKUPS,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    counts = lengths.clamp(min=1).float()[:, None]
    for name, with_weights, bag_offsets, divisors in (
        ("single look-ups", False, None, None),
        ("single weighted look-ups", True, None, None),
        ("bags", False, offsets, None),
        ("weighted bags", True, offsets, None),
        ("averaged bags", False, offsets, counts),
    ):
        lookup = random_lookup(bag_offsets, with_weights, generator)
        yield Trial(name=name, lookup=lookup, divisors=divisors, num_bags=NUM_LOOKUPS)


def random_lookup(offsets: Tensor | None, with_weights: bool, generator: torch.Generator) -> GroupLookup:
    """NUM_LOOKUPS bags, in which some rows occur often."""
    num_lookups = NUM_LOOKUPS if offsets is None else int(offsets[-1])
    slots = (torch.rand(num_lookups, generator=generator) ** 3 * NUM_ROWS).int()
    unique_slots, uses = torch.unique(slots, return_counts=True)
    order = slots.argsort(stable=True).int()
    bags = torch.arange(NUM_LOOKUPS) if offsets is None else torch.arange(NUM_LOOKUPS).repeat_interleave(offsets.diff())
    none = torch.zeros(0, dtype=torch.int32)
    return GroupLookup(
        batch_size=NUM_LOOKUPS,
        slots=slots,
        unique_slots=unique_slots,
        segment_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), uses.cumsum(0)]).int(),
        bag_order=bags[order.long()].int(),
        chunks=Chunks(none, none, none),  # a CPU uses no chunks
        lookup_order=order if with_weights else None,
        offsets=offsets,
        weights=torch.randn(num_lookups, generator=generator).float() if with_weights else None,
    )


def random_records(group: GroupSpec, generator: torch.Generator) -> Tensor:
    """f32 [NUM_ROWS, record_floats]; the states are at least 0, because optimizers take their square roots."""
    records = torch.zeros(NUM_ROWS, group.record_floats, dtype=torch.float32)
    rows = rows_of(records, group)
    fill_randomly(rows, generator)
    return records


def fill_randomly(rows: RecordViews, generator: torch.Generator) -> None:
    values = torch.randn(rows.weight.shape, generator=generator)
    rows.weight.copy_(values)
    if rows.master is not None:
        rows.master.copy_(values)
    for state in rows.states:
        state.copy_(torch.rand(state.shape, generator=generator))


def random_gradient(num_bags: int, dim: int, generator: torch.Generator) -> Tensor:
    sizes = 10 ** (torch.rand(num_bags, 1, generator=generator) * 6 - 5)
    sizes[torch.rand(num_bags, generator=generator) < 0.1] = 0
    return (torch.randn(num_bags, dim, generator=generator) * sizes).float()


def equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
