"""How many bytes does a step move on a device, from the look-up to the rows' update, without the MLPs? A part of
`benchmarks.launches --bytes`.

Method: look-up, interaction, its backward pass and the update, on torch's `meta` device, which computes nothing, with
the plan of one real batch. Torch operators count their inputs and outputs, without those that make views or allocate;
an expanded tensor counts what it holds. Our kernels count what benchmarks/kernel_bytes.py says.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_check.jobs import Size, batches_of, make_job
from benchmarks.kernel_bytes import lookup_bytes, update_bytes
from benchmarks.training.recorded import recorded_plans, slots_for, touched
from benchmarks.training.resident import step_inputs
from rowcast.job.models import DLRMSettings
from rowcast.job.tables import group_specs
from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, torch_ops
from rowcast.trainer.models import interaction
from rowcast.trainer.models.dlrm import DLRM
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.runner import step_lookups

META = torch.device("meta")
SIZE = Size(batch_size=65_536, steps=1, dim=128, scale=1.0, bottom_mlp=(512, 256, 128), top_mlp=(1024, 1))
NUM_DENSE = 13
ALLOCATE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes by operator and kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATE:
            self.found[name] += sum(map(held_bytes, tensors_in((args, kwargs, result))))
        return result


def tensors_in(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def held_bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


class CountedKernels:
    """As much of `Kernels` and `Interaction` as a step calls, with results of the right shapes."""

    def __init__(self, found: Counter[str]) -> None:
        self._found = found
        self.apply, self.reduce = torch_ops.apply, torch_ops.reduce  # a step calls neither

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        self._found["look-up kernel"] += lookup_bytes(rows, group)
        return torch.empty(len(group.slots), rows.weight.shape[1], device=META)

    def update(self, rows: RecordViews, grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
        self._found["update kernels"] += update_bytes(rows, group)

    def forward(self, bottom: Tensor, features: Tensor) -> Tensor:
        num_features, (batch_size, dim) = len(features), bottom.shape
        result = torch.empty(batch_size, dim + num_features * (num_features + 1) // 2, device=META)
        self._found["interaction, forward"] += bottom.nbytes + features.nbytes + result.nbytes
        return result

    def backward(self, bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        self._found["interaction, backward"] += 2 * (bottom.nbytes + features.nbytes) + grad.nbytes
        return torch.empty_like(bottom), torch.empty_like(features)


def count_bytes(kind: str) -> Counter[str]:
    """`kind`: as `model.interaction`."""
    job = make_job(SIZE, torch.device("cpu"))
    assert isinstance(job.model, DLRMSettings)
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, interaction=kind))
    batches, groups = batches_of(SIZE, torch.device("cpu")), group_specs(job)
    slots = slots_for(job, batches, touched(job, batches).rows)
    (recorded,) = recorded_plans(job, batches, slots)
    lookups = step_lookups(step_inputs(recorded, groups, torch.device("cpu")))
    counts = Bytes()
    kernels = CountedKernels(counts.found)
    records = [torch.empty(n, group.record_floats, device=META) for n, group in zip(slots, groups, strict=True)]
    with patch.object(interaction, "choose_interaction", lambda *others: kernels), counts:
        embeddings = Embeddings(groups, job.optimizer.sparse, records, kernels)
        model = DLRM(job, NUM_DENSE).to(META)
        bottom = torch.empty(SIZE.batch_size, SIZE.dim, device=META, requires_grad=True)
        counts.found.clear()  # the model was made
        features: Any = embeddings(lookups, 0)
        result = model.interact(bottom, features)
        result.backward(torch.empty_like(result))  # type: ignore[no-untyped-call]
    return counts.found


def table() -> str:
    lines = ["| model.interaction | GB of a step without the MLPs | of it |", "|---|---|---|"]
    for kind in ("bmm", "fused"):
        found = count_bytes(kind)
        parts = ", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in found.most_common() if nbytes >= 5e6)
        lines.append(f"| {kind} | {sum(found.values()) / 1e9:.2f} | {parts} |")
    return "\n".join(lines)
