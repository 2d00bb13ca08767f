"""What does it take to train a table of a released model that no memory holds? `python -m benchmarks.released FOLDER`.

Makes sparse safetensors files in FOLDER, 64 pieces of zeros in bfloat16, and trains the table by AdamW without decay. A
step has tokens of the text of Python's library, with the hashes of 16 contexts each. Prints, for
each process, the peak of its own memory (RssAnon: without pages of files, which the kernel drops), beside torch and the
cache; the bytes of an overlay over those of its rows; and the distinct pages of the rows that were looked up. `--run`
gives the pages that a start or restart reads from the disk, over those that hold its rows; 6,250,000 rows take
2 GB.
`--price sparse` and `--price adamw` train a table that fits, adopted and as it is, in pairs of processes: processor
time of a step, of the script and its prefetcher, with SparseAdam and with AdamW without decay.
"""

import argparse
import os
import statistics
import subprocess
import sys
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
from benchmarks.adopt_price import children
from benchmarks.adopt_price import processor_s as used_s
from rowcast.prefetcher.checkpoints.overlay import write_overlay
from rowcast.protocol.released_rows import find_released
from rowcast.runtime.tensor_file import TensorSpec, make_header

CONTEXTS, PIECES, NAME = 16, 64, "memory.weight"
WARM_STEPS, PRICED_STEPS = 12, 40  # of --price; the first are not measured


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
                file.seek(len(header))
                bits = np.random.default_rng(piece).integers(0, 2**16, spec.nbytes // 2, np.uint16)
                bits &= 0xBFFF  # less than 2
                file.write(bits.data)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pages_in_memory(folder: Path) -> int:
    """Counts the pages of the pieces that the kernel holds, with fincore of util-linux."""
    command = ["fincore", "--noheadings", "--output", "PAGES", *map(str, folder.glob("*.safetensors"))]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def bytes_read(pid: int) -> int:
    """What a process has had from the disk."""
    return int(Path(f"/proc/{pid}/io").read_text().split("read_bytes: ")[1].split()[0])


def batches(rows: int, steps: int, tokens: int, seed: int, *, is_random: bool = False) -> Iterator[Tensor]:
    """i64 [tokens, CONTEXTS]: hashes of the last 1 to CONTEXTS bytes, or numbers at random."""
    for step in range(steps if is_random else 0):
        drawn = np.random.default_rng((seed, step)).integers(0, rows, (tokens, CONTEXTS))
        yield torch.from_numpy(drawn)
    if is_random:
        return
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
    def __init__(self, rows: int, dim: int, *, device: str = "meta", is_sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.top = nn.Embedding(rows, dim, device=device, sparse=is_sparse), nn.Linear(dim, 1)

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


def processor_s(folder: Path, rows: int, dim: int, tokens: int, rule: str, *, is_adopted: bool) -> float:
    """Processor time of a step in seconds, of the script and its prefetcher."""
    torch.set_num_threads(1)
    model = Model(rows, dim, device="meta" if is_adopted else "cpu", is_sparse=rule == "sparse")
    if is_adopted:
        rowcast.adopt(model, capacity=f"{rows // 3} rows", files={NAME: folder / "released"})
    else:
        nn.init.zeros_(model.memory.weight)
    kind: Any = torch.optim.SparseAdam if rule == "sparse" else torch.optim.AdamW
    rules = [kind([model.memory.weight], **({} if rule == "sparse" else {"weight_decay": 0.0}))]
    rules.append(torch.optim.AdamW(model.top.parameters()))
    given = batches(rows, WARM_STEPS + PRICED_STEPS, tokens, 0)
    begun_s = 0.0
    for step, ids in enumerate(rowcast.ahead(given) if is_adopted else given):
        if step == WARM_STEPS:
            begun_s = time.process_time() + sum(map(used_s, children()))
        for own in rules:
            own.zero_grad()
        nn.functional.mse_loss(model(ids), ids[:, :1] / rows).backward()  # type: ignore[no-untyped-call]
        for own in rules:
            own.step()
    return (time.process_time() + sum(map(used_s, children())) - begun_s) / PRICED_STEPS


def price(folder: Path, rows: int, dim: int, tokens: int, rule: str, pairs: int) -> None:
    release(folder / "released", rows, dim, is_on_disk=False)
    command = [sys.executable, "-m", "benchmarks.released", str(folder), "--price", rule, "--tokens", str(tokens)]
    command += ["--rows", str(rows), "--dim", str(dim), "--only"]
    found = []
    for _ in range(pairs):
        ran = (
            subprocess.run([*command, own], capture_output=True, text=True, check=True) for own in ("plain", "adopted")
        )
        found.append([float(own.stdout) for own in ran])
        print(f"{rule}: {found[-1][0]:.4f} s a step as it is, {found[-1][1]:.4f} s adopted", flush=True)
    ratios = [adopted / plain for plain, adopted in found]
    print(
        f"{rule}: processor time {statistics.median(ratios):.2f} of {', '.join(f'{own:.2f}' for own in sorted(ratios))}"
    )


def main(
    folder: Path,
    rows: int,
    dim: int,
    steps: int,
    tokens: int,
    capacity: int,
    memory: str,
    run: Path | None,
    is_random: bool,
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
    for step, ids in enumerate(rowcast.ahead(batches(rows, steps, tokens, done, is_random=is_random))):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(ids), ids[:, :1] / rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(torch.unique(ids))
        if step % 10 == 1:
            look()
    look()
    seconds, looked_up = time.perf_counter() - begun_s, torch.unique(torch.cat(seen))
    print(f"{steps} steps in {seconds:.0f} s; {len(looked_up):,} of {rows:,} rows were looked up")
    saved = torch.cat([ids.flatten() for ids in batches(rows, done, tokens, 0, is_random=is_random)] or [looked_up[:0]])
    new = looked_up[~torch.isin(looked_up, saved)]
    needed = pages_of(new, folder / "released", rows, dim)
    print(f"{len(new):,} of them are in no save; they lie on {needed:,} distinct pages of 4 KiB")
    if run is not None:
        read = pages_in_memory(folder / "released")
        print(f"{read:,} pages of the files were read, {read / needed:.3f} of those")
        print(f"the prefetcher and the script have had {sum(map(bytes_read, MOST_SEEN)):,} bytes from the disk")
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
    parser.add_argument("--random", dest="is_random", action="store_true", help="look up rows at random, not of text")
    parser.add_argument("--price", choices=("sparse", "adamw"), help="processor time over the script as it is")
    parser.add_argument("--pairs", type=int, default=3, help="of --price")
    parser.add_argument("--only", choices=("plain", "adopted"), help="one run of --price, in this process")
    given = vars(parser.parse_args())
    rule, pairs, only = (given.pop(name) for name in ("price", "pairs", "only"))
    sizes = {name: given[name] for name in ("folder", "rows", "dim", "tokens")}
    if only:
        print(processor_s(**sizes, rule=rule, is_adopted=only == "adopted"))
    elif rule:
        price(**sizes, rule=rule, pairs=pairs)
    else:
        main(**given)
