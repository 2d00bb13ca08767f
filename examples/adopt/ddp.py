"""A click model with DistributedDataParallel, as it is or adopted:

torchrun --nproc-per-node 2 -m examples.adopt.ddp --end trained.pt --adopt "4000 rows"
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rowcast

ROWS, DIM, BATCH = (20_000, 5_000, 100), 8, 128


def clicks(batches: int = 30) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of each batch: ids i64 [B, 3], labels f32 [B], 1 where the first id is even."""
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        every = [(torch.rand(BATCH * dist.get_world_size(), generator=random) ** 4 * rows).long() for rows in ROWS]
        ids = torch.stack(every, dim=1).split(BATCH)[dist.get_rank()]
        yield ids, (ids[:, 0] % 2 == 0).float()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.top = nn.Sequential(nn.Linear(len(ROWS) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(column) for table, column in zip(self.tables, ids.T, strict=True)]
        logits: Tensor = self.top(torch.cat(vectors, dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a click model on made-up clicks, on several ranks.")
    parser.add_argument("--adopt", default="", help="what the device has for tables")
    parser.add_argument("--end", required=True, help="a file for the state dict at the end, and the losses")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    batches: Iterable[Any] = clicks()
    if options.adopt:
        rowcast.adopt(model, options.adopt)
        batches = rowcast.ahead(batches)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    net = DistributedDataParallel(model)
    losses = []
    for ids, labels in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(net(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, the last at loss {losses[-1]:.4f}")
        torch.save({"model": state, "losses": losses}, options.end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
