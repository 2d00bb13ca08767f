"""Models that own their step: two optimizers in turn with all that goes with them, and an alternation as in a GAN."""

import os
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rowcast.job.schema import Job


class Notes:
    """Text, numbers, nesting and a tensor, which change with every step."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {"said": ("nothing", None), "norms": {3: 0.0}, "last": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class Everything(nn.Module):
    """AdamW with two groups and RMSprop step in turn and share a bias; every fourth step is left out. Evaluations draw
    random numbers too."""

    eval_names = ("score", "clicks", "never")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        hidden = nn.functional.dropout(self.body(torch.cat([dense, *embeddings], 1)).relu(), 0.2, training=True)
        logits: Tensor = self.head(hidden)
        return logits.squeeze(1)

    def eval_sums(self, outputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return {
            "never": (1.0, 0),
            "score": (outputs.sum(), len(labels)),
            "clicks": [labels.sum(), 2.5 * len(labels)],
        }

    def training_objects(self) -> list[Any]:
        average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.average = [AveragedModel(self, multi_avg_fn=average)]  # in a list: no part of the model
        decayed: dict[str, Any] = {"params": [self.body.weight]}
        free: dict[str, Any] = {"params": [self.body.bias], "weight_decay": 0.0}
        adamw = torch.optim.AdamW([decayed, free], lr=0.02, weight_decay=0.1)
        rmsprop = torch.optim.RMSprop([*self.head.parameters(), self.body.bias], lr=0.01, momentum=0.9)
        self.optimizers = adamw, rmsprop
        self.schedules = StepLR(adamw, step_size=3, gamma=0.5), OneCycleLR(rmsprop, max_lr=0.05, total_steps=60)
        self.notes = Notes()
        return [*self.optimizers, *self.schedules, *self.average, self.notes]

    def step(self, n: int) -> bool:
        norm = nn.utils.clip_grad_norm_(self.body.parameters(), 0.05)
        for weight in self.head.parameters():
            assert weight.grad is not None
            weight.grad += 1e-3 * torch.randn_like(weight)
        self.notes.content = {"said": (f"step {n}", None), "norms": {n: norm.item()}, "last": norm.repeat(2)}
        if n % 4 == 3:
            return False
        self.optimizers[n % 2].step()
        self.schedules[n % 2].step()
        self.average[0].update_parameters(self)
        return True


class Turn:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


class Adversary(nn.Module):
    """A maker of inputs and a critic of them, which train in turn; `forward` and `loss` depend on whose turn it is."""

    def __init__(self, num_dense: int, width: int) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(num_dense, width), nn.Linear(width, 1)
        self.turn = Turn()

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        made, given = self.maker(dense), torch.cat([dense, *embeddings], 1)
        judged = made.detach() if self.turn.number % 2 == 0 else made
        return self.critic(given).squeeze(1), self.critic(judged).squeeze(1), made

    def loss(self, outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        given, judged, made = outputs
        lies = nn.functional.softplus(judged if self.turn.number % 2 == 0 else -judged).mean()
        # 0 times the maker's output: with several parts every loss depends on the same weights
        return nn.functional.softplus(-given).mean() + lies + 0 * made.sum()

    def training_objects(self) -> list[Any]:
        self.optimizers = [torch.optim.Adam(own.parameters(), lr=0.01) for own in (self.critic, self.maker)]
        return [self.turn, *self.optimizers]

    def step(self, n: int) -> None:
        self.optimizers[self.turn.number % 2].step()
        self.turn.number = n + 1


def width_of(job: Job, num_dense: int) -> int:
    return num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables)


def everything(job: Job, num_dense: int) -> nn.Module:
    return Everything(width_of(job, num_dense))


def adversary(job: Job, num_dense: int, turn: str = "") -> nn.Module:
    """`turn`: the environment variable with the first."""
    model = Adversary(num_dense, width_of(job, num_dense))
    model.turn.number = int(os.environ.get(turn, "0"))
    return model


def without_dense(job: Job) -> Job:
    """The job without [optimizer.dense]."""
    return msgspec.structs.replace(job, optimizer=msgspec.structs.replace(job.optimizer, dense=None))


class Noted(Everything):
    """Its model has an extra state: text, a tensor, or a tensor that is not restored."""

    def __init__(self, width: int, extra: str) -> None:
        super().__init__(width)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return {"said": self.extra} if self.extra == "text" else torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        if self.extra != "tensor":
            raise RuntimeError("nothing is restored")


def noted(job: Job, num_dense: int, extra: str) -> nn.Module:
    return Noted(width_of(job, num_dense), extra)
