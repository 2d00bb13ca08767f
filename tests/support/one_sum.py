"""A model whose bits depend on the number of torch's threads on every processor: a sum of many numbers in each step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowcast.job.schema import Job

MANY = 2**17  # torch divides a sum of so many among its threads


class OneSum(nn.Module):
    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(MANY, generator=torch.Generator().manual_seed(job.job.seed)))

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        return torch.cat([dense, *embeddings], dim=1).sum(1) + self.many.sum() / 100
