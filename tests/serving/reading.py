"""A process that reads versions while they are written: scores the same samples with each one that it sees.

    python -m tests.serving.reading VERSIONS SAMPLES.npz BATCH END

Writes a line for each version: its number, its train step, and a checksum of the scores. Ends when the file END exists.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from examples.serving import Scorer
from rowcast.serving.model import Model
from rowcast.serving.version_file import read_current

POLL_S = 0.005


def main() -> None:
    folder, samples, end = Path(sys.argv[1]), np.load(sys.argv[2]), Path(sys.argv[4])
    torch.set_num_threads(1)
    while not read_current(folder).number:
        time.sleep(POLL_S)
    model, seen = Model(folder, check="all"), 0
    while not end.exists() or model.version.number != seen:
        model.refresh()
        now = model.now()
        if now.version.number != seen:
            seen = now.version.number
            found = scores(Scorer(now), samples, int(sys.argv[3]))
            sys.stdout.write(f"{seen} {now.version.position.train_step} {checksum(found)}\n")
            sys.stdout.flush()
        time.sleep(POLL_S)


def scores(scorer: Scorer, samples: Any, batch: int) -> Any:
    """In batches of training's size, as other sizes may add in another order."""
    users, items, prices = (samples[name] for name in ("user", "item", "price"))
    parts = [slice(at, at + batch) for at in range(0, len(prices), batch)]
    ids = [{"user": users[at, None].tolist(), "item": items[at, None].tolist()} for at in parts]
    return np.concatenate([scorer.score(prices[at, None], own) for at, own in zip(parts, ids, strict=True)])


def checksum(found: Any) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(found, np.float32).tobytes())


if __name__ == "__main__":
    main()
