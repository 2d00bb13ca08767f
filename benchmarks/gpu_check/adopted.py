"""A stock script on this device, as it is and with `rowcast.adopt`: losses, weights and states at its end are equal.

The script runs as it is twice. Where torch itself gives other bits the second time, `is_repeatable` is false, and the
adopted script cannot be held to them.

python -m benchmarks.gpu_check.adopted --device cuda --rule "dense Adam"
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import DataLoader, TensorDataset

import rowcast
from benchmarks.gpu_check.differences import state_difference
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import threads_of

ROWS, BAG_ROWS, DIM = 2000, 1000, 16
CAPACITY = "1000 rows"  # a third
BATCHES, BATCH, IDS, EPOCHS = 20, 64, 4, 2
CORES_A_RUN = 2
GUESS_S = 15.0
Rule = Callable[[Iterable[nn.Parameter]], optim.Optimizer]
DENSE: dict[str, Rule] = {
    "dense Adam": partial(optim.Adam, lr=0.01),
    "dense AdamW": partial(optim.AdamW, lr=0.01),
    "SGD with momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
}
SPARSE: dict[str, Rule] = {
    "sparse SparseAdam": partial(optim.SparseAdam, lr=0.01),
    "sparse SGD": partial(optim.SGD, lr=0.05),
}


class Model(nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, sparse=is_sparse)
        self.bags = nn.EmbeddingBag(BAG_ROWS, DIM, mode="sum", sparse=is_sparse)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, items: Tensor, bags: Tensor) -> Tensor:
        logits: Tensor = self.top(torch.cat([self.items(items), self.bags(bags)], 1))
        return logits.squeeze(1)


def train(device: torch.device, rule: str, capacity: str = "") -> dict[str, Tensor]:
    """Returns the weights, what the optimizers keep, and the losses. `capacity`: of `adopt`; without it, none."""
    torch.manual_seed(0)
    model = Model(is_sparse=rule in SPARSE).to(device)
    if capacity:
        rowcast.adopt(model, capacity)
    tables = [*model.items.parameters(), *model.bags.parameters()]
    optimizers = (
        [SPARSE[rule](tables), optim.Adam(model.top.parameters(), lr=0.01)]
        if rule in SPARSE
        else [DENSE[rule](model.parameters())]
    )
    chosen = torch.Generator().manual_seed(1)
    items = (torch.rand(BATCHES * BATCH, generator=chosen) ** 3 * ROWS).long()
    bags = (torch.rand(BATCHES * BATCH, IDS, generator=chosen) ** 3 * BAG_ROWS).long()
    loader = DataLoader(TensorDataset(items, bags, (items % 2).float()), BATCH, pin_memory=device.type == "cuda")
    losses = []
    for _ in range(EPOCHS):
        for one, several, labels in loader:
            logits = model(one.to(device, non_blocking=True), several.to(device, non_blocking=True))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device, non_blocking=True))
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
    ended: dict[str, Any] = {"model": model.state_dict(), **{f"{i}": o.state_dict() for i, o in enumerate(optimizers)}}
    leaves = {"".join(map(str, path)): leaf for path, leaf in tree_flatten_with_path(ended)[0]}
    found = {name: leaf.cpu().clone() for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return {"losses": torch.stack(losses).cpu(), **found}


def compared(device: torch.device, rule: str) -> dict[str, Any]:
    expected, again = train(device, rule), train(device, rule)
    began_s = time.perf_counter()
    adopted = train(device, rule, CAPACITY)
    took_s = time.perf_counter() - began_s
    is_repeatable = not state_difference(again, expected)
    differs = state_difference(adopted, expected)
    passed = not differs or not is_repeatable
    return {"is_repeatable": is_repeatable, "adopted_s": took_s, "differs": differs, "passed": passed}


def check_adopted(findings: Findings, device: torch.device) -> None:
    def compare(rule: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.gpu_check.adopted", f"--device={device}", f"--rule={rule}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the script ended with code {done.returncode}: {done.stderr.strip()[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        is_moving = "rows stay on the device" in done.stderr
        return {**found, "said": done.stderr.splitlines()[-5:], "passed": found["passed"] and is_moving}

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // CORES_A_RUN)) as pool:
        rules = (*DENSE, *SPARSE)
        for done in [pool.submit(findings.item, rule, partial(compare, rule), "", GUESS_S) for rule in rules]:
            done.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--rule", choices=(*DENSE, *SPARSE), required=True)
    options = parser.parse_args()
    torch.set_num_threads(threads_of(options.device))
    print(json.dumps(compared(options.device, options.rule)))
