"""A training script for several ranks, which does what its argument says, as JSON; started by torchrun."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rowcast
from examples.adopt.plain_dlrm import CONFIGS, DLRM, LR, open_clicks

SIZE, STEPS = 50, 14


def clicks(size: int = SIZE) -> Callable[[str, int], Iterator[Any]]:
    """An evaluation ends with fewer samples than ranks."""
    return lambda split, epoch: (
        open_clicks(STEPS, size) if split == "train" else chain(open_clicks(2, size), open_clicks(1, 1))
    )


def module(folder: Path, placement: str = "rows", **job: Any) -> rowcast.EmbeddingBagCollection:
    return rowcast.EmbeddingBagCollection(
        [replace(CONFIGS[0], placement=placement), *CONFIGS[1:]],
        optimizer={"kind": "adagrad", "lr": LR},
        capacity="30KB",
        device="cpu",
        run_dir=folder,
        job=job,
    )


def model_over(embeddings: nn.Module) -> tuple[DLRM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DLRM(embeddings)
    model.top.insert(2, nn.Dropout(0.1))
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("embeddings")]
    return model, torch.optim.Adagrad(dense, lr=LR)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def main() -> None:
    wishes = json.loads(sys.argv[1])
    folder, rank, life = Path(wishes["folder"]), int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group("gloo")
    embeddings = module(folder / "run", wishes.get("placement", "rows"), **wishes.get("job", {}))
    model, optimizer = model_over(embeddings)
    torch.manual_seed(rank)  # of the dropout
    loader = rowcast.connect(
        embeddings,
        "tests.adopt.rank_script:clicks",
        epochs=wishes.get("epochs", 1),
        options={"size": wishes.get("size", SIZE)},
        evaluate=True,
        save_every=wishes.get("save_every", 3),
        dense=(model, optimizer),
    )
    net = DistributedDataParallel(model) if wishes.get("ddp") else model
    losses: list[Tensor] = []
    for _ in loader.epochs:
        for batch in loader:
            act = wishes.get(f"{life}.{rank}.{batch.train_step}")
            if act == "leave out":
                continue
            model.train(batch.kind == "train")
            with torch.set_grad_enabled(model.training):
                logits = net(batch.dense_features, batch.sparse_features)
            if batch.kind == "eval":
                loader.record(logits=logits)
                continue
            loss = loss_of(logits, batch.labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if not wishes.get("ddp") and act != "alone":
                rowcast.sum_gradients(model)
            optimizer.step()
            losses.append(loss.detach())
            if act == "alone":
                continue
            if act == "wait":
                dist.barrier()
            if act == "leave":
                return
            if act == "stop":
                loader.stop("enough")
            elif act is not None:
                os.kill(os.getpid(), signal.Signals[act])
        if loader.stopped:
            break
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    evaluation = loader.evaluation
    figures = [] if evaluation is None else [evaluation.auc, evaluation.logloss]
    found |= {"evaluation": torch.tensor(figures, dtype=torch.float64), "losses": torch.stack(losses)}
    save_file(found, folder / f"{rank}.end")


if __name__ == "__main__":
    main()
