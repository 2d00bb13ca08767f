"""A trained model with whole tables, as an `nn.Module` of stock PyTorch: no cache, no plans, no optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.job.embedding_tables import RowType, Table
from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch
from rowcast.trainer.kernels import torch_ops
from rowcast.trainer.kernels.torch_ops import taken
from rowcast.trainer.models import build_model
from rowcast.trainer.models.embedding import Embedded, Sequences
from rowcast.trainer.models.job_model import ForwardPass

Bags = tuple[Tensor, Tensor | None, Tensor | None]


class TrainedModel(nn.Module):
    """`forward` returns what `rowcast score` writes: a logit of each sample, f32 [B] or, with T labels, [B, T].

    table_<name>     the weights of a table, [num_embeddings, width]
    model            the job's model, on top of the rows
    """

    def __init__(self, job: Job, num_dense: int, weights: Sequence[Tensor]) -> None:
        """`weights`: of each table, in its dtype; they become parameters. Raises ConfigError."""
        super().__init__()
        self.model = build_model(job, num_dense)
        for table, weight in zip(job.tables, weights, strict=False):
            self.register_parameter(f"table_{table.name}", nn.Parameter(weight))
        self._pass, self._tables, self._gradients = ForwardPass(job, self.model), job.tables, job.ranks.gradients

    @property
    def score_name(self) -> str:
        return self._pass.score_name

    def forward(self, dense: Tensor, ids: Mapping[str, Bags], inputs: Mapping[str, Tensor]) -> Any:
        """dense: f32 [B, num_dense]. ids: of each feature, rows i64 [n] of its table, sample by sample; the start of
        each sample's rows, i64 [B + 1], or None: one row each; and weights f32 [n], or None: all 1. inputs: other
        arrays of the data, {} if it has none. `run.inputs(frame)` gives all three."""
        weights = [getattr(self, f"table_{table.name}") for table in self._tables]
        rows = rows_of_features(self._tables, weights, ids, self._gradients)
        return self._pass.logits(self._pass(self.model, dense, rows, inputs))


def rows_of_features(
    tables: Sequence[Table], weights: Sequence[Tensor], ids: Mapping[str, Bags], gradients: RowType
) -> list[Embedded]:
    """Returns what each feature gives to the model. `weights`: of each table. `ids`: as `TrainedModel` takes them."""
    return [
        look_up(table, weight, ids[feature], gradients)
        for table, weight in zip(tables, weights, strict=True)
        for feature in table.features
    ]


def look_up(table: Table, weight: Tensor, bags: Bags, gradients: RowType) -> Embedded:
    """Returns what a feature of the table gives to the model, with the bits of `torch_ops.lookup`. `gradients`: as for
    `taken`."""
    ids, offsets, weights = bags
    rows = weight.index_select(0, ids).float()
    if weights is not None:
        rows = rows * weights[:, None]
    if table.pooling == "none":
        return Sequences(
            values=taken(rows + 0.0, gradients),
            offsets=(torch.arange(len(rows) + 1, device=ids.device) if offsets is None else offsets).int(),
        )
    if offsets is None:
        return taken(rows + 0.0, gradients)  # a sum begins with 0: -0.0 becomes 0.0
    pooled = torch_ops.segment_sum(rows, torch.arange(len(rows), dtype=torch.int32, device=ids.device), offsets.int())
    if table.pooling == "mean":
        pooled = pooled / offsets.diff().clamp(min=1)[:, None]
    return taken(pooled, gradients)


def arguments(
    batch: Batch, features: Sequence[str], device: torch.device
) -> tuple[Tensor, dict[str, Bags], dict[str, Tensor]]:
    """Returns a batch as the arguments of `TrainedModel.forward`."""
    ids = torch.tensor(batch.ids, device=device)
    weights = None if batch.weights is None else torch.tensor(batch.weights, device=device)
    starts = range(len(features) + 1)
    offsets = None if batch.offsets is None else torch.tensor(batch.offsets, device=device)
    ends = [f * batch.size for f in starts] if batch.offsets is None else batch.offsets[:: batch.size].tolist()
    bags = {
        name: (
            ids[ends[f] : ends[f + 1]],
            None if offsets is None else offsets[f * batch.size : (f + 1) * batch.size + 1] - ends[f],
            None if weights is None else weights[ends[f] : ends[f + 1]],
        )
        for f, name in enumerate(features)
    }
    inputs = {name: torch.tensor(array, device=device) for name, array in batch.inputs.items()}
    return torch.tensor(batch.dense, device=device), bags, inputs
