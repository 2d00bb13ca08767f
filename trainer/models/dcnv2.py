"""DCNv2 with cross layers of low rank, as in MLPerf's DLRM-DCNv2: Wang et al., DCN V2 (arXiv 2008.13535).

dense -> bottom MLP -+
                     cat = x_0 -> cross layers -> top MLP -> logit
embeddings ----------+            x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l
"""

import torch
from torch import Tensor, nn

from rowcast.job.models import DCNv2Settings
from rowcast.job.schema import Job
from rowcast.trainer.models.dlrm import EmptyLinear, linear_layers, logits_of, relu_layers


class DCNv2(nn.Module):
    """Bottom MLP, cross network over the concatenation, top MLP. Embeddings may have any widths.

    Parameters are `bottom_mlp.<n>.weight` and so on as in DLRM, and for cross layer l `cross.<l>.v.weight`
    [rank, width], `cross.<l>.w.weight` [width, rank] and `cross.<l>.w.bias` [width]."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(job.job.seed)
        assert isinstance(job.model, DCNv2Settings)
        width = job.model.bottom_mlp[-1] + sum(table.embedding_dim * len(table.features) for table in job.tables)
        self.bottom_mlp = linear_layers([num_dense, *job.model.bottom_mlp], generator)
        self.cross = nn.ModuleList(
            LowRankCross(width, job.model.cross_rank, generator) for _ in range(job.model.cross_layers)
        )
        self.top_mlp = linear_layers([width, *job.model.top_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        first = crossed = torch.cat([relu_layers(self.bottom_mlp, dense), *embeddings], dim=1)
        for layer in self.cross:
            crossed = layer(first, crossed)
        return logits_of(self.top_mlp, crossed)


class LowRankCross(nn.Module):
    """One cross layer, initialised as TorchRec's LowRankCrossNet: Xavier normal matrices, a bias of zeros."""

    def __init__(self, width: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.v = EmptyLinear(width, rank, bias=False, device="cpu")
        self.w = EmptyLinear(rank, width, device="cpu")
        for matrix in (self.v.weight, self.w.weight):
            nn.init.xavier_normal_(matrix, generator=generator)
        nn.init.zeros_(self.w.bias)

    def forward(self, first: Tensor, crossed: Tensor) -> Tensor:
        """x_0 and x_l f32 [B, width] -> x_{l+1}."""
        product: Tensor = first * self.w(self.v(crossed))
        return product + crossed
