"""How many launches does a step issue outside the model? Counted without a device, so the figures are no timings.

Method: the trainer of `analysis.estimate.rates.replay` on a CPU, whose plans and rows are in the ring. Triton's kernels
get as far as their launch, with the driver of a device that is absent; what they would compute comes from plain torch
operations, which are not counted. Every other torch operator of the thread is counted, unless it launches nothing: on a
device, each of these is at least one launch or one copy.

    python -m benchmarks.launches
    python -m benchmarks.launches --bytes     bytes instead, at 65,536 x 26 and dimension 128 (benchmarks/step_bytes.py)

    DLRM          26 tables of one dimension: one group
    fused DLRM    the same with `model.interaction = "fused"`
    DCNv2         26 tables of six dimensions: six groups
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import step_bytes
from benchmarks.training.recorded import record, train_batches
from rowcast.analysis.estimate.rates.replay import Replay
from rowcast.job.file import parse_job
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import measure
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, torch_ops
from rowcast.trainer.kernels.interaction import torch_interaction
from rowcast.trainer.models import build_dense_optimizer, interaction, job_model, runner
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel

SCALE, BATCH_SIZE = 0.002, 512  # of Criteo Kaggle's tables: the small ones have rows with very many look-ups
STEPS, FEWER_STEPS = 24, 16  # what the longer of two runs counts more is that of its additional steps
FIRST_EVALUATION = 5  # in a run that evaluates
DIMS = {"DLRM": (16,), "fused DLRM": (16,), "DCNv2": (4, 8, 12, 16, 24, 32)}
OWN_KEYS: dict[str, dict[str, Any]] = {"fused DLRM": {"interaction": "fused"}, "DCNv2": {"cross_rank": 8}}
CACHED = 0.6  # share of the rows that all batches touch, so that rows come and leave in every step
# operators that launch nothing, besides those that make views: allocations, a number read on the host, profiling
LAUNCH_NOTHING = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_local_scalar_dense",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
SECTIONS = {
    "moving": "plans and rows that come, victims that leave, the loss",
    "look-up": "look-ups, by feature",
    "gradients": "the gradients of a group's features, put together",
    "update": "the rows' update",
    "model": "the model: forward, loss, backward, dense optimizer; metrics of an evaluation",
}


class AbsentDriver:
    """As much of Triton's driver as a launch asks for before the kernel is compiled."""

    def __init__(self, target: str = "90") -> None:
        """`target`: a compute capability times 10, or AMD's name of an architecture."""
        from triton.backends.compiler import GPUTarget

        is_cuda = target.isdigit()
        self._target = GPUTarget("cuda", int(target), 32) if is_cuda else GPUTarget("hip", target, 64)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def noted_launches(note: Callable[[str, str], None]) -> Iterator[None]:
    """Calls note(kernel, variant) for each launch of a Triton kernel. Nothing is compiled, and no device is needed."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def instead_of_compiling(self: Any, key: str, *others: Any) -> None:
        note(self.fn.__name__, key)

    driver.set_active(AbsentDriver())
    with patch.object(JITFunction, "_do_compile", instead_of_compiling):
        yield


class NotedKernels:
    """Implements `Kernels`: launches Triton's kernels under `noted_launches` and computes with `torch_ops`."""

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`computing`: entered while torch computes what the kernels would."""
        from rowcast.trainer.kernels import triton_ops

        self._launched, self._computing = triton_ops, computing

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        self._launched.lookup(rows, group, divisors)
        with self._computing():
            return torch_ops.lookup(rows, group, divisors)

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        self._launched.reduce(pooled_grad, group, divisors)
        with self._computing():
            return torch_ops.reduce(pooled_grad, group, divisors)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        self._launched.apply(rows, unique_slots, row_grads, rule)
        with self._computing():
            torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        self._launched.update(rows, pooled_grad, group, divisors, rule)
        with self._computing():
            torch_ops.update(rows, pooled_grad, group, divisors, rule)


class NotedInteraction:
    """Implements `Interaction` likewise."""

    def __init__(self, computing: Callable[[], AbstractContextManager[None]]) -> None:
        from rowcast.trainer.kernels.interaction import triton_interaction

        self._launched, self._computing = triton_interaction, computing

    def forward(self, bottom: Tensor, features: Tensor) -> Tensor:
        self._launched.forward(bottom, features)
        with self._computing():
            return torch_interaction.forward(bottom, features)

    def backward(self, bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        self._launched.backward(bottom, features, grad)
        with self._computing():
            return torch_interaction.backward(bottom, features, grad)


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and launches by section."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[str, str]] = Counter()  # (section, operator or kernel)
        self._section: str | None = "moving"  # None: not counted
        self._num_bags: set[int] = set()  # of each group, in the batch that is looked up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._section is not None and not func.is_view and name not in LAUNCH_NOTHING:
            # autograd puts the gradients of the features together in its own thread of calls: told by their shape
            is_joined = name == "cat" and len(result) in self._num_bags and self._section == "model"
            self.found["gradients" if is_joined else self._section, name] += 1
        return result

    def launched(self, kernel: str, variant: str) -> None:
        assert self._section is not None, "torch computes instead of a kernel, and launches none"
        self.found[self._section, kernel] += 1

    @contextmanager
    def section(self, name: str | None) -> Iterator[None]:
        before, self._section = self._section, name
        try:
            yield
        finally:
            self._section = before

    def looks_up(self, lookups: Sequence[GroupLookup]) -> None:
        self._num_bags = {len(own.slots) if own.offsets is None else len(own.offsets) - 1 for own in lookups}

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Gives what is called inside to its section."""
        sections = [
            (Embeddings, "__call__", "look-up"),
            (Embeddings, "update", "update"),
            (JobModel, "forward", "model"),
            (JobModel, "loss", "model"),
            (JobModel, "step", "model"),
            (EvalMetrics, "update", "model"),
            (EvalMetrics, "close", "model"),
            (torch.autograd, "backward", "model"),
        ]
        with ExitStack() as stack:
            for owner, name, section in sections:
                stack.enter_context(patch.object(owner, name, self._in_section(getattr(owner, name), section)))
            yield

    def _in_section(self, call: Callable[..., Any], section: str) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if section == "look-up":
                self.looks_up(args[1])
            with self.section(section):
                return call(*args, **options)

        return counted


def job_of(model: str, optimizer: str, pooling: str) -> Job:
    """26 tables, with dimensions in turn."""
    turns = cycle(DIMS[model])
    return parse_job(
        {
            "job": {"run_dir": "unused", "seed": 7},
            "data": {
                "format": "synthetic",
                "batch_size": BATCH_SIZE,
                "synthetic": {"samples": BATCH_SIZE * STEPS},
            },
            "tables": [
                {
                    "name": f"t{number}",
                    "num_embeddings": max(1, int(rows * SCALE)),
                    "embedding_dim": next(turns),
                    "features": [f"cat_{number}"],
                    "pooling": pooling,
                }
                for number, rows in enumerate(CRITEO_KAGGLE_CARDINALITIES)
            ],
            "model": {
                "kind": model.rpartition(" ")[2].lower(),
                "bottom_mlp": [64, DIMS[model][0]],
                "top_mlp": [64, 1],
                **OWN_KEYS.get(model, {}),
            },
            "optimizer": {"sparse": {"kind": optimizer, "lr": 0.02}, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1GiB"},
            "trainer": {"device": "cpu"},
        }
    )


@dataclass(frozen=True, slots=True)
class Counted:
    groups: int
    a_step: dict[tuple[str, str], float]  # (section, operator or kernel) -> times a step

    def of(self, section: str) -> tuple[float, float]:
        """Triton launches and torch operators."""
        own = {name: times for (place, name), times in self.a_step.items() if place == section}
        launches = sum(times for name, times in own.items() if name.endswith("_kernel"))
        return launches, sum(own.values()) - launches


def count(job: Job, *, evaluates: bool) -> Counted:
    """Counts a step in which rows come and leave, on average."""
    batches = train_batches(job, STEPS)
    if evaluates:
        batches = [as_evaluation(own) if own.step >= FIRST_EVALUATION else own for own in batches]
    known = measure(group_specs(job), batches)
    slots = tuple(
        max(int(rows * CACHED), largest)
        for rows, largest in zip(known.distinct_rows, known.largest_batch_rows, strict=True)
    )
    longer, shorter = (count_run(job, batches[:steps], slots) for steps in (STEPS, FEWER_STEPS))
    longer.subtract(shorter)
    a_step = {name: times / (STEPS - FEWER_STEPS) for name, times in longer.items() if times}
    return Counted(len(slots), a_step)


def count_run(job: Job, batches: Sequence[ScheduledBatch], slots: tuple[int, ...]) -> Counter[tuple[str, str]]:
    counts = Counts()
    kernels, fused = NotedKernels(lambda: counts.section(None)), NotedInteraction(lambda: counts.section(None))
    with (
        noted_launches(counts.launched),
        patch.object(runner, "choose_kernels", lambda device, job: kernels),
        patch.object(interaction, "choose_interaction", lambda *args: fused),
        patch.object(job_model, "build_dense_optimizer", dense_optimizer_of_device),
        record(job, batches, slots, torch.device("cpu")) as recording,
    ):
        replay = Replay(recording, job)
        with counts.attributed(), counts:
            replay.run()
    return counts.found


def dense_optimizer_of_device(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As torch builds it for parameters on a device."""
    optimizer = build_dense_optimizer(job, parameters)
    for group in optimizer.param_groups:
        group["foreach"] = True
    return optimizer


def as_evaluation(batch: ScheduledBatch) -> ScheduledBatch:
    return replace(batch, kind="eval", train_step=FIRST_EVALUATION)


def main(
    optimizer: str = "adagrad",
    pooling: str = "sum",
    details: bool = False,
    in_bytes: Annotated[bool, typer.Option("--bytes")] = False,
) -> None:
    """Prints a table in Markdown."""
    if in_bytes:
        typer.echo(step_bytes.table())
        return
    os.environ.pop("TRITON_INTERPRET", None)
    typer.echo("| model | step | where | Triton launches | torch operators |\n|---|---|---|---|---|")
    for model in DIMS:
        for evaluates in (False, True):
            found = count(job_of(model, optimizer, pooling), evaluates=evaluates)
            groups = f"{found.groups} group{'s' * (found.groups > 1)}"
            for section, meaning in SECTIONS.items():
                launches, operators = found.of(section)
                if launches or operators:
                    step = "evaluation" if evaluates else "training"
                    typer.echo(f"| {model}, {groups} | {step} | {meaning} | {launches:.3g} | {operators:.3g} |")
            if details:
                for (section, name), times in sorted(found.a_step.items()):
                    typer.echo(f"    {section}: {name} {times:.3g}")


if __name__ == "__main__":
    typer.run(main)
