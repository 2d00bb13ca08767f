"""What does it take to train a table of a released model that no memory holds? `python -m benchmarks.released FOLDER`.

Makes sparse safetensors files in FOLDER, 64 pieces of zeros in bfloat16, and trains the table by AdamW without decay. A
step has 2,048 tokens of the text of Python's library, with the hashes of 16 contexts each: 32,768 look-ups. Prints, for
each process, the peak of its own memory (RssAnon: without pages of files, which the kernel drops), beside torch and the
cache; the bytes of an overlay over those of its rows; and the distinct pages of the rows that were looked up.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rowcast
from benchmarks.adopt_large import MOST_SEEN, look
from rowcast.prefetcher.checkpoints.overlay import write_overlay
from rowcast.runtime.tensor_file import TensorSpec, make_header

TOKENS, CONTEXTS, PIECES, NAME = 2048, 16, 64, "memory.weight"


def release(folder: Path, rows: int, dim: int) -> None:
    """The pieces take no disk until somebody writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [rows * piece // PIECES for piece in range(PIECES + 1)]
    for piece, (begin, end) in enumerate(pairwise(bounds)):
        spec = TensorSpec(dtype="BF16", shape=(end - begin, dim), nbytes=2 * dim * (end - begin))
        header, _ = make_header({f"memory.shard_{piece}.weight": spec})
        with (folder / f"model-{piece:05}.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + spec.nbytes)


def batches(rows: int, steps: int) -> Iterator[Tensor]:
    """i64 [TOKENS, CONTEXTS]: hashes of the last 1 to CONTEXTS bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    starts = np.random.default_rng(0).integers(CONTEXTS, len(text) - TOKENS, steps)
    for start in starts:
        row, ids = np.zeros(TOKENS, np.uint64), []
        for back in range(CONTEXTS):
            row = (row ^ text[start - back : start - back + TOKENS]) * np.uint64(0x9E3779B97F4A7C15)
            row ^= row >> np.uint64(29)
            ids.append((row % np.uint64(rows)).astype(np.int64))
        yield torch.from_numpy(np.stack(ids, axis=1))


class Model(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.memory, self.top = nn.Embedding(rows, dim, device="meta"), nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.memory(ids).sum(1))
        return logits


def main(folder: Path, rows: int, dim: int, steps: int, memory: str) -> None:
    torch.set_num_threads(1)
    release(folder / "released", rows, dim)
    model = Model(rows, dim)
    look()
    alone, begun_s = MOST_SEEN[os.getpid()], time.perf_counter()
    capacity = 120_000
    rowcast.adopt(model, capacity=f"{capacity} rows", files={NAME: folder / "released"}, memory=memory)
    groups: Any = [{"params": [model.memory.weight], "weight_decay": 0.0}, {"params": [*model.top.parameters()]}]
    optimizer, seen = torch.optim.AdamW(groups, lr=1e-3), []
    for step, ids in enumerate(rowcast.ahead(batches(rows, steps))):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(ids), ids[:, :1] / rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(torch.unique(ids))
        if step % 10 == 1:
            look()
    look()
    seconds, looked_up = time.perf_counter() - begun_s, torch.unique(torch.cat(seen))
    print(f"{steps} steps in {seconds:.0f} s; {len(looked_up):,} of {rows:,} rows were looked up")
    print(f"on {len(torch.unique(looked_up * 2 * dim // 4096)):,} distinct pages of 4 KiB")
    cache = capacity * 4 * (3 * dim + 4)
    for pid, most in MOST_SEEN.items():
        who = "the script" if pid == os.getpid() else "the prefetcher"
        beside = most - (alone + cache if pid == os.getpid() else 0)
        print(f"{who}: {most / 2**20:,.0f} MiB of its own at most, {beside / 2**20:,.0f} beside torch and the cache")
    rowcast.save(folder / f"run-{os.getpid()}", model, optimizer, step=steps)
    changed = write_overlay(folder / f"run-{os.getpid()}", overlay := folder / f"overlay-{os.getpid()}.safetensors")
    size = overlay.stat().st_size
    print(f"overlay of {changed:,} rows: {size:,} bytes, {size / (changed * (2 * dim + 8)):.4f} of those of its rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=320_001_536)
    parser.add_argument("--dim", type=int, default=160)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory", default="all", help="of the prefetcher, such as 512MiB")
    given = parser.parse_args()
    main(given.folder, given.rows, given.dim, given.steps, given.memory)
