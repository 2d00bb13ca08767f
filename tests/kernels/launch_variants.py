"""Which variants of Triton's kernels the check before a run launches, and which its training: as JSON objects.

`python -m tests.kernels.launch_variants`; nothing is compiled, and no device is needed. A variant is what Triton's own
cache of compiled kernels tells apart.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.launches import NotedKernels, noted_launches
from rowcast.job.schema import Job
from rowcast.protocol.batch import Kind
from rowcast.trainer.kernels import choose, self_check, triton_ops
from rowcast.trainer.models import runner
from tests.support.driver import InProcessRun, Settings
from tests.support.full_capacity import make_job, random_schedule, table

CPU = torch.device("cpu")
STEPS: tuple[Kind, ...] = ("train", "train", "eval", "train")
BATCH_SIZE = 300  # of tables so small that a row has more look-ups than a chunk
CONCATENATED = {"kind": "tests.support.full_capacity:Concatenated"}


def jobs() -> Iterator[tuple[str, Job, dict[str, Any]]]:
    """A name, a job, and how its batches are made."""
    mixed = [
        table("a", 2, 16, ["a"], "mean"),
        table("b", 3, 33, ["b", "c"]),
        {**table("d", 2, 16, ["d"]), "dtype": "bf16"},
    ]
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
        job = make_job(mixed, optimizer, CONCATENATED, master=optimizer == "adagrad")
        yield f"{optimizer}, single look-ups", job, {}
        yield f"{optimizer}, bags", job, {"lengths": (0, 3)}
        yield f"{optimizer}, weighted bags", job, {"lengths": (0, 3), "weighted": True}
        yield f"{optimizer}, weighted single look-ups", job, {"weighted": True}


def variants_of(job: Job, batches: dict[str, Any]) -> dict[str, list[list[str]]]:
    found: dict[str, set[tuple[str, str]]] = {"checked": set(), "trained": set()}
    kernels = NotedKernels()

    def check(own: Any, *rest: Any, exact: bool) -> str | None:
        """What Triton's kernels would compute is what torch does."""
        assert own is triton_ops
        return self_check.difference(kernels, *rest, exact=exact)

    with (
        noted_launches(lambda kernel, variant: found["checked"].add((kernel, variant))),
        patch.object(choose, "difference", check),
    ):
        assert choose.triton_kernels(CPU, job) is triton_ops
    with (
        noted_launches(lambda kernel, variant: found["trained"].add((kernel, variant))),
        patch.object(runner, "choose_kernels", lambda device, job: kernels),
    ):
        schedule = random_schedule(job, STEPS, BATCH_SIZE, **batches)
        InProcessRun(job, schedule, Settings(slots=(2, 3, 2), seeded_streams=False)).run()
    return {when: sorted(map(list, own)) for when, own in found.items()}


def main() -> None:
    for name, job, batches in jobs():
        sys.stdout.write(json.dumps({"job": name, **variants_of(job, batches)}) + "\n")


if __name__ == "__main__":
    main()
