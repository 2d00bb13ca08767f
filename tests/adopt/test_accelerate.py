"""A loop of Hugging Face accelerate, whose loader is one batch ahead: the bits of the script, and foreseen look-ups."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowcast
from rowcast.trainer.adopt import adopt

ROWS = (3000, 2000)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(rows, 8) for rows in ROWS)
        self.top = nn.Linear(16, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.users(users), self.items(items)], 1))
        return scores.squeeze(1)


def script(accelerate: Any, capacity: str) -> list[Tensor]:
    """Accumulates, clips and schedules; returns losses and the model's parameters."""
    torch.manual_seed(0)
    ids = [(torch.rand(1312) ** 2 * rows).long() for rows in ROWS]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = rowcast.adopt(Pairs(), capacity) if capacity else Pairs()
    own = torch.optim.AdamW(plain.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(own, 20, 0.5)
    loader = DataLoader(TensorDataset(*ids, torch.rand(1312)), 32, shuffle=True)
    model, optimizer, batches, schedule = accelerator.prepare(plain, own, loader, rates)
    losses = []
    for _ in range(3):
        for users, items, ratings in batches:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(users, items), ratings)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *(value.clone() for value in plain.state_dict().values())]


@pytest.mark.usefixtures("let_go")
def test_a_loop_of_accelerate_has_its_bits_and_is_foreseen() -> None:
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    plain, adopted = script(accelerate, ""), script(accelerate, "1200 rows")
    assert [at for at, (one, other) in enumerate(zip(plain, adopted, strict=True)) if not torch.equal(one, other)] == []
    look_ups = adopt._doors[0].reading.counts.look_ups
    assert look_ups["foreseen"] >= 0.9 * look_ups.total()
