"""A model for tables of two widths that draws random numbers in every training step, whose state must survive."""

from typing import TYPE_CHECKING

from rowcast.job.schema import Job

if TYPE_CHECKING:
    from torch import nn


def model(job: Job, num_dense: int) -> "nn.Module":
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

        def forward(self, dense: torch.Tensor, embeddings: list[torch.Tensor]) -> torch.Tensor:
            logits: torch.Tensor = self.layers(torch.cat([dense, *embeddings], dim=1))
            return logits.squeeze(1)

    return Mlp(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables))
