"""A training script that owns its loop (`rowcast.connect`), on torch's current stream. With a cache of few rows and of
all rows it must have the same losses, rows and weights.

python -m benchmarks.gpu_check.script --device cuda --capacity 200KB --out end.safetensors
"""

import argparse
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rowcast
from benchmarks.gpu_check.differences import state_difference
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import threads_of
from examples.adopt.own_dataset_adopted import CONFIGS, EPOCHS, LR, Model

CAPACITIES = {"a cache of a seventh of the rows": "200KB", "a cache of all rows": "4MB"}
GUESS_S = 30.0


def train(device: torch.device, capacity: str, out: Path) -> None:
    """Writes the state dict after the last step, and the losses."""
    torch.manual_seed(0)
    torch.set_num_threads(threads_of(device))
    rule = {"kind": "adagrad", "lr": LR}
    embeddings = rowcast.EmbeddingBagCollection(
        CONFIGS, optimizer=rule, capacity=capacity, device=device, run_dir=out.with_suffix(".run")
    )
    model = Model(embeddings).to(embeddings.device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = rowcast.connect(embeddings, "examples.adopt.own_dataset_adopted:open_clicks", epochs=EPOCHS)
    losses = []
    for batch in chain.from_iterable(loader for _ in range(EPOCHS)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch["dense"], batch["sparse"]), batch["labels"])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    save_file({**model.state_dict(), "losses": torch.stack(losses)}, out)


def check_script(findings: Findings, device: torch.device, folder: Path) -> None:
    ends: list[Path] = []

    def run(capacity: str) -> dict[str, Any]:
        out = folder / f"{capacity}.safetensors"
        command = [sys.executable, "-m", "benchmarks.gpu_check.script", f"--device={device}", f"--capacity={capacity}"]
        done = subprocess.run([*command, f"--out={out}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the script ended with code {done.returncode}: {done.stderr.strip()[-1500:]}")
        ends.append(out)
        ours, expected = load_file(out), load_file(ends[0])
        losses, other_losses = ours.pop("losses"), expected.pop("losses")
        differs = state_difference({"losses": losses}, {"losses": other_losses}) | state_difference(ours, expected)
        return {"steps": len(losses), **({"differs": differs} if differs else {}), "passed": not differs}

    for name, capacity in CAPACITIES.items():
        findings.item(name, partial(run, capacity), "", GUESS_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--capacity", required=True)
    parser.add_argument("--out", type=Path, required=True)
    train(**vars(parser.parse_args()))
