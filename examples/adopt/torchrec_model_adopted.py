"""TorchRec's DLRM, trained on TorchRec's batches: several ids a bag, and empty bags."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rowcast

LR = 0.05
CONFIGS = [
    EmbeddingBagConfig(name="articles", num_embeddings=20_000, embedding_dim=8, feature_names=["article"]),
    EmbeddingBagConfig(name="tags", num_embeddings=3_000, embedding_dim=8, feature_names=["tag", "past_tag"]),
]


def open_clicks(batches: int = 30, size: int = 128) -> Iterator[Batch]:
    """Clicked where the last article is even."""
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        lengths = torch.cat([torch.ones(size, dtype=torch.long), torch.randint(4, (2 * size,), generator=random)])
        articles = (torch.rand(size, generator=random) ** 3 * 20_000).long()
        tags = torch.randint(3_000, (int(lengths[size:].sum()),), generator=random)
        sparse = KeyedJaggedTensor(
            keys=["article", "tag", "past_tag"], values=torch.cat([articles, tags]), lengths=lengths
        )
        yield Batch(
            dense_features=torch.rand(size, 4, generator=random),
            sparse_features=sparse,
            labels=(articles % 2 == 0).long(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains TorchRec's DLRM on made-up clicks.")
    parser.add_argument("--start", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, help="where the state dict goes that it ends with, and the losses")
    options = parser.parse_args()
    torch.manual_seed(0)
    embeddings = rowcast.EmbeddingBagCollection(CONFIGS, optimizer={"kind": "adagrad", "lr": LR}, capacity="200KB")
    model = DLRMTrain(
        DLRM(embeddings, dense_in_features=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    )
    if options.start:
        model.load_state_dict(load_file(options.start))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = rowcast.connect(embeddings, "examples.adopt.torchrec_model_adopted:open_clicks")
    losses = []
    for batch in loader:
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{len(losses)} steps, the last at loss {losses[-1]:.4f}")
    if options.end:
        save_file({**model.state_dict(), "losses": torch.tensor(losses)}, options.end)


if __name__ == "__main__":
    main()
