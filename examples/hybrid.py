"""Dense weights data parallel and tables model parallel, with examples/hybrid.toml. The model owns its step.

1, 2 and 4 trainers have the same bits: add --set ranks.count=2."""

from typing import Any

import torch
from torch import Tensor, nn

import rowcast


class Hybrid(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        """dense f32 [B, num_dense]; one f32 [B, embedding_dim] per feature -> logits f32 [B]."""
        logits: Tensor = self.layers(torch.cat([dense, *embeddings], dim=1))
        return logits.squeeze(1)

    def training_objects(self) -> list[Any]:
        weights = [own for own in self.parameters() if own.dim() > 1]
        biases = [own for own in self.parameters() if own.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.005, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adamw, step_size=100, gamma=0.7)
        return [self.adamw, self.schedule]

    def step(self, n: int) -> None:
        """Gradients of step n are added up over all trainers, and each makes the same step."""
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.adamw.step()
        self.schedule.step()


def build(job: rowcast.Job, num_dense: int) -> nn.Module:
    return Hybrid(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables))
