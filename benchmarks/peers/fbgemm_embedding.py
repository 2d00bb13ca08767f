"""Contestant: FBGEMM's table-batched embeddings on the CPU, optimizer fused into the backward pass, rows in memory."""

import numpy as np
import numpy.typing as npt
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.peers.turns import Clock, Seconds, Terms, by_feature, initial_rows, take_turns

OPTIMIZERS = {
    "sgd": OptimType.EXACT_SGD,
    "adagrad": OptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": OptimType.EXACT_ROWWISE_ADAGRAD,
}


class Fbgemm:
    def __init__(self, terms: Terms, ids: npt.NDArray[np.int64], gradient: Tensor) -> None:
        self._terms, self._ids = terms, torch.from_numpy(ids)
        self._gradient = torch.cat(by_feature(gradient, terms), dim=1)  # [B, F * D], as the layer gives and takes it
        self._layer = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, terms.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in terms.cardinalities],
            optimizer=OPTIMIZERS[terms.optimizer],
            learning_rate=terms.lr,
            eps=terms.eps,
        )
        for table, weights in enumerate(self._layer.split_embedding_weights()):
            weights.copy_(torch.from_numpy(initial_rows(table, terms)))
        self._offsets = torch.arange(ids.shape[1] + 1)

    def step(self, step: int) -> Seconds:
        clock = Clock()
        pooled = self._layer(self._ids[step], self._offsets)
        clock.lap("forward")
        torch.autograd.backward(pooled, self._gradient)
        clock.lap("backward")
        return clock.seconds

    @torch.no_grad()
    def look_up(self, step: int) -> Tensor:
        pooled: Tensor = self._layer(self._ids[step], self._offsets)
        return torch.cat(pooled.tensor_split(len(self._terms.cardinalities), dim=1))


if __name__ == "__main__":
    take_turns(Fbgemm)
