"""What a process of a run does before its first step, part by part, in one process: `start.py` runs this file with the
Python of the tree that it measures, which may be an older one. So it imports only what has long been there.

    python benchmarks/start_parts.py trainer|prefetcher JOB.toml

prints the processor time of each part, and how many modules of torch._dynamo and sympy it has imported.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

SPARED = ("torch._dynamo", "sympy")  # what only a compiled model needs


class Parts:
    def __init__(self) -> None:
        self.seconds = {"python": time.process_time()}
        self._spent_s = self.seconds["python"]

    def end(self, name: str) -> None:
        before_s, self._spent_s = self._spent_s, time.process_time()
        self.seconds[name] = self._spent_s - before_s


def trainer(job: Any, parts: Parts) -> None:
    import torch

    parts.end("import torch")
    import_module("rowcast.trainer.run.attempt")
    from rowcast.trainer.kernels.choose import choose_kernels
    from rowcast.trainer.models.job_model import JobModel

    parts.end("other imports")
    torch.set_num_threads(1)
    choose_kernels(torch.device("cpu"), job)
    parts.end("kernels")
    model, num_dense, batch_size = JobModel(job, 13), 13, job.data.batch_size
    parts.end("model")
    rows = [torch.ones(batch_size, table.embedding_dim) for table in job.tables for _ in table.features]
    outputs = model.forward(torch.ones(batch_size, num_dense), rows, {}, training=True)
    torch.autograd.backward(model.loss(outputs, torch.zeros(batch_size)))
    model.step(0)
    parts.end("first pass of the model")


def prefetcher(job: Any, parts: Parts) -> None:
    import_module("rowcast.prefetcher.run.attempt")
    from rowcast.prefetcher.run.warm_up import warm_up

    parts.end("imports")
    warm_up()
    parts.end("warm-up")


def is_spared(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in SPARED)


def main() -> None:
    parts = Parts()
    from rowcast.job.file import load_job

    job = load_job(Path(sys.argv[2]))
    parts.end("job file")
    {"trainer": trainer, "prefetcher": prefetcher}[sys.argv[1]](job, parts)
    sys.stdout.write(json.dumps({"seconds": parts.seconds, "spared": sum(map(is_spared, sys.modules))}) + "\n")


if __name__ == "__main__":
    main()
