"""Chooses the kernels for a device; imports Triton and numba only if they are used.

Compares kernels with `torch_ops` on a thousand random rows, before they are used on this machine.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.job.file import parse_job
from rowcast.job.models import DLRMSettings
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, possible_groups
from rowcast.protocol.plan import arrange_each, first_not_ordered, first_not_rising
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import F32, I32
from rowcast.runtime.disk import use_safe_caches
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow
from rowcast.trainer.device.streams import gather_each, on_device, scatter_each
from rowcast.trainer.kernels import (
    Chunks,
    GroupLookup,
    Kernels,
    RecordViews,
    SlotArranger,
    cut_long_rows,
    part_of,
    rows_of,
    rule_at,
    torch_ops,
)
from rowcast.trainer.kernels.torch_ops import Interaction

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
            records = random_records(group, generator).to(device)
            expected = records.clone()
            for step in range(NUM_STEPS):
                grad = random_gradient(trial.num_bags, group.embedding_dim, generator).to(device)
                rule = replace(rule_at(group.optimizer, step), lr=LR)
                pooled = []
                for group_records, implementation in ((records, kernels), (expected, torch_ops)):
                    rows = rows_of(group_records, group)
                    pooled.append(implementation.lookup(rows, trial.lookup, trial.divisors))
                    implementation.update(rows, grad, trial.lookup, trial.divisors, rule)
                if not equal_bits(*pooled):
                    return f"look-ups of {trial.name} in {group.name}"
                if not (equal_bits if exact else partial(equal_but_for_roundings, group))(records, expected):
                    return f"updates by {trial.name} in {group.name}"
                records.copy_(expected)  # roundings do not accumulate, and look-ups read equal rows
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
        values, expected = part_of(one, part), part_of(other, part)
        tolerance = TOLERANCE[values.dtype]
        values, expected = values.float(), expected.float()
        allowed = tolerance * expected.abs() + OF_LARGEST * expected.abs().max()
        if not torch.all((values - expected).abs() <= allowed):
            return False
    return True


WORTH_SAYING_S = 2.0


def choose_kernels(device: torch.device, job: Job | None = None) -> Kernels:
    """Returns the fastest kernels that this installation has for `device`.

    Warns and falls back to plain torch operations if those kernels cannot be used or have wrong results. If a job is
    given, compiles them for its tables and its interaction, and checks them. Raises ConfigError if that makes the
    device unusable.
    """
    if device.type not in ("cpu", "cuda") or (job is not None and job.trainer.kernels == "torch"):
        return torch_ops
    began_s = time.perf_counter()
    with said_if_slow(WORTH_SAYING_S, "preparing the kernels; a first start compiles them: about 10 s"):
        chosen = triton_kernels(device, job) if device.type == "cuda" else compiled_kernels(job)
        if job is not None and isinstance(job.model, DLRMSettings) and job.model.interaction == "fused":
            choose_interaction(device, job.trainer.kernels, len(job.features), job.model.bottom_mlp[-1])
    seconds = time.perf_counter() - began_s
    if seconds > WORTH_SAYING_S:
        get_logger().info("prepared the kernels; later starts take less", seconds=round(seconds, 1))
    return chosen


def compiled_kernels(job: Job | None) -> Kernels:
    from rowcast.runtime.compiled import LoopCache  # imports numba, needed only for a CPU
    from rowcast.trainer.kernels.compiled_ops import CompiledOps

    LoopCache.say = get_logger().warning
    compiled = CompiledOps(torch.get_num_threads())
    differing_result = None if job is None else differing(CompiledOps, possible_groups(job))
    if differing_result is None:
        return compiled
    get_logger().warning(
        "compiled kernels have other bits than torch here, so plain torch operations serve, which are slower",
        differ=differing_result,
    )
    return torch_ops


def compile_for_cpu() -> None:
    """Compiles the loops of a trainer on a CPU for every job."""
    from rowcast.trainer.kernels.compiled_ops import CompiledOps, updates

    tables = [{"name": "t", "num_embeddings": 8, "embedding_dim": 4, "features": ["f"], "pooling": "mean"}]
    arrange_each(np.zeros((0, 9), np.int64), np.zeros(1, np.int64))
    no_places = np.zeros((0, 4), np.int64)
    first_not_ordered(np.zeros(0, np.uint16), no_places, np.zeros(1, np.int64), np.zeros(1, np.uint8))
    first_not_rising(np.zeros(0, np.int32), no_places)
    gather_each(no_moves := np.zeros((0, 7), np.int64))
    scatter_each(no_moves)
    for kind in updates():
        optimizer = {"sparse": {"kind": kind, "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}}
        job = parse_job(
            {
                "job": {"run_dir": "-"},
                "data": {"format": "synthetic", "batch_size": 2},
                "tables": tables,
                "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
                "optimizer": optimizer,
                "cache": {"capacity": "1MiB"},
            }
        )
        difference(CompiledOps(), group_specs(job))


@cache  # one check per process
def differing(kernels: Callable[[int], Kernels], groups: tuple[GroupSpec, ...]) -> str | None:
    return difference(kernels(torch.get_num_threads()), groups)


def triton_kernels(device: torch.device, job: Job | None) -> Kernels:
    """Returns Triton's kernels, if its launcher can be built here, every kernel of the job runs, and the results are
    right.

    The launcher needs a C compiler and Python's headers. The check launches each kernel in every variant that a step of
    the job may launch, so no step has to compile one.
    """
    use_safe_caches()
    try:
        from rowcast.trainer.kernels import triton_ops

        triton_ops.make_launcher()
        triton_ops.check_dims(() if job is None else [table.width for table in job.tables])
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return plain_operations(device, str(error))
    if job is None:
        return triton_ops
    try:
        with on_device(device):
            found = difference(triton_ops, possible_groups(job), device, exact=False)
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of many types
        cause = f"{type(error).__name__}: {error}"
        refuse_if_lost(device, cause)
        return plain_operations(device, cause)
    return triton_ops if found is None else plain_operations(device, f"{found} differ from those of torch")


def plain_operations(device: torch.device, cause: str) -> Kernels:
    get_logger().warning("kernels in plain torch operations, which are slower", device=str(device), cause=cause)
    return torch_ops


def refuse_if_lost(device: torch.device, cause: str) -> None:
    """Raises ConfigError if this process can no longer use the device, as after a kernel's illegal address."""
    try:
        use(device)
    except RuntimeError:
        first_line = cause.partition("\n")[0]
        raise ConfigError(
            f"a Triton kernel failed its check and left {device} unusable for this process ({first_line}); "
            'set trainer.kernels = "torch"'
        ) from None


@cache
def choose_interaction(device: torch.device, kernels: str, num_features: int, dim: int) -> Interaction:
    """Returns Triton's interaction on CUDA if it runs and has the bits of plain torch operations, otherwise those.

    `kernels`: the job's `trainer.kernels`. Raises ConfigError if the check makes the device unusable.
    """
    if device.type != "cuda" or kernels == "torch":
        return torch_ops
    try:
        from rowcast.trainer.kernels import triton_ops

        with on_device(device):
            found = interaction_difference(triton_ops, device, num_features, dim)
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of many types
        cause = f"{type(error).__name__}: {error}"
        refuse_if_lost(device, cause)
        found = cause
    if found is None:
        return triton_ops
    get_logger().warning("interaction in plain torch operations, which is slower", device=str(device), cause=found)
    return torch_ops


def interaction_difference(
    kernels: Interaction, device: torch.device, num_features: int, dim: int, batch_size: int = 5
) -> str | None:
    """Names the first result that has other bits than plain torch operations on the same device; None if none has."""
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (batch_size, dim),
        (num_features, batch_size, dim),
        (batch_size, dim + num_features * (num_features + 1) // 2),
    )
    bottom, features, grad = (torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes)
    pairs = {
        "products": ((kernels.forward(bottom, features),), (torch_ops.forward(bottom, features),)),
        "gradients": (kernels.backward(bottom, features, grad), torch_ops.backward(bottom, features, grad)),
    }
    for name, (result, expected) in pairs.items():
        if not all(map(equal_bits, result, expected)):
            return f"{name} differ from those of torch"
    return None


def use(device: torch.device) -> None:
    """Raises RuntimeError if an operation on the device fails."""
    torch.ones(1, device=device).item()


Ints = npt.NDArray[np.integer[Any]]
Arrays = TypeVar("Arrays", bound=LookupArrays[npt.NDArray[Any]])


def lookup_arrays(
    rows: Ints, slots: I32, counts: Ints | None = None, weights: F32 | None = None, sequence_offsets: I32 | None = None
) -> LookupArrays[npt.NDArray[Any]]:
    """`rows` [N]: any numbers in the order of the keys. `slots` [N]: of each look-up's row. `counts` [G]: the look-ups
    of each bag; None: one each. Weights and offsets as in `LookupArrays`."""
    _, firsts, uses = np.unique(rows, return_index=True, return_counts=True)
    order = np.argsort(rows, kind="stable").astype(np.int32)
    return LookupArrays(
        slots=slots,
        unique_slots=slots[firsts],
        segment_offsets=bounds(uses),
        bag_order=order if counts is None else np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order],
        lookup_order=None if weights is None else order,
        offsets=None if counts is None else bounds(counts),
        weights=weights,
        sequence_offsets=sequence_offsets,
    )


def arranged(arrays: Arrays, group: GroupSpec) -> Arrays:
    """Returns the look-ups of a plan with `slots` and `bag_order` instead of `order`."""
    if arrays.order is None:
        return arrays
    slots, bag_order = np.empty(len(arrays.order), np.int32), np.empty(len(arrays.order), np.int32)
    given = (arrays.order, arrays.segment_offsets, arrays.unique_slots, slots, bag_order)
    plan = (0, len(slots), len(arrays.unique_slots), *(array.ctypes.data for array in given))
    SlotArranger([group]).arrange(len(slots) // group.num_features, [plan])
    return replace(arrays, order=None, slots=slots, bag_order=bag_order)


def bounds(counts: Ints) -> I32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def group_lookup(arrays: LookupArrays[npt.NDArray[Any]], batch_size: int) -> GroupLookup:
    """Returns a step's look-ups on the CPU; `arrays` may be a plan's. Uses the same memory."""
    sequences = arrays.sequence_offsets
    return GroupLookup(
        batch_size=batch_size,
        sequence_lookups=() if sequences is None else tuple(sequences[:, -1].tolist()),
        chunks=Chunks(*map(torch.from_numpy, cut_long_rows(arrays.segment_offsets))),
        **{name: torch.from_numpy(array) for name, array in arrays.named().items()},
    )


def moved(lookup: GroupLookup, device: torch.device) -> GroupLookup:
    arrays = {name: array.to(device) for name, array in lookup.named().items()}
    return replace(lookup, chunks=Chunks(*(array.to(device) for array in lookup.chunks)), **arrays)
