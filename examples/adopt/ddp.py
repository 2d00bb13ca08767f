"""The small DLRM of `plain_dlrm.py` on several ranks: `torchrun --nproc-per-node 2 -m examples.adopt.ddp`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples.adopt.in_memory import EmbeddingBags
from examples.adopt.plain_dlrm import CONFIGS, DLRM, LR, open_clicks


def own_clicks() -> Iterator[tuple[Tensor, ...]]:
    """This rank's samples of each batch."""
    for batch in open_clicks():
        yield tuple(own.tensor_split(dist.get_world_size())[dist.get_rank()] for own in batch)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small DLRM on made-up clicks, on several ranks.")
    parser.add_argument("--begin", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, required=True, help="a file for the state dict at the end, and the losses")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embeddings = EmbeddingBags(CONFIGS)
    model = DLRM(embeddings)
    if options.begin:
        model.load_state_dict(load_file(options.begin))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = own_clicks()
    net = DistributedDataParallel(model)
    losses = []
    for dense, ids, labels in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(net(dense, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, the last at loss {losses[-1]:.4f}")
        save_file({**state, "losses": torch.tensor(losses)}, options.end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
