"""MMoE, several tasks over common experts (Ma et al., Modeling Task Relationships in Multi-task Learning with
Multi-gate Mixture-of-Experts, KDD 2018): `model.kind = "examples.mmoe:build"`; `examples/mmoe.toml` is a whole job.

    inputs -> expert 0 ... expert E - 1 -> [B, E, H]
           -> gate of task t: softmax   -> [B, E]      weights of the experts
                                                       weighted sum [B, H] -> tower of task t -> logit of task t
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

import rowcast


class MMoE(nn.Module):
    def __init__(
        self, width: int, num_tasks: int, num_experts: int, expert_mlp: list[int], tower_mlp: list[int]
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp([width, *expert_mlp]) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(width, num_experts) for _ in range(num_tasks))
        self.towers = nn.ModuleList(
            nn.Sequential(mlp([expert_mlp[-1], *tower_mlp]), nn.Linear(tower_mlp[-1], 1)) for _ in range(num_tasks)
        )

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        """dense f32 [B, num_dense]; one f32 [B, embedding_dim] per feature -> logits f32 [B, T]."""
        inputs = torch.cat([dense, *embeddings], dim=1)
        of_experts = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(inputs), dim=1)
            logits.append(tower((weights[:, :, None] * of_experts).sum(dim=1)))
        return torch.cat(logits, dim=1)


def mlp(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(layer for wide in pairwise(widths) for layer in (nn.Linear(*wide), nn.ReLU())))


def build(
    job: rowcast.Job,
    num_dense: int,
    num_experts: int = 4,
    expert_mlp: Sequence[int] = (64, 32),
    tower_mlp: Sequence[int] = (16,),
) -> nn.Module:
    """Called once with `model.options`; a task for each of data.columns.labels."""
    width = num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables)
    return MMoE(width, len(job.data.columns.labels), num_experts, list(expert_mlp), list(tower_mlp))
