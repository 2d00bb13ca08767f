"""Times the parts of the built-in models, forward and backward, from the pooled embeddings on.

A backward pass is timed by itself; what only starting one takes belongs to the host's time of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn

from rowcast.job.device_rates import KernelRates
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.trainer.models import build_dense_optimizer, mean_loss
from rowcast.trainer.models.dcnv2 import LowRankCross
from rowcast.trainer.models.dlrm import DLRM
from rowcast.trainer.rates.fit import Sample, fitted, tabulated
from rowcast.trainer.rates.stopwatch import Stopwatch

BATCHES = {"cpu": (128, 256, 1024, 4096), "cuda": (512, 2048, 8192, 65_536)}
BETWEEN = {"cpu": (180, 700, 3000), "cuda": (1000, 5000, 30_000)}  # batches that the tables are judged by
WIDTHS = (16, 64, 256, 1024)
OUTPUTS = (1, 8, 32, 128, 512, 1024)
FIRST_INPUTS = (4, 13, 64)
DENSE_TERMS = ("1", "tensors", "parameters")
DENSE_KINDS = ("sgd", "adagrad", "adam")

Made = Callable[[], Tensor]  # runs a forward pass


class Layers:
    """Times forward and backward of what `make` builds for some counts."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.batches, self.between = BATCHES[watch.device.type], BETWEEN[watch.device.type]
        leaf = torch.zeros(8, requires_grad=True, device=watch.device)
        self._start = self._backward(lambda: leaf.view_as(leaf))

    def tables(
        self,
        name: str,
        make: Callable[[dict[str, float]], Made],
        axes: dict[str, Sequence[float]],
        others: Sequence[dict[str, float]],
        *,
        directions: Sequence[str] = ("forward", "backward"),
    ) -> Iterator[tuple[str, KernelRates]]:
        if "forward" in directions:
            yield f"{name} forward", tabulated(axes, lambda counts: self._watch.seconds(make(counts)), others)
        if "backward" in directions:
            yield f"{name} backward", tabulated(axes, lambda counts: self._own_backward(make(counts)), others)

    def _own_backward(self, forward: Made) -> float:
        whole = self._backward(forward)
        return max(whole - self._start, whole / 10)

    def _backward(self, forward: Made) -> float:
        passed: list[Tensor] = []
        grads: list[Tensor] = []

        def prepare() -> None:
            passed[:] = [forward()]
            grads[:] = [torch.ones_like(passed[0])]

        return self._watch.seconds(lambda: torch.autograd.backward(passed, grads), prepare)

    def linear(self, counts: dict[str, float], *, is_first: bool = False) -> Made:
        batch, inputs, outputs = ints(counts, "batch", "inputs", "outputs")
        layer = nn.Linear(inputs, outputs, device=self._watch.device)
        features = torch.randn(batch, inputs, device=self._watch.device, requires_grad=not is_first)

        def forward() -> Tensor:
            layer.zero_grad(set_to_none=True)
            features.grad = None
            return torch.relu(layer(features))

        return forward

    def interaction(self, counts: dict[str, float]) -> Made:
        batch, vectors, dim = ints(counts, "batch", "vectors", "dim")
        model = dlrm(vectors - 1, dim).to(self._watch.device)
        bottom, pooled = self._inputs(batch, vectors - 1, dim)

        def forward() -> Tensor:
            bottom.grad = pooled.grad = None
            return model.interact(bottom, list(torch.tensor_split(pooled, vectors - 1)))

        return forward

    def concatenation(self, counts: dict[str, float]) -> Made:
        batch, vectors, width = ints(counts, "batch", "vectors", "width")
        dim = max(1, width // vectors)
        bottom, pooled = self._inputs(batch, vectors - 1, dim, width - (vectors - 1) * dim)

        def forward() -> Tensor:
            bottom.grad = pooled.grad = None
            return torch.cat([bottom, *torch.tensor_split(pooled, vectors - 1)], dim=1)

        return forward

    def _inputs(self, batch: int, features: int, dim: int, bottom: int | None = None) -> tuple[Tensor, Tensor]:
        device = self._watch.device
        return (
            torch.randn(batch, bottom or dim, device=device, requires_grad=True),
            torch.randn(features * batch, dim, device=device, requires_grad=True),
        )

    def cross(self, counts: dict[str, float]) -> Made:
        batch, width, rank = ints(counts, "batch", "width", "rank")
        layer = LowRankCross(width, rank, torch.Generator()).to(self._watch.device)
        first, crossed = (torch.randn(batch, width, device=self._watch.device, requires_grad=True) for _ in range(2))

        def forward() -> Tensor:
            layer.zero_grad(set_to_none=True)
            first.grad = crossed.grad = None
            result: Tensor = layer(first, crossed)
            return result

        return forward

    def loss(self, counts: dict[str, float]) -> Made:
        (batch,) = ints(counts, "batch")
        logits = torch.randn(batch, 1, device=self._watch.device, requires_grad=True)
        labels = torch.ones(batch, device=self._watch.device)
        return lambda: mean_loss(logits.squeeze(1), labels)


def layer_kernels(watch: Stopwatch) -> Iterator[tuple[str, KernelRates]]:
    layers = Layers(watch)
    batches, between = layers.batches, layers.between
    yield from layers.tables(
        "linear",
        layers.linear,
        {"batch": batches, "inputs": WIDTHS, "outputs": OUTPUTS},
        shapes(batch=between[:2], inputs=(40, 420), outputs=(20, 90, 300)),
    )
    yield from layers.tables(
        "first linear",
        lambda counts: layers.linear(counts, is_first=True),
        {"batch": batches, "inputs": FIRST_INPUTS, "outputs": WIDTHS},
        shapes(batch=between, inputs=(9, 30), outputs=(100, 400)),
        directions=("backward",),
    )
    yield from layers.tables(
        "interaction",
        layers.interaction,
        {"batch": batches, "vectors": (9, 27, 41), "dim": (8, 16, 32, 64)},
        shapes(batch=between, vectors=(14, 27), dim=(12, 48)),
    )
    yield from layers.tables(
        "concatenation",
        layers.concatenation,
        {"batch": batches, "vectors": (9, 27, 41), "width": (200, 500, 1700)},
        shapes(batch=between, vectors=(14, 27), width=(300, 900)),
    )
    yield from layers.tables(
        "cross layer",
        layers.cross,
        {"batch": batches, "width": (200, 500, 1700), "rank": (16, 64, 256)},
        shapes(batch=between, width=(300, 900), rank=(32, 128)),
    )
    yield from layers.tables("loss", layers.loss, {"batch": batches}, shapes(batch=between))
    for kind in DENSE_KINDS:
        yield f"dense {kind}", fitted(list(dense_samples(watch, kind)), DENSE_TERMS)


def shapes(**values: Sequence[float]) -> list[dict[str, float]]:
    return [dict(zip(values, map(float, own), strict=True)) for own in product(*values.values())]


def ints(counts: dict[str, float], *names: str) -> list[int]:
    return [int(counts[name]) for name in names]


def dense_samples(watch: Stopwatch, kind: str) -> Iterator[Sample]:
    job = small_job(1, 4, kind)
    for tensors, parameters in product((4, 12, 24), (10**4, 10**5, 10**6)):
        weights = [nn.Parameter(torch.zeros(parameters // tensors, device=watch.device)) for _ in range(tensors)]
        optimizer = build_dense_optimizer(job, weights)

        def prepare(own: list[nn.Parameter] = weights) -> None:
            for weight in own:
                weight.grad = torch.ones_like(weight)

        def step(own: torch.optim.Optimizer = optimizer) -> None:
            own.step()
            own.zero_grad(set_to_none=True)

        yield Sample({"tensors": float(tensors), "parameters": float(parameters)}, watch.seconds(step, prepare))


@cache
def dlrm(features: int, dim: int) -> DLRM:
    return DLRM(small_job(features, dim), 1)


def small_job(features: int, dim: int, dense: str = "sgd", sparse: str = "sgd") -> Job:
    """A job of `features` small tables, whose model is as small."""
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": {"format": "synthetic", "batch_size": 64, "synthetic": {"preset": "criteo-kaggle"}},
            "tables": [
                {"name": f"table_{n}", "num_embeddings": 4096, "embedding_dim": dim, "features": [f"feature_{n}"]}
                for n in range(features)
            ],
            "model": {"kind": "dlrm", "bottom_mlp": [dim], "top_mlp": [1]},
            "optimizer": {"sparse": {"kind": sparse, "lr": 0.01}, "dense": {"kind": dense, "lr": 0.01}},
            "cache": {"capacity": "1MiB"},
        }
    )
