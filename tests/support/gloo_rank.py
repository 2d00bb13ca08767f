"""One rank of several, started by torchrun: a pair of prefetcher and trainer in one thread, over torch.distributed.

    torchrun --nproc-per-node 3 -m tests.support.gloo_rank FOLDER

writes what the rank ended with to FOLDER/<optimizer>-<rank>.safetensors.
"""

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.trainer.models.torch_collectives import TorchCollectives
from tests.support import driver
from tests.support.batches import Bags, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings, Sharing

CASES: tuple[tuple[str, Bags], ...] = (("adagrad", "weighted"), ("adam", "apart"))


def workload(optimizer: str, bags: Bags) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job(optimizer, bags)
    return job, small_batches(job, bags, num_steps=4, eval_at=(2,))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    driver.QUIET_LIMIT = 10**8  # another process may be slow; the group's timeout ends the wait for it
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = Rank(number=dist.get_rank(), count=dist.get_world_size(), parts=2 * dist.get_world_size())
    for optimizer, bags in CASES:
        job, batches = workload(optimizer, bags)
        settings = Settings(
            slots=slots_for(group_specs(job), batches, "one batch"),
            seed=rank.number,
            seeded_streams=rank.number > 0,  # rank 0 waits for each collective as a trainer on a CPU does
        )
        run = InProcessRun(
            job, batches, settings, sharing=Sharing(rank=rank, collectives=TorchCollectives(rank, timeout_s=60))
        ).run()
        state = run.state() | {"losses": torch.tensor(np.array(run.results.losses, np.float32))}
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in state.items()},
            folder / f"{optimizer}-{rank.number}.safetensors",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
