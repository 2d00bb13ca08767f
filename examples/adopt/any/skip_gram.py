"""A step looks up one table twice, with sparse gradients. Each epoch makes a new SparseAdam. The loader draws here."""

from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

WORDS, WINDOW, NEGATIVES = 500, 3, 4
Pair = tuple[int, int, Any]


class Sentences(Dataset[list[Pair]]):
    def __init__(self) -> None:
        self.frequent = np.full(WORDS, 1 / WORDS)
        self.sentences = [np.random.choice(WORDS, 10, p=self.frequent) for _ in range(60)]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, at: int) -> list[Pair]:
        kept = [word for word in self.sentences[at] if np.random.rand() < 0.6]
        window = np.random.randint(1, WINDOW)
        pairs = [(a, b) for i, a in enumerate(kept) for b in kept[max(i - window, 0) : i + window] if a != b]
        return [(a, b, np.random.choice(WORDS, NEGATIVES, p=self.frequent)) for a, b in pairs]

    @staticmethod
    def collate(sentences: list[list[Pair]]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.array(own)) for own in zip(*chain(*sentences), strict=True))


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Embedding(WORDS, 8, sparse=True)
        self.contexts = nn.Embedding(WORDS, 8, sparse=True)
        nn.init.uniform_(self.centers.weight.data, -0.1, 0.1)
        nn.init.constant_(self.contexts.weight.data, 0)

    def forward(self, center: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        rows = self.centers(center)
        true = (rows * self.contexts(context)).sum(1).clamp(-10, 10)
        drawn = torch.bmm(self.contexts(negatives), rows.unsqueeze(2)).squeeze(2).clamp(-10, 10)
        return (F.softplus(-true) + F.softplus(drawn).sum(1)).mean()


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    loader = DataLoader(Sentences(), 6, collate_fn=Sentences.collate)
    model, losses = SkipGram(), []
    if capacity:
        rowcast.adopt(model, capacity)
    for _ in range(3):
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
        for words in loader:
            loss = model(*words)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        losses.append(float(model.centers.weight.cpu().data.numpy().sum()))
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
