"""One rank of several that exchange over gloo until they have exchanged `enough` times, or one of them is lost.

    python -m tests.support.waiting_rank FOLDER RANK RANKS TIMEOUT

FOLDER/exchanges-RANK has as many bytes as exchanges were made; FOLDER/signal-RANK is there once a SIGTERM was handled,
FOLDER/enough ends all. Exits like a trainer: with the error's code, its sentence on stderr.
"""

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.process import leave_at_once
from rowcast.trainer.models.torch_collectives import TorchCollectives


def main(folder: Path, number: int, count: int, timeout_s: float) -> None:
    signal.signal(signal.SIGTERM, lambda number_of_signal, frame: (folder / f"signal-{number}").touch())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=10 * timeout_s),
    )
    collectives = TorchCollectives(Rank(number=number, count=count, parts=count), timeout_s, lambda: check(folder))
    with (folder / f"exchanges-{number}").open("ab", buffering=0) as made:
        total = torch.zeros(count)
        while not total.all():
            collectives.doing = "test numbers"
            enough = torch.tensor([float((folder / "enough").exists())])
            collectives.all_gather_into_tensor(total, enough, async_op=True).wait()
            made.write(b".")
            time.sleep(0.01)


def check(folder: Path) -> None:
    if (folder / "failed").exists():
        raise ConfigError("another thread has failed")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    except RowcastError as error:
        sys.stderr.write(f"{error}\n")
        leave_at_once(error.exit_code)
