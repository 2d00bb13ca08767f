"""TBSM: Ishkhanov et al., Time-based Sequence Model for Personalization and Recommendation Systems (arXiv 2008.11922).

    time step       0    1   ...  T-1  |   T = the target
    sequences      e0   e1        eT-1 |   eT               the last T + 1 entries; with fewer, a sample begins later
    other features same at every step  |
    DLRM           h0   h1   ...  hT-1 |   w                one network for all steps; vectors of length 1
    attention       a = H A'A w, c = MLP(a) H               the context c: the history, weighted
    final MLP      logit of [c, w]

As in the authors' program (github.com/facebookresearch/tbsm, with their defaults: one time series layer, inner product
"def", mechanism "mlp"). A step before a sample's first entry is a zero vector there and here. Bottom and top MLP end in
a ReLU, the attention's MLP in a sigmoid.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rowcast.job.models import TBSMSettings
from rowcast.job.schema import Job
from rowcast.trainer.models.dlrm import DLRM, linear_layers, logits_of, relu_layers
from rowcast.trainer.models.embedding import Embedded, Sequences


class TBSM(nn.Module):
    """A DLRM per time step, attention over the history, and a final MLP.

    Parameters: `dlrm.*` as in DLRM, `inner` (A), `attention_mlp.<n>.*` and `final_mlp.<n>.*`; n counts linear layers
    from 0. Sequences of one sample that differ in length end together. A sample without entries has a target of zeros.
    """

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        settings = job.model
        assert isinstance(settings, TBSMSettings)
        width = settings.top_mlp[-1]
        generator = torch.Generator().manual_seed(job.job.seed + 1)  # DLRM draws from job.seed
        self.num_steps = settings.history + 1
        self.dlrm = DLRM(job, num_dense)
        self.inner = nn.Parameter(
            torch.empty(width, width, device="cpu").normal_(0.0, width**-0.5, generator=generator)
        )
        self.attention_mlp = linear_layers([settings.history, *settings.attention_mlp, settings.history], generator)
        self.final_mlp = linear_layers([2 * width, *settings.final_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        history, target = self.steps(dense, embeddings)
        return logits_of(self.final_mlp, torch.cat([self.context(history, target), target], dim=1))

    def steps(self, dense: Tensor, embeddings: list[Embedded]) -> tuple[Tensor, Tensor]:
        """Vectors f32 [B, T, W] of the history's steps, zero before the first entry, and f32 [B, W] of the target."""
        bottom = relu_layers(self.dlrm.bottom_mlp, dense)
        padded = [embedding.padded(self.num_steps) for embedding in embeddings if isinstance(embedding, Sequences)]
        present = torch.stack([mask for _, mask in padded]).any(0)
        sequences = iter([values for values, _ in padded])
        features = [
            next(sequences) if isinstance(feature, Sequences) else feature[:, None].expand(-1, self.num_steps, -1)
            for feature in (bottom, *embeddings)
        ]
        first, *others = (feature.flatten(0, 1) for feature in features)
        vectors = relu_layers(self.dlrm.top_mlp, self.dlrm.interact(first, others))
        vectors = normalize(vectors, dim=1).view(dense.shape[0], self.num_steps, -1)
        return vectors[:, :-1] * present[:, :-1, None], vectors[:, -1]

    def context(self, history: Tensor, target: Tensor) -> Tensor:
        """f32 [B, T, W] and [B, W] -> [B, W]: the sum of the history's vectors times their coefficients."""
        query = (target @ self.inner.T) @ self.inner
        products = torch.bmm(history, query[:, :, None]).squeeze(2)
        coefficients = torch.sigmoid(self.attention_mlp[-1](relu_layers(self.attention_mlp[:-1], products)))
        return torch.bmm(coefficients[:, None], history).squeeze(1)
