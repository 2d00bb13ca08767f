"""What does it take to train a table of a released model that no memory holds? `python -m benchmarks.released FOLDER`.

Makes sparse safetensors files in FOLDER, 64 pieces of zeros in bfloat16, and trains the table by AdamW without decay. A
step has tokens of the text of Python's library, with the hashes of 16 contexts each. Prints, for
each process, the peak of its own memory (RssAnon: without pages of files, which the kernel drops), beside torch and the
cache; the bytes of an overlay over those of its rows; and the distinct pages of the rows that were looked up. `--run`
gives the pages that a restart reads from the disk, over those that hold its rows: --rows 6250000 takes 2 GB.
"""

import argparse
import io
import os
import shutil
import subprocess
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
from rowcast.protocol.released_rows import find_released
from rowcast.runtime.tensor_file import TensorSpec, make_header

CONTEXTS, PIECES, NAME = 16, 64, "memory.weight"


def release(folder: Path, rows: int, dim: int, *, is_on_disk: bool) -> None:
    """Pieces that are not on disk take none, and are read without it. Of the others, no page is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [rows * piece // PIECES for piece in range(PIECES + 1)]
    for piece, (begin, end) in enumerate(pairwise(bounds)):
        spec = TensorSpec(dtype="BF16", shape=(end - begin, dim), nbytes=2 * dim * (end - begin))
        header, _ = make_header({f"memory.shard_{piece}.weight": spec})
        with (folder / f"model-{piece:05}.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + spec.nbytes)
            if is_on_disk:
                shutil.copyfileobj(io.BytesIO(bytes(spec.nbytes)), file)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pages_in_memory(folder: Path) -> int:
    """Counts the pages of the pieces that the kernel holds, with fincore of util-linux."""
    command = ["fincore", "--noheadings", "--output", "PAGES", *map(str, folder.glob("*.safetensors"))]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def batches(rows: int, steps: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """i64 [tokens, CONTEXTS]: hashes of the last 1 to CONTEXTS bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    starts = np.random.default_rng(seed).integers(CONTEXTS, len(text) - tokens, steps)
    for start in starts:
        row, ids = np.zeros(tokens, np.uint64), []
        for back in range(CONTEXTS):
            row = (row ^ text[start - back : start - back + tokens]) * np.uint64(0x9E3779B97F4A7C15)
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


def pages_of(numbers: Tensor, folder: Path, rows: int, dim: int) -> int:
    """How many pages of 4 KiB of the pieces hold these rows."""
    released, begin, num_pages = find_released(folder, NAME, rows, dim).released, 0, 0
    assert released is not None
    for _, offset, num_rows in released.parts:
        at = offset + 2 * dim * (numbers[(numbers >= begin) & (numbers < begin + num_rows)] - begin)
        num_pages += len(torch.unique(torch.cat([at // 4096, (at + 2 * dim - 1) // 4096])))
        begin += num_rows
    return num_pages


def main(
    folder: Path, rows: int, dim: int, steps: int, tokens: int, capacity: int, memory: str, run: Path | None
) -> None:
    torch.set_num_threads(1)
    release(folder / "released", rows, dim, is_on_disk=run is not None)
    model = Model(rows, dim)
    look()
    alone, begun_s = MOST_SEEN[os.getpid()], time.perf_counter()
    rowcast.adopt(model, capacity=f"{capacity} rows", files={NAME: folder / "released"}, memory=memory)
    groups: Any = [{"params": [model.memory.weight], "weight_decay": 0.0}, {"params": [*model.top.parameters()]}]
    optimizer, seen = torch.optim.AdamW(groups, lr=1e-3), []
    done = 0 if run is None else rowcast.restore(run, model, optimizer)
    for step, ids in enumerate(rowcast.ahead(batches(rows, steps, tokens, done))):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(ids), ids[:, :1] / rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(torch.unique(ids))
        if step % 10 == 1:
            look()
    look()
    seconds, looked_up = time.perf_counter() - begun_s, torch.unique(torch.cat(seen))
    print(f"{steps} steps in {seconds:.0f} s; {len(looked_up):,} of {rows:,} rows were looked up")
    saved = torch.cat([ids.flatten() for ids in batches(rows, done, tokens, 0)] or [looked_up[:0]])
    new = looked_up[~torch.isin(looked_up, saved)]
    needed = pages_of(new, folder / "released", rows, dim)
    print(f"{len(new):,} of them are in no save; they lie on {needed:,} distinct pages of 4 KiB")
    if run is not None:
        read = pages_in_memory(folder / "released")
        print(f"{read:,} pages of the files were read, {read / needed:.3f} of those")
    cache = capacity * 4 * (3 * dim + 4)
    for pid, most in MOST_SEEN.items():
        who = "the script" if pid == os.getpid() else "the prefetcher"
        beside = most - (alone + cache if pid == os.getpid() else 0)
        print(f"{who}: {most / 2**20:,.0f} MiB of its own at most, {beside / 2**20:,.0f} beside torch and the cache")
    rowcast.save(folder / f"run-{os.getpid()}", model, optimizer, step=done + steps)
    changed = write_overlay(folder / f"run-{os.getpid()}", overlay := folder / f"overlay-{os.getpid()}.safetensors")
    size = overlay.stat().st_size
    print(f"overlay of {changed:,} rows: {size:,} bytes, {size / (changed * (2 * dim + 8)):.4f} of those of its rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=320_001_536)
    parser.add_argument("--dim", type=int, default=160)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--capacity", type=int, default=120_000, help="rows on the device")
    parser.add_argument("--memory", default="all", help="of the prefetcher, such as 512MiB")
    parser.add_argument("--run", type=Path, help="write the pieces to disk, and go on from this folder's save, if any")
    main(**vars(parser.parse_args()))
