"""Adopted runs under test: the script runs in the test's own process, with a real, forked prefetcher."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rowcast
from rowcast.runtime.children import Child
from rowcast.trainer.adopt.connect import table_files as files
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.clicks import ROWS
from tests.support.starter import Starter

CONFIGS = [
    rowcast.EmbeddingBagConfig(name="wide", num_embeddings=ROWS[0], embedding_dim=4, feature_names=["a", "b"]),
    rowcast.EmbeddingBagConfig(
        name="small", num_embeddings=ROWS[1], embedding_dim=4, feature_names=["c"], init="normal:0.5"
    ),
]


class Launches:
    """Stands in for `files.start_prefetcher`; knows what was started."""

    def __init__(self, starter: Starter, environment: dict[str, str]) -> None:
        self.children: list[Child] = []
        self._starter = starter
        self._environment = environment

    def start(self, job_file: Path, log: Path, options: Sequence[str], *, is_tied: bool) -> Child:
        arguments = ["-m", "rowcast.prefetcher", "run", "--config", str(job_file), *options]
        process: Any = self._starter.launch(arguments, log.with_suffix(".out"), log, self._environment)
        self.children.append(Child("prefetcher", process, log))
        return self.children[-1]

    def remains(self) -> list[str]:
        """What prefetchers have left: themselves, or rings."""
        rings = [
            str(path) for child in self.children for path in Path("/dev/shm").glob(f"rowcast-*-{child.process.pid}-*")
        ]
        return [f"process {child.process.pid}" for child in self.children if child.code is None] + rings


class Model(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.layer = nn.Linear(14, 1)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        logits: Tensor = self.layer(torch.cat([dense, self.ebc(sparse).values()], dim=1))
        return logits.squeeze(1)


def make(run_dir: Path, *, optimizer: str = "adagrad", **others: Any) -> tuple[Model, torch.optim.Optimizer]:
    """A model over a cache of 60 rows, which is less than its tables."""
    torch.manual_seed(0)
    job = {"transport.ring": "1MiB", "lookahead.depth": 2, "transport.connect_timeout": "60s", **others}
    ebc = EmbeddingBagCollection(
        CONFIGS,
        optimizer={"kind": optimizer, "lr": 0.1},
        capacity="60 rows",
        device="cpu",
        run_dir=run_dir,
        seed=3,
        job=job,
    )
    model = Model(ebc)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train_on(model: Model, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    dense, sparse, labels = batch
    loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()


def train_all(model: Model, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    return [train_on(model, optimizer, batch) for batch in loader]


def train_until(
    model: Model, optimizer: torch.optim.Optimizer, loader: Any, step: int, act: Callable[[], object]
) -> None:
    """Trains on, and calls `act` once behind a step."""
    for at, batch in enumerate(loader):
        train_on(model, optimizer, batch)
        if at == step:
            act()


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def launched_by(
    starter: Starter, environment: dict[str, str], set_attribute: Callable[..., None]
) -> Iterator[Launches]:
    """For a fixture: prefetchers of `connect` are forked; they are ended behind the test."""
    launches = Launches(starter, environment)
    set_attribute(files, "start_prefetcher", launches.start)
    yield launches
    for child in launches.children:
        child.signal(9)
        child.process.wait(30)
