"""Your own model: `model.kind = "examples.custom_model:build"`, with `[model.options] hidden = 64`."""

import torch
from torch import Tensor, nn

import rowcast


class WideModel(nn.Module):
    """One hidden layer over the concatenated inputs."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        """dense f32 [B, num_dense]; one f32 [B, embedding_dim] per feature, in the job's order -> logits f32 [B]."""
        logits: Tensor = self.layers(torch.cat([dense, *embeddings], dim=1))
        return logits.squeeze(1)


def build(job: rowcast.Job, num_dense: int, hidden: int = 64) -> nn.Module:
    """Called once with `model.options`; torch's random numbers are seeded by `job.seed`."""
    return WideModel(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables), hidden)
