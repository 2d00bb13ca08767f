"""A training script with its own data set class, read by a DataLoader: shuffled, two epochs, several ids per sample."""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

CONFIGS = [
    rowcast.EmbeddingBagConfig(name="articles", num_embeddings=20_000, embedding_dim=8, feature_names=["article"]),
    rowcast.EmbeddingBagConfig(name="tags", num_embeddings=3_000, embedding_dim=8, feature_names=["tag"]),
]
LR, EPOCHS = 0.05, 2


class ClickLog(Dataset[dict[str, Any]]):
    """Readers like articles whose number is even."""

    def __init__(self, samples: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.article = (torch.rand(samples, 1, generator=random) ** 3 * 20_000).long()
        self.tag = torch.randint(3_000, (samples, 3), generator=random)
        self.hour = torch.rand(samples, 1, generator=random)

    def __len__(self) -> int:
        return len(self.hour)

    def __getitem__(self, i: int) -> dict[str, Any]:
        label = (self.article[i, 0] % 2 == 0).float()
        return {"dense": self.hour[i], "sparse": {"article": self.article[i], "tag": self.tag[i]}, "labels": label}


def open_clicks(samples: int = 2_000) -> DataLoader[dict[str, Any]]:
    return DataLoader(ClickLog(samples), batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        found = self.embeddings(sparse)
        logits: Tensor = self.layers(torch.cat([dense, found["article"], found["tag"]], dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on a click log of its own.")
    parser.add_argument("--start", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, help="where the state dict goes that it ends with, and the losses")
    options = parser.parse_args()
    torch.manual_seed(0)
    embeddings = rowcast.EmbeddingBagCollection(CONFIGS, optimizer={"kind": "adagrad", "lr": LR}, capacity="200KB")
    model = Model(embeddings)
    if options.start:
        model.load_state_dict(load_file(options.start))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = rowcast.connect(embeddings, "examples.adopt.own_dataset_adopted:open_clicks", epochs=EPOCHS)
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(batch["dense"], batch["sparse"]), batch["labels"]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses[-20:]) / 20:.4f}")
    if options.end:
        save_file({**model.state_dict(), "losses": torch.tensor(losses)}, options.end)


if __name__ == "__main__":
    main()
