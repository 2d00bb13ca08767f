"""A language model of bytes beside a hashed table of n-grams, larger than memory: reads any text files.

    python -m examples.adopt.ngram_lm --text FOLDER --rows 1000000000
    python -m examples.adopt.ngram_lm --text FOLDER --rows 1000000 --plain      # as it is: the table in memory

Position t looks up rows of the last 2 to 4 bytes, a function of the text. Every eighth file is held out whole.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rowcast

GRAMS, ROW, WIDTH, LENGTH, BATCH = (2, 3, 4), 32, 64, 128, 16


def windows(text: Path, split: str, rows: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches: ids i64 [B, 3, L], tokens u8 [B, L + 1]."""
    rng, whole = np.random.default_rng([seed, 0, split == "eval"]), text_of(text, split)
    for near in stretches(whole, steps, rng):
        ids = np.stack([hashed(near, n, rows) for n in GRAMS], axis=1)
        yield torch.from_numpy(ids), torch.from_numpy(near[:, 4:].copy())


def text_of(text: Path, split: str) -> Any:
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in text_files(text)]
    return np.concatenate([file for i, file in enumerate(files) if (i % 8 == 7) == (split == "eval")])


def text_files(folder: Path) -> list[Path]:
    """Every link is in the list: reading one that leads to no file fails."""
    return [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]


def stretches(whole: Any, steps: int, rng: np.random.Generator) -> Iterator[Any]:
    """Batches of windows of the text, with the four bytes before: u8 [B, 4 + L + 1]."""
    for _ in range(steps):
        starts = rng.integers(4, len(whole) - LENGTH - 1, BATCH)
        yield whole[starts[:, None] + np.arange(-4, LENGTH + 1)]


def hashed(near: Any, n: int, rows: int) -> Any:
    """u8 [B, 4 + L + 1] -> the row of the n bytes that end at each of the L positions."""
    row = np.full((len(near), LENGTH), n, np.uint64)  # wraps at 2^64
    for back in range(n):
        row = (row ^ near[:, 4 - back : 4 - back + LENGTH]) * np.uint64(0x9E3779B97F4A7C15)
        row ^= row >> np.uint64(29)
    return (row % np.uint64(rows)).astype(np.int64)


class Model(nn.Module):
    def __init__(self, rows: int, tables: Path | None) -> None:
        """`tables`: a folder for a table whose rows a rule makes; None: an ordinary one."""
        super().__init__()
        with nullcontext() if tables is None else rowcast.tables(tables, init="uniform", seed=0):
            self.memory = nn.Embedding(rows, ROW)
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix, self.out = nn.Linear(len(GRAMS) * ROW, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, norm_first=True) for _ in "ab")

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """The loss, in nats a byte."""
        rows = self.memory(ids).transpose(1, 2).flatten(2)  # [B, L, 3 * ROW]
        x = self.token(tokens[:, :-1].long()) + self.place.weight + self.mix(rows)
        x, mask = x.transpose(0, 1), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.out(x.transpose(0, 1)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].long().flatten())


def evaluated(model: nn.Module, options: argparse.Namespace) -> list[float]:
    """Prints the held-out loss. Returns the losses of its batches, in nats a byte."""
    model.eval()
    with torch.no_grad():
        losses = [model(*batch).item() for batch in windows(options.text, "eval", options.rows, 20, options.seed)]
    print(f"held out: {sum(losses) / len(losses) / math.log(2):.3f} bits a byte")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a language model beside a hashed table.")
    parser.add_argument("--text", type=Path, required=True, help="a folder of text files")
    for name, value in {"rows": 1_000_000, "steps": 400, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--capacity", default="64MiB", help="what the device has for tables")
    parser.add_argument("--tables", type=Path, default=Path("tables"), help="a folder for the table's file")
    parser.add_argument("--plain", action="store_true", help="as it is, not adopted")
    parser.add_argument("--end", type=Path, help="where losses and the dense weights go")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Model(options.rows, options.tables)
    train: Iterable[Any] = windows(options.text, "train", options.rows, options.steps, options.seed)
    if not options.plain:
        rowcast.adopt(model, options.capacity)
        train = rowcast.ahead(train)
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("memory.")]
    optimizers = torch.optim.AdamW(dense, lr=1e-3), torch.optim.Adagrad(model.memory.parameters(), lr=0.05)
    losses = []
    for batch in train:
        loss = model(*batch)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held_out = evaluated(model, options)
    if options.end:
        torch.save({"losses": losses + held_out, "dense": [weight.detach() for weight in dense]}, options.end)


if __name__ == "__main__":
    main()
