"""Times the parts of the built-in models, forward and backward, from the pooled embeddings on.

A backward pass is timed by itself; what only starting one takes belongs to the host.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor, nn

from rowcast.analysis.estimate.rates.kernel import Kernel, Shape
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.trainer.models import build_dense_optimizer, mean_loss
from rowcast.trainer.models.dcnv2 import LowRankCross
from rowcast.trainer.models.dlrm import DLRM

BATCHES = {"cpu": (128, 400, 1280, 4096), "cuda": (512, 2048, 8192, 65_536)}
BETWEEN = {"cpu": (200, 700, 3000), "cuda": (1000, 5000, 30_000)}  # batches that the tables are judged by
INPUTS = (4, 16, 64, 256, 1024)
OUTPUTS = (1, 8, 32, 128, 512, 1024)
FIRST_INPUTS = (4, 13, 64)  # 13 is what Criteo's samples have
FIRST_OUTPUTS = (16, 64, 256, 1024)
DENSE_TERMS = ("1", "tensors", "parameters")
DENSE_KINDS = ("sgd", "adagrad", "adam", "adamw")

SHORT_S, TOGETHER = 1e-3, 5  # layers that are passed backward together where one takes no longer than this

Made = Callable[[], Tensor]  # runs a forward pass


class Layers:
    """Times forward and backward of what `make` builds for some counts."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.batches, self.between = BATCHES[watch.device.type], BETWEEN[watch.device.type]

    def kernels(
        self,
        name: str,
        make: Callable[[dict[str, float]], Made],
        axes: dict[str, Sequence[float]],
        others: Sequence[dict[str, float]],
        *,
        directions: Sequence[str] = ("forward", "backward"),
    ) -> Iterator[Kernel]:
        for direction in directions:
            time = self._forward if direction == "forward" else self._backward
            yield Kernel(
                name=f"{name} {direction}",
                shapes=[Shape(counts, partial(time, make, counts)) for counts in shapes(**axes)],
                axes=axes,
                held_out=[Shape(counts, partial(time, make, counts)) for counts in others],
            )

    def _forward(self, make: Callable[[dict[str, float]], Made], counts: dict[str, float]) -> float:
        return self._watch.seconds(make(counts))

    def _backward(self, make: Callable[[dict[str, float]], Made], counts: dict[str, float]) -> float:
        """Of one layer. Starting a backward pass takes as long as several small layers: they are passed together."""
        alone = self._together([make(counts)])
        if alone > SHORT_S:
            return alone
        several = self._together([make(counts) for _ in range(TOGETHER)])
        return max((several - alone) / (TOGETHER - 1), several / TOGETHER / 10)

    def _together(self, forwards: Sequence[Made]) -> float:
        passed: list[Tensor] = []
        grads: list[Tensor] = []

        def prepare() -> None:
            passed[:] = [forward() for forward in forwards]
            grads[:] = [torch.ones_like(output) for output in passed]

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
            return model.interact(bottom, list(pooled.split_with_sizes([batch] * (vectors - 1))))

        return forward

    def concatenation(self, counts: dict[str, float]) -> Made:
        batch, vectors, width = ints(counts, "batch", "vectors", "width")
        dim = max(1, width // vectors)
        bottom, pooled = self._inputs(batch, vectors - 1, dim, width - (vectors - 1) * dim)

        def forward() -> Tensor:
            bottom.grad = pooled.grad = None
            return torch.cat([bottom, *pooled.split_with_sizes([batch] * (vectors - 1))], dim=1)

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


def layer_kernels(watch: Stopwatch) -> Iterator[Kernel]:
    layers = Layers(watch)
    batches, between = layers.batches, layers.between
    yield from layers.kernels(
        "linear",
        layers.linear,
        {"batch": batches, "inputs": INPUTS, "outputs": OUTPUTS},
        shapes(batch=between, inputs=(32, 420), outputs=(20, 300)),
    )
    yield from layers.kernels(
        "first linear",
        lambda counts: layers.linear(counts, is_first=True),
        {"batch": batches, "inputs": FIRST_INPUTS, "outputs": FIRST_OUTPUTS},
        shapes(batch=between, inputs=(9, 30), outputs=(100, 400)),
        directions=("backward",),
    )
    yield from layers.kernels(
        "interaction",
        layers.interaction,
        {"batch": batches, "vectors": (9, 27, 41), "dim": (8, 16, 32, 64)},
        shapes(batch=between, vectors=(12, 22), dim=(12, 48)),
    )
    yield from layers.kernels(
        "concatenation",
        layers.concatenation,
        {"batch": batches, "vectors": (9, 27, 41), "width": (200, 450, 900, 1700)},
        shapes(batch=between, vectors=(14, 27), width=(300, 1200)),
    )
    yield from layers.kernels(
        "cross layer",
        layers.cross,
        {"batch": batches, "width": (200, 450, 900, 1700), "rank": (16, 64, 256)},
        shapes(batch=between, width=(300, 1200), rank=(32, 128)),
    )
    yield from layers.kernels("loss", layers.loss, {"batch": batches}, shapes(batch=between))
    for kind in DENSE_KINDS:
        yield Kernel(name=f"dense {kind}", shapes=list(dense_shapes(watch, kind)), terms=DENSE_TERMS)


def shapes(**values: Sequence[float]) -> list[dict[str, float]]:
    return [dict(zip(values, map(float, own), strict=True)) for own in product(*values.values())]


def ints(counts: dict[str, float], *names: str) -> list[int]:
    return [int(counts[name]) for name in names]


def dense_shapes(watch: Stopwatch, kind: str) -> Iterator[Shape]:
    job = small_job(1, 4, kind)

    def time(tensors: int, parameters: int) -> float:
        weights = [nn.Parameter(torch.zeros(parameters // tensors, device=watch.device)) for _ in range(tensors)]
        optimizer = build_dense_optimizer(job, weights)

        def prepare() -> None:
            for weight in weights:
                weight.grad = torch.ones_like(weight)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return watch.seconds(step, prepare)

    for tensors, parameters in product((4, 12, 24), (10**4, 10**5, 10**6)):
        counts = {"tensors": float(tensors), "parameters": float(parameters)}
        yield Shape(counts, partial(time, tensors, parameters))


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
