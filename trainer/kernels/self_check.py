"""Compares kernels with `torch_ops` on a thousand random rows, before they are used on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, part_of, rows_of, rule_at, torch_ops
from rowcast.trainer.kernels.lookups import group_lookup, lookup_arrays, moved

NUM_ROWS, NUM_LOOKUPS, NUM_STEPS = 1000, 2500, 2
LONGEST_BAG = 4
LR = 0.05  # large enough that no update is lost in the tolerance, unlike one in a warm-up
# relative to each value: a few roundings of its dtype; and relative to the largest value, because sums may cancel
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
OF_LARGEST = 1e-5
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A step to try."""

    name: str
    lookup: GroupLookup
    divisors: Tensor | None
    num_bags: int


def difference(
    kernels: Kernels,
    groups: Sequence[GroupSpec],
    device: torch.device = CPU,
    *,
    exact: bool = True,
) -> str | None:
    """Names the first result that differs from `torch_ops` for these groups; None if all agree.

    Look-ups must have the same bits. So must updates if `exact`; otherwise they may differ by roundings: on a device,
    kernels sum long rows in chunks, and torch's reductions and fused operations use a different order.
    """
    with torch.device("cpu"):  # independent of torch's default device
        return first_difference(kernels, groups, device, exact=exact)


def first_difference(kernels: Kernels, groups: Sequence[GroupSpec], device: torch.device, *, exact: bool) -> str | None:
    generator = torch.Generator().manual_seed(1)
    for group in groups:
        for trial in trials(group, generator, device):
            own = random_records(group, generator).to(device)
            expected = own.clone()
            for step in range(NUM_STEPS):
                grad = random_gradient(trial.num_bags, group.embedding_dim, generator).to(device)
                rule = replace(rule_at(group.optimizer, step), lr=LR)
                pooled = []
                for group_records, implementation in ((own, kernels), (expected, torch_ops)):
                    rows = rows_of(group_records, group)
                    pooled.append(implementation.lookup(rows, trial.lookup, trial.divisors))
                    implementation.update(rows, grad, trial.lookup, trial.divisors, rule)
                if not equal_bits(*pooled):
                    return f"look-ups of {trial.name} in {group.name}"
                if not (equal_bits if exact else partial(equal_but_for_roundings, group))(own, expected):
                    return f"updates by {trial.name} in {group.name}"
                own.copy_(expected)  # roundings do not accumulate, and look-ups read equal rows
    return None


def trials(group: GroupSpec, generator: torch.Generator, device: torch.device) -> Iterator[Trial]:
    """Yields every kind of step of the group: `Embeddings` has divisors for all bags if one feature is averaged."""
    lengths = torch.randint(0, LONGEST_BAG + 1, (NUM_LOOKUPS,), generator=generator)
    is_averaged = any(table.pooling == "mean" for table in group.feature_tables())
    divisors = lengths.clamp(min=1).float()[:, None].to(device) if is_averaged else None
    bags = "averaged bags" if is_averaged else "bags"
    kinds: list[tuple[str, Tensor | None, Tensor | None]] = [("single look-ups", None, None)]
    if len(group.unpooled_features) < group.num_features:
        kinds.append((bags, lengths, divisors))
    for name, bag_sizes, own_divisors in kinds:
        for with_weights in (False, True):
            lookup = moved(random_lookup(bag_sizes, with_weights, generator), device)
            full_name = f"weighted {name}" if with_weights else name
            yield Trial(name=full_name, lookup=lookup, divisors=own_divisors, num_bags=NUM_LOOKUPS)


def random_lookup(counts: Tensor | None, with_weights: bool, generator: torch.Generator) -> GroupLookup:
    """Draws NUM_LOOKUPS bags with some frequent rows: a tenth of all look-ups are of one row."""
    num_lookups = NUM_LOOKUPS if counts is None else int(counts.sum())
    slots = (torch.rand(num_lookups, generator=generator) ** 3 * NUM_ROWS).int().numpy()
    weights = torch.randn(num_lookups, generator=generator).float().numpy() if with_weights else None
    return group_lookup(lookup_arrays(slots, slots, None if counts is None else counts.numpy(), weights), NUM_LOOKUPS)


def random_records(group: GroupSpec, generator: torch.Generator) -> Tensor:
    """Returns f32 [NUM_ROWS, record_floats]; the states are at least 0, because optimizers take their square roots."""
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


def equal_but_for_roundings(group: GroupSpec, one: Tensor, other: Tensor) -> bool:
    """Compares records f32 [n, record_floats], field by field. NaN differs from every value."""
    for part in group.parts:
        own, expected = part_of(one, part), part_of(other, part)
        tolerance = TOLERANCE[own.dtype]
        own, expected = own.float(), expected.float()
        allowed = tolerance * expected.abs() + OF_LARGEST * expected.abs().max()
        if not torch.all((own - expected).abs() <= allowed):
            return False
    return True
