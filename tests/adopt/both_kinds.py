"""A script with bags and sequences, and its twin over nn: `python -m tests.adopt.both_kinds RUN_DIR [--kill ...]`."""

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rowcast
from examples.adopt.in_memory import Embeddings, JaggedEmbedding

DIM, LENGTH, SIZE, EPOCHS = 4, 5, 12, 2
BAGS = rowcast.EmbeddingBagConfig(name="user", num_embeddings=80, embedding_dim=DIM, feature_names=["user"])
ITEMS = rowcast.EmbeddingConfig(
    name="item", num_embeddings=300, embedding_dim=DIM, feature_names=["history", "positive"]
)
Losses = dict[str, list[float]]


def visits(batches: int) -> Callable[[str, int], Iterator[dict[str, Any]]]:
    """The data factory."""

    def of_epoch(split: str, epoch: int) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng([epoch, split == "eval"])
        for _ in range(batches if split == "train" else 2):
            history, positive = (300 * rng.random((2, SIZE, LENGTH)) ** 3).astype(np.int64)
            sparse = {"user": rng.integers(0, 80, (SIZE, 3)), "history": history, "positive": positive}
            yield {"sparse": sparse, "weight": rng.random(SIZE), "labels": rng.random(SIZE) < 0.5}

    return of_epoch


class Model(nn.Module):
    def __init__(self, bags: nn.Module, sequences: nn.Module, *, bags_first: bool) -> None:
        super().__init__()
        self.bags, self.sequences, self.bags_first = bags, sequences, bags_first
        self.query, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, sparse: Any, weight: Tensor) -> Tensor:
        if self.bags_first:
            pooled, rows = self.bags(sparse), self.sequences(sparse)
        else:
            rows, pooled = self.sequences(sparse), self.bags(sparse)
        history, positive = (rows[name].values().view(-1, LENGTH, DIM) for name in ("history", "positive"))
        read = torch.softmax(self.query(positive) @ history.transpose(1, 2), dim=-1) @ history
        logits: Tensor = self.out(torch.tanh(read.mean(1) + pooled["user"])).squeeze(1) * weight.float()
        return logits


def build(rule: str, run_dir: Path | None, *, bags_first: bool) -> Model:
    """The twin without `run_dir`."""
    torch.manual_seed(0)
    if run_dir is None:
        return Model(Embeddings([BAGS]), JaggedEmbedding(ITEMS), bags_first=bags_first)
    own: dict[str, Any] = {
        **{"optimizer": {"kind": rule, "lr": 0.05}, "capacity": "170 rows", "device": "cpu", "run_dir": run_dir},
        "job": {"transport.ring": "1MiB", "lookahead.depth": 2, "transport.connect_timeout": "60s"},
    }
    collections = rowcast.EmbeddingBagCollection([BAGS], **own), rowcast.EmbeddingCollection([ITEMS], **own)
    return Model(*collections, bags_first=bags_first)


def dense_optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.query.parameters(), *model.out.parameters()], lr=0.01)


def step(model: Model, batch: Any, kind: str, losses: Losses) -> Tensor:
    """The loss; of a train batch after its backward pass."""
    model.train(kind == "train")
    with torch.set_grad_enabled(kind == "train"):
        logits = model(batch["sparse"], batch["weight"])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    if kind == "train":
        torch.autograd.backward(loss)
    losses[kind].append(loss.item())
    return loss


def train_twin(model: Model, rule: str, batches: int) -> Losses:
    tables = [model.bags.embedding_bags["user"].weight, model.sequences.embeddings["item"].weight]  # type: ignore[index, union-attr]
    stock: Any = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[rule]
    optimizers, losses = [dense_optimizer(model), stock(tables, lr=0.05)], Losses(train=[], eval=[])
    for epoch in range(EPOCHS):
        for kind in ("train", "eval"):
            for own in visits(batches)(kind, epoch):
                sparse = {name: torch.from_numpy(ids) for name, ids in own["sparse"].items()}
                labels = torch.from_numpy(own["labels"]).float()
                step(
                    model, {"sparse": sparse, "weight": torch.from_numpy(own["weight"]), "labels": labels}, kind, losses
                )
                if kind == "eval":
                    continue
                if rule == "adam":
                    for table, names in zip(tables, (["user"], ["history", "positive"]), strict=True):
                        rows = torch.from_numpy(np.unique([own["sparse"][name] for name in names]))
                        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
                            table.grad = torch.sparse_coo_tensor(rows[None], table.grad[rows], table.shape)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return losses


def train(model: Model, batches: int, kill: Callable[[rowcast.Loader, int], None]) -> Losses:
    """`kill` is called after each train step."""
    optimizer, losses = dense_optimizer(model), Losses(train=[], eval=[])
    dense, options = (model, optimizer), {"batches": batches}
    with rowcast.connect(
        [model.bags, model.sequences],  # type: ignore[list-item]
        "tests.adopt.both_kinds:visits",
        options=options,
        epochs=EPOCHS,
        evaluate=True,
        save_every=3,
        dense=dense,
    ) as loader:
        for _ in loader.epochs:
            for batch in loader:
                loss = step(model, batch, batch.kind, losses)
                if batch.kind == "train":
                    optimizer.step()
                    optimizer.zero_grad()
                    loader.record(loss=loss)
                    kill(loader, batch.train_step)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rule", default="adagrad")
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--start", action="store_true", help="begin with the tables of FOLDER/start")
    parser.add_argument("--kill", help="whom, at which train step: script:7 or prefetcher:7")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options.rule, options.folder / "run", bags_first=False)
    if options.start:
        model.load_state_dict(load_file(options.folder / "start"))

    def kill(loader: rowcast.Loader, train_step: int) -> None:
        whom, _, at = (options.kill or "").partition(":")
        if at and train_step == int(at):
            child = loader._session.run._child
            assert child is not None
            os.kill(os.getpid() if whom == "script" else child.process.pid, signal.SIGKILL)

    train(model, options.batches, kill)
    save_file(model.state_dict(), options.folder / "end")


if __name__ == "__main__":
    main()
