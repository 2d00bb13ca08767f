"""Two models over histories whose data has arrays of every kind, and a data set for them.

causal     attention over the last look-ups; softmax over the positive and the batch's negatives, less their log_q
timed      attention without softmax, with a bias for each power of two of the time between two look-ups
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.trainer.models import Embedded, Sequences
from tests.support import jobs

LENGTH, DIM, NUM_ITEMS, NUM_NEGATIVES = 6, 5, 300, 16
OF = {"time": "history", "action": "history", "seen": "history", "log_q": "negative", "negative": "batch"}


def array_job(name: str, parts: int = 1, **sections: Any) -> Job:
    return jobs.job(**jobs.laid_over(array_content(name, parts), sections))


def array_content(name: str, parts: int = 1) -> dict[str, Any]:
    """A history, a positive per position and the batch's negatives in one table; a pooled user in another."""
    return {
        "job": {"seed": 5},
        "data": {
            **{"format": "tests.support.array_models:histories", "batch_size": 12, "of": OF},
            "columns": {"label_values": "none"},
        },
        "tables": [
            jobs.table("item", NUM_ITEMS, DIM, "history", "positive", "negative", pooling="none"),
            jobs.table("user", 200, 3),
        ],
        "model": {"kind": f"tests.support.array_models:{name}"},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05}, "dense": {"kind": "adam", "lr": 0.01}},
        "cache": {"capacity": "1GiB"},
        "lookahead": {"depth": 2, "horizon": 4},
        "ranks": {"parts": parts},
        "eval": {"every": 4},
    }


def histories(job: Job, num_batches: int = 8) -> Any:
    def batches(split: str, epoch: int) -> Iterator[Mapping[str, Any]]:
        rng = np.random.default_rng([epoch, split == "eval"])
        for number in range(num_batches if split == "train" else 2):
            size = job.data.batch_size if number < num_batches - 1 else job.data.batch_size // 3
            yield histories_of(rng, size)

    return batches


def histories_of(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """Without labels and dense features; some histories are empty."""
    lengths = rng.integers(0, 9, size)
    lengths[0] = 3
    n, offsets = int(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])

    def items(count: int) -> Any:
        return (NUM_ITEMS * rng.random(count) ** 3).astype(np.int64)

    return {
        "sparse": {
            "history": (items(n), offsets),
            "positive": (items(n), offsets),
            "negative": items(NUM_NEGATIVES),
            "user": rng.integers(0, 200, size),
        },
        "time": rng.integers(0, 2**40, n).cumsum(),
        "action": rng.integers(-3, 4, n).astype(np.int16),
        "seen": rng.random(n) < 0.8,
        "log_q": rng.normal(size=NUM_NEGATIVES).astype(np.float32),
        "tokens": rng.integers(0, 256, (size, 2, 3)).astype(np.uint8),
        "weight": rng.random(size),  # f8
    }


class ArrayModel(nn.Module):
    """Common: what goes in, and the loss, a mean over samples of a mean over positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.action, self.token = nn.Embedding(7, width), nn.Embedding(256, width)
        self.user, self.out = nn.Linear(3, width), nn.Linear(width, width)
        self.queries, self.keys = nn.Linear(width, width), nn.Linear(width, width)

    def attend(self, x: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, dense: Tensor, embeddings: list[Embedded], inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        history, positive, negative, user = embeddings
        assert isinstance(history, Sequences)
        assert isinstance(positive, Sequences)
        assert isinstance(negative, Tensor)
        assert isinstance(user, Tensor)
        assert negative.shape == (NUM_NEGATIVES, DIM)
        assert inputs["tokens"].shape == (len(user), 2, 3)
        assert {name: own.dtype for name, own in inputs.items() if isinstance(own, Tensor)} == {
            "log_q": torch.float32,
            "tokens": torch.uint8,
            "weight": torch.float64,
        }
        x, mask = history.padded(LENGTH)
        actions, seen = (inputs[name].padded(LENGTH)[0] for name in ("action", "seen"))
        times, targets = inputs["time"].padded(LENGTH)[0], positive.padded(LENGTH)[0]
        x = x + self.action(actions.long() + 3) + self.token(inputs["tokens"].int()).mean((1, 2))[:, None]
        x = x + self.user(user)[:, None]
        found = self.out(self.attend(x, times, mask))
        logits = torch.cat([(found * targets).sum(-1, keepdim=True), found @ negative.T - inputs["log_q"]], dim=-1)
        losses = logits.logsumexp(-1) - logits[..., 0]
        counts = (mask & seen).float()
        return losses * counts, counts * inputs["weight"].float()[:, None]

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        losses, counts = outputs
        return (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()


class Causal(ArrayModel):
    def attend(self, x: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(1, 2)
        allowed = mask[:, None] & torch.ones(LENGTH, LENGTH).tril().bool() | torch.eye(LENGTH).bool()
        return x + torch.softmax(scores.where(allowed, -1e9), dim=-1) @ x


class Timed(ArrayModel):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.randn(64))

    def attend(self, x: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        between = (times[:, :, None] - times[:, None]).clamp(min=0)
        bucket = (between + 1).double().log2().long()
        scores = nn.functional.silu(self.queries(x) @ self.keys(x).transpose(1, 2) + self.bias[bucket])
        allowed = mask[:, None] & torch.ones(LENGTH, LENGTH).tril().bool()
        return x + (scores * allowed) @ x / LENGTH


def causal(job: Job, num_dense: int) -> nn.Module:
    return Causal(DIM)


def timed(job: Job, num_dense: int) -> nn.Module:
    return Timed(DIM)


class Tagged(nn.Module):
    """A logit of a sample's tags, each times its share, of rows drawn for the batch, and of one array of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, dense: Tensor, embeddings: list[Embedded], inputs: Mapping[str, Any]) -> Tensor:
        tags, drawn = embeddings
        assert isinstance(tags, Sequences)
        assert isinstance(drawn, Tensor)
        shares = inputs["shares"].padded(3)[0][:, :, None].float()
        pooled: Tensor = self.out((tags.padded(3)[0] * shares).sum(1) + drawn.mean(0))[:, 0]
        logits: Tensor = pooled + inputs["code"] / 1e9 + dense[:, 0]
        return logits


def tagged(job: Job, num_dense: int) -> nn.Module:
    return Tagged()
