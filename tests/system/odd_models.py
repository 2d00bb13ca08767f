"""Models that people bring: with random numbers, tied weights, embeddings that are not used, or a loss of their own."""

import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.trainer.models import Embedded
from tests.support.batches import SmallModel, small_width


class DropoutModel(SmallModel):
    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        return super().forward(nn.functional.dropout(dense, 0.5, self.training), embeddings)


class DenseOnlyModel(SmallModel):
    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        return super().forward(dense, [])


class TiedModel(SmallModel):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.same = self.hidden


class HingeModel(SmallModel):
    """Logits, and a loss with a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.margin = nn.Parameter(torch.ones(()))

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (self.margin.square() - (2 * labels - 1) * outputs).relu().mean() + (1 - self.margin).square()


class SignedModel(HingeModel):
    def logits(self, outputs: Tensor) -> Tensor:
        return outputs


class PricedModel(HingeModel):
    score_name = "price"


class TwoTowerModel(nn.Module):
    """A vector of the first two features and one of the others; in a batch each is to find its own."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(left, 6), nn.Linear(right, 6)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> dict[str, Tensor]:
        return {
            "left": self.left(torch.cat(embeddings[:2], 1)),
            "right": self.right(torch.cat([dense, *embeddings[2:]], 1)),
        }

    def loss(self, outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(
            outputs["left"] @ outputs["right"].T, torch.arange(len(labels)), reduction="none"
        )
        return (losses * (1 + labels)).mean()


class RankingModel(nn.Module):
    """Ranks a positive for each sample, by the sample's first dense feature: the same for every division in parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits_of = SmallModel(width)

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> tuple[Tensor, Tensor]:
        return self.logits_of(dense, embeddings), dense[:, 0]

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[0], labels)

    def ranks(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return (outputs[1].abs() * 20).long()


def ranking_model(job: Job, num_dense: int) -> nn.Module:
    return RankingModel(small_width(job, num_dense))


def hinge_model(job: Job, num_dense: int) -> nn.Module:
    return HingeModel(small_width(job, num_dense))


def signed_model(job: Job, num_dense: int) -> nn.Module:
    return SignedModel(small_width(job, num_dense))


def priced_model(job: Job, num_dense: int) -> nn.Module:
    return PricedModel(small_width(job, num_dense))


def two_tower_model(job: Job, num_dense: int) -> nn.Module:
    left = 2 * job.tables[0].embedding_dim
    return TwoTowerModel(left, small_width(job, num_dense) - left)


def dropout_model(job: Job, num_dense: int) -> nn.Module:
    return DropoutModel(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables))


def dense_only_model(job: Job, num_dense: int) -> nn.Module:
    return DenseOnlyModel(num_dense)


def tied_model(job: Job, num_dense: int) -> nn.Module:
    return TiedModel(num_dense)


class NormalizedModel(SmallModel):
    """Keeps a running mean of its dense features."""

    def __init__(self, width: int, num_dense: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(num_dense)

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        return super().forward(self.norm(dense), embeddings)


def normalized_model(job: Job, num_dense: int) -> nn.Module:
    return NormalizedModel(small_width(job, num_dense), num_dense)


class MoodyModel(SmallModel):
    """One weight is never used, another where the first sample says so: some parts give no gradient of it."""

    above = 0.6

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.never, self.sometimes = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits + dense[:, :3] @ self.sometimes if dense[0, 0] > self.above else logits


def moody_model(job: Job, num_dense: int) -> nn.Module:
    return MoodyModel(small_width(job, num_dense))


def choosy_model(job: Job, num_dense: int) -> nn.Module:
    """The other weight is used by a part of every batch."""
    model = MoodyModel(small_width(job, num_dense))
    model.above = 0.1
    return model


class DivergingModel(SmallModel):
    """In its `at`-th call of training, the gradient of one row is NaN though the loss is finite."""

    at, calls = 0, 0

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        logits = super().forward(dense, embeddings)
        self.calls += self.training
        first = embeddings[0]
        assert isinstance(first, Tensor)
        is_last = self.training and self.calls == self.at
        return logits + torch.sqrt((first[:1] * 0.0).sum().abs()) * 0.0 if is_last else logits


def diverging(job: Job, num_dense: int, at: int) -> nn.Module:
    model = DivergingModel(small_width(job, num_dense))
    model.at = at
    return model


MANY = 2**17  # torch divides a sum of so many among its threads


class OneSum(nn.Module):
    """Its bits depend on the number of torch's threads on every processor: a sum of many numbers in each step."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(MANY, generator=torch.Generator().manual_seed(job.job.seed)))

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        return torch.cat([dense, *embeddings], dim=1).sum(1) + self.many.sum() / 100
