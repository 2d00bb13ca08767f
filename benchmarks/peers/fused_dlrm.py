"""Contestant: DLRM over FBGEMM's table-batched embeddings on the CPU, or over TorchRec's collection of them. One
process, every row in memory, optimizer fused into the backward pass, batches decoded in advance.

It runs in its own environment (`make bench-env`), without rowcast, and reads a folder:

    terms.json                        see `Terms`
    dense.npy labels.npy ids.npy      f32 [S, B, D], f32 [S, B], i64 [S, F * B] feature-major: single-hot
    table_<n>.npy <parameter>.npy     first values of tables, and of the model under its own names

    python benchmarks/peers/fused_dlrm.py fbgemm FOLDER
    python benchmarks/peers/fused_dlrm.py fbgemm FOLDER 9100      epoch after epoch, and its counter at that port
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOSSES = 100  # last steps whose mean loss is compared
Lookup = Callable[[Tensor], Tensor]  # ids i64 [F * B] -> f32 [B, F, D]


def fbgemm_lookup(terms: dict[str, Any], tables: list[Tensor]) -> Lookup:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "sgd": OptimType.EXACT_SGD,
        "adagrad": OptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": OptimType.EXACT_ROWWISE_ADAGRAD,
    }
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(len(table), table.shape[1], EmbeddingLocation.HOST, ComputeDevice.CPU) for table in tables],
        optimizer=kinds[terms["optimizer"]],
        learning_rate=terms["lr"],
        eps=terms["eps"],
    )
    for weights, table in zip(layer.split_embedding_weights(), tables, strict=True):
        weights.copy_(table)
    dim = tables[0].shape[1]
    return lambda ids: layer(ids, torch.arange(len(ids) + 1)).view(-1, len(tables), dim)


def torchrec_lookup(terms: dict[str, Any], tables: list[Tensor]) -> Lookup:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    names = [f"feature_{n}" for n in range(len(tables))]
    configs = [
        EmbeddingBagConfig(
            name=f"table_{n}", num_embeddings=len(table), embedding_dim=table.shape[1], feature_names=[names[n]]
        )
        for n, table in enumerate(tables)
    ]
    settings = {"lr": terms["lr"]} if terms["optimizer"] == "sgd" else {"lr": terms["lr"], "eps": terms["eps"]}
    layer = FusedEmbeddingBagCollection(configs, kinds[terms["optimizer"]], settings, device=torch.device("cpu"))
    with torch.no_grad():
        for n, table in enumerate(tables):
            layer.state_dict()[f"embedding_bags.table_{n}.weight"].copy_(table)
    dim = tables[0].shape[1]

    def lookup(ids: Tensor) -> Tensor:
        features = KeyedJaggedTensor(keys=names, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
        values: Tensor = layer(features).values()
        return values.view(-1, len(tables), dim)

    return lookup


class DLRM(nn.Module):
    """Has the architecture and the parameter names of `rowcast.trainer.models.dlrm`."""

    def __init__(self, bottom: list[int], top: list[int], num_vectors: int) -> None:
        super().__init__()
        self.bottom_mlp = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(bottom))
        self.top_mlp = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(top))
        i, j = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.lower = (i * num_vectors + j)[None]

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        for layer in self.bottom_mlp:
            dense = torch.relu(layer(dense))
        vectors = torch.cat([dense[:, None], embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        top = torch.cat([dense, products.gather(1, self.lower.expand(len(products), -1))], dim=1)
        for layer in self.top_mlp[:-1]:
            top = torch.relu(layer(top))
        logits: Tensor = self.top_mlp[-1](top)
        return logits.squeeze(1)


class Trained(BaseHTTPRequestHandler):
    """Serves how many samples were trained, as the other contestants do."""

    samples = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"rowcast_samples_total {Trained.samples}\n".encode())

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def serve(port: int) -> None:
    threading.Thread(target=HTTPServer(("127.0.0.1", port), Trained).serve_forever, daemon=True).start()


def main() -> None:
    kind, folder, *ports = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    terms = json.loads((folder / "terms.json").read_text())
    torch.set_num_threads(terms["threads"])
    tables = [torch.from_numpy(np.load(folder / f"table_{n}.npy")) for n in range(terms["num_tables"])]
    lookup = {"fbgemm": fbgemm_lookup, "torchrec": torchrec_lookup}[kind](terms, tables)
    model = DLRM(terms["bottom"], terms["top"], len(tables) + 1)
    model.load_state_dict({name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in model.state_dict()})
    optimizer = torch.optim.SGD(model.parameters(), lr=terms["dense_lr"], foreach=False)
    dense, labels, ids = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("dense", "labels", "ids"))
    losses = []
    for port in ports:
        serve(port)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for step in itertools.cycle(range(len(ids))) if ports else range(len(ids)):
        logits = model(dense[step], lookup(ids[step]))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[step])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
        Trained.samples += len(labels[step])
    wall_s = time.perf_counter() - began_s
    cores = {"process": (time.process_time() - began_cpu_s) / wall_s}
    last = torch.stack(losses[-LOSSES:]).mean().item()
    outcome = {"samples": labels.numel(), "steps": len(losses), "wall_s": wall_s, "loss": last, "cores": cores}
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
