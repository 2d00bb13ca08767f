"""Wide & Deep (Cheng et al., arXiv 1606.07792) and DeepFM (Guo et al., arXiv 1703.04247).

dense, embeddings -> MLP ------------------+
embeddings -> products of all pairs (FM) --+-> sum -> logit
linear weights, dense -> sum --------------+

Wide & Deep has no products. The wide part of a feature is the linear weight of its row, from the same look-up.
"""

import torch
from torch import Tensor, nn

from rowcast.job.models import Top
from rowcast.job.schema import Job
from rowcast.trainer.models.dlrm import linear, linear_layers, logits_of


class WideDeep(nn.Module):
    """Parameters are `wide.weight` [1, num_dense] and `wide.bias` [1], and `top_mlp.<n>.weight` and so on; n counts
    linear layers from 0. Embeddings may have any widths."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        assert isinstance(job.model, Top)
        generator = torch.Generator().manual_seed(job.job.seed)
        width = num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables)
        self.wide = linear(num_dense, 1, generator)
        self.top_mlp = linear_layers([width, *job.model.top_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Tensor], linear_weights: list[Tensor]) -> Tensor:
        wide: Tensor = torch.cat([self.wide(dense), *linear_weights], dim=1).sum(1)
        return wide + logits_of(self.top_mlp, torch.cat([dense, *embeddings], dim=1))


class DeepFM(WideDeep):
    """Wide & Deep, and the dot products of all pairs of embeddings, which have one width."""

    def forward(self, dense: Tensor, embeddings: list[Tensor], linear_weights: list[Tensor]) -> Tensor:
        return super().forward(dense, embeddings, linear_weights) + products_of_pairs(torch.stack(embeddings, dim=1))


def products_of_pairs(vectors: Tensor) -> Tensor:
    """f32 [B, F, D] -> f32 [B]: the sum of v_i * v_j over all pairs i < j, in time linear in F."""
    of_sum = vectors.sum(1).square()
    return 0.5 * (of_sum - vectors.square().sum(1)).sum(1)
