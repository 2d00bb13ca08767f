"""A script on ranks that saves itself: FOLDER CAPACITY END; rank 1 is killed before step END. Started by torchrun.

Without a CAPACITY ("") nothing is adopted, and nothing saved."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rowcast

ROWS, EPOCHS, EVERY = 300, 2, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.top = nn.Embedding(ROWS, 4), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.top(torch.dropout(self.items(ids), 0.2, train=True).flatten(1))
        return found


def main(folder: Path, capacity: str, end: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())  # of dropout; the first values are rank 0's
    model = Model() if not capacity else rowcast.adopt(Model(), capacity)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(10 + dist.get_rank())
    step = rowcast.restore(folder / "run", model, optimizer) if capacity else 0
    ids = torch.randint(0, ROWS, (160, 2), generator=torch.Generator().manual_seed(5))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(TensorDataset(ids), seed=8)
    loader = DataLoader(TensorDataset(ids), 8, sampler=sampler)
    epoch, done = divmod(step, len(loader))
    for number in range(epoch, EPOCHS):
        sampler.set_epoch(number)
        for (own,) in rowcast.ahead(loader, skip=done):
            if step == end and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            net(own).square().mean().backward()
            optimizer.step()
            step += 1
            if capacity and step % EVERY == 0:
                rowcast.save(folder / "run", model, optimizer, step=step)
        done = 0
    states = [own for of in optimizer.state_dict()["state"].values() for own in of.values()]
    torch.save([own.clone() for own in (*model.state_dict().values(), *states)], folder / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
