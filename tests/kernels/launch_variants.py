"""Which variants of Triton's kernels the check before a run launches, and which its steps: as JSON objects.

`python -m tests.kernels.launch_variants`; nothing is compiled, and no device is needed. A variant is what Triton's own
cache of compiled kernels tells apart.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import torch

from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Kind
from rowcast.trainer.kernels import choose, triton_ops
from rowcast.trainer.models import runner
from tests.kernels.noted_launches import NotedKernels, noted_launches
from tests.support.driver import InProcessRun, Settings
from tests.support.full_capacity import make_job, random_schedule, table

STEPS: tuple[Kind, ...] = ("train", "train", "eval", "train")
BATCH_SIZE = 300  # of tables so small that a row has more look-ups than a chunk
TABLES = [
    table("a", 2, 16, ["a"], "mean"),
    table("b", 3, 33, ["b", "c"]),
    {**table("d", 2, 16, ["d"]), "dtype": "bf16"},
]
BATCHES: dict[str, dict[str, Any]] = {
    "single look-ups": {},
    "weighted single look-ups": {"weighted": True},
    "bags": {"lengths": (0, 3)},
    "weighted bags": {"lengths": (0, 3), "weighted": True},
}
Variants = list[tuple[str, str]]  # kernel, variant


def checked(job: Job) -> Variants:
    found: set[tuple[str, str]] = set()
    difference = choose.difference

    def check(kernels: Any, *others: Any, exact: bool) -> str | None:
        assert kernels is triton_ops
        return difference(NotedKernels(), *others, exact=exact)

    with noted_launches(lambda *launch: found.add(launch)), patch.object(choose, "difference", check):
        assert choose.triton_kernels(torch.device("cpu"), job) is triton_ops
    return sorted(found)


def trained(job: Job, batches: dict[str, Any]) -> Variants:
    found: set[tuple[str, str]] = set()
    slots = tuple(group.num_rows for group in group_specs(job))
    with (
        noted_launches(lambda *launch: found.add(launch)),
        patch.object(runner, "choose_kernels", lambda device, job: NotedKernels()),
    ):
        schedule = random_schedule(job, STEPS, BATCH_SIZE, **batches)
        InProcessRun(job, schedule, Settings(slots=slots, seeded_streams=False)).run()
    return sorted(found)


def main() -> None:
    for optimizer in ROW_OPTIMIZERS:
        model = {"kind": "tests.support.full_capacity:Concatenated"}
        job = make_job(TABLES, optimizer, model, master=optimizer == "adagrad")
        steps = {name: trained(job, batches) for name, batches in BATCHES.items()}
        sys.stdout.write(json.dumps({"optimizer": optimizer, "checked": checked(job), "trained": steps}) + "\n")


if __name__ == "__main__":
    main()
