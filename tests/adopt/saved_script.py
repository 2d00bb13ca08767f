"""A script that saves itself after each epoch, and goes on from what it saved:

    python -m tests.adopt.saved_script FILE CAPACITY ENDING

Without a CAPACITY ("") nothing is adopted. ENDING: "killed", "raises" or "stopped" in the third epoch, or "whole"."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import rowcast

ROWS, DIM, EPOCHS = 400, 3, 4
STOPPED_S = 8.0  # longer than `transport.silence_timeout` of runs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.user = nn.Parameter(torch.rand(ROWS, 2))
        self.top = nn.Linear(DIM + 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.item(x[:, 0]), self.user[x[:, 1]]], 1))
        return scores.squeeze(1)


def main(file: Path, capacity: str, ending: str) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model: Any = Model()
    if capacity:
        rowcast.adopt(model, capacity, tables=["user"])
    optimizer = optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    schedule, begin = optim.lr_scheduler.StepLR(optimizer, 5, 0.9), 0
    if file.exists():
        saved = torch.load(file)
        begin = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    x = torch.randint(0, ROWS, (120, 2), generator=torch.Generator().manual_seed(7))
    for epoch in range(begin, EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for at, (ids, y) in enumerate(DataLoader(TensorDataset(x, x[:, 0] / ROWS), 10, shuffle=True, generator=order)):
            if epoch == 2 and at == 5:
                end(ending)
            optimizer.zero_grad()
            F.mse_loss(model(ids), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({"epoch": epoch + 1, **states}, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)


def end(ending: str) -> None:
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "raises":
        raise ZeroDivisionError("the script's own error")
    if ending == "stopped":
        with subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
