"""A language model of bytes beside a hashed table of n-grams, larger than memory: reads any text files.

    python -m examples.adopt.ngram_lm --text FOLDER --rows 1000000000
    python -m examples.adopt.ngram_lm --text FOLDER --rows 1000000 --plain      # its twin over nn.Embedding

Position t looks up rows of the last 2 to 4 bytes, a function of the text. Every eighth file is held out whole.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rowcast
from examples.adopt.in_memory import JaggedEmbedding

GRAMS, ROW, WIDTH, LENGTH, BATCH = (2, 3, 4), 32, 64, 128, 16
RULE: dict[str, Any] = {"kind": "adagrad", "lr": 0.05}


def windows(text: str, rows: int, steps: int, seed: int = 0) -> Any:
    """The data factory: {"sparse": {"gram2": ids [B, L], ...}, "tokens": u8 [B, L + 1]}."""
    texts = {split: text_of(text, split) for split in ("train", "eval")}

    def batches(split: str, epoch: int) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng([seed, epoch, split == "eval"])
        for near in stretches(texts[split], steps if split == "train" else 20, rng):
            yield {"sparse": {f"gram{n}": hashed(near, n, rows) for n in GRAMS}, "tokens": near[:, 4:].copy()}

    return batches


def text_of(text: str, split: str) -> Any:
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in text_files(Path(text))]
    return np.concatenate([file for i, file in enumerate(files) if (i % 8 == 7) == (split == "eval")])


def text_files(folder: Path) -> list[Path]:
    """Every link is in the list: reading one that leads to no file fails."""
    return [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]


def stretches(own: Any, steps: int, rng: np.random.Generator) -> Iterator[Any]:
    """Batches of windows of the text, with the four bytes before: u8 [B, 4 + L + 1]."""
    for _ in range(steps):
        starts = rng.integers(4, len(own) - LENGTH - 1, BATCH)
        yield own[starts[:, None] + np.arange(-4, LENGTH + 1)]


def hashed(near: Any, n: int, rows: int) -> Any:
    """u8 [B, 4 + L + 1] -> the row of the n bytes that end at each of the L positions."""
    found = np.full((len(near), LENGTH), n, np.uint64)  # wraps at 2^64
    for back in range(n):
        found = (found ^ near[:, 4 - back : 4 - back + LENGTH]) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return (found % np.uint64(rows)).astype(np.int64)


def in_this_process(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for split in ("train", "eval"):
        for own in windows(**data)(split, 0):
            sparse = {name: torch.from_numpy(ids) for name, ids in own["sparse"].items()}
            yield split, {"sparse": sparse, "tokens": torch.from_numpy(own["tokens"])}


class Model(nn.Module):
    def __init__(self, memory: nn.Module) -> None:
        super().__init__()
        self.memory, self.token, self.place = memory, nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix, self.out = nn.Linear(len(GRAMS) * ROW, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, norm_first=True) for _ in "ab")

    def forward(self, sparse: Any, tokens: Tensor) -> Tensor:
        found = self.memory(sparse)
        rows = torch.cat([found[f"gram{n}"].values().view(-1, LENGTH, ROW) for n in GRAMS], dim=2)
        x = self.token(tokens[:, :-1].long()) + self.place.weight + self.mix(rows)
        x, mask = x.transpose(0, 1), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.out(x.transpose(0, 1)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].long().flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a language model beside a hashed table.")
    parser.add_argument("--text", required=True, help="a folder of text files")
    for name, value in {"rows": 1_000_000, "steps": 400, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--plain", action="store_true", help="the table in memory, as nn.Embedding")
    parser.add_argument("--start", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, help="where the state dict goes that it ends with")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    text = str(Path(options.text).resolve())
    data = {"text": text, "rows": options.rows, "steps": options.steps, "seed": options.seed}
    names = [f"gram{n}" for n in GRAMS]
    table = rowcast.EmbeddingConfig(name="grams", num_embeddings=options.rows, embedding_dim=ROW, feature_names=names)
    collection = None if options.plain else rowcast.EmbeddingCollection([table], optimizer=RULE, capacity="64MiB")
    model = Model(JaggedEmbedding(table) if collection is None else collection)
    if options.start:
        model.load_state_dict(load_file(options.start))
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("memory.")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=1e-3)]
    batches: Any = ()
    if collection is None:
        optimizers.append(torch.optim.Adagrad(model.memory.parameters(), lr=RULE["lr"]))
        batches = in_this_process(data)
    elif options.steps:
        loader = rowcast.connect(collection, "examples.adopt.ngram_lm:windows", options=data, evaluate=True)
        batches = ((batch.kind, batch) for batch in loader)
    losses: dict[str, list[float]] = {"train": [], "eval": []}
    for kind, batch in batches:
        model.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"):
            loss = model(batch["sparse"], batch["tokens"])
        losses[kind].append(loss.item())
        if kind == "train":
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    print(f"held out: {sum(losses['eval']) / max(1, len(losses['eval'])) / math.log(2):.3f} bits a byte")
    if options.end:
        save_file(model.state_dict(), options.end)


if __name__ == "__main__":
    main()
