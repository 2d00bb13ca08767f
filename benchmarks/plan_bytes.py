"""Does this checkout send the plans, and end with the bits, of an older one? Digests of both, to compare as text.

Method: small jobs of every kind of bags and the first 40 batches of the demo, in one process, without reading a clock.
Of each job: how many plans, their bytes, a digest of their arrays (name, dtype, shape, place, content), and one of
tables, row state, dense weights and losses.

    python -m benchmarks.plan_bytes
    git archive COMMIT | tar x -C OLD && cp benchmarks/plan_bytes.py OLD/benchmarks
    cd OLD && PYTHONPATH=. python -m benchmarks.plan_bytes
"""

import hashlib
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol import plan
from rowcast.protocol.plan import step_block
from tests.support.batches import BAGS, OPTIMIZERS, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
DEMO_SLOTS = 60_000


def main() -> None:
    torch.set_num_threads(1)
    for bags in BAGS:
        for optimizer in OPTIMIZERS:
            job = small_job(optimizer, bags)
            batches = small_batches(job, bags)
            report(f"{bags}, {optimizer}", job, batches, slots_for(group_specs(job), batches, "more"))
    demo = load_job(DEMO)
    slots = tuple(min(group.num_rows, DEMO_SLOTS) for group in group_specs(demo))
    report("demo", demo, list(itertools.islice(schedule(demo, open_reader(demo)), 40)), slots)


def report(name: str, job: Job, batches: Any, slots: tuple[int, ...]) -> None:
    plans, ended, sizes = hashlib.sha256(), hashlib.sha256(), list[int]()

    def noted(*given: Any) -> Any:
        block = step_block(*given)
        content = np.zeros(block.nbytes, np.uint8)
        block.write(0, content)
        plans.update(repr([(spec.name, spec.dtype, spec.shape, spec.offset) for spec in block.specs]).encode())
        plans.update(content.tobytes())
        sizes.append(block.nbytes)
        return block

    with patch.object(plan, "step_block", noted):
        run = InProcessRun(job, batches, Settings(slots=slots)).run()
    for tensor_name, tensor in sorted(run.state().items()):
        ended.update(tensor_name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    ended.update(np.array(run.results.losses, np.float32).tobytes())
    print(
        f"{name}: {len(sizes)} plans, {sum(sizes)} bytes, {plans.hexdigest()[:16]}; ends with {ended.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
