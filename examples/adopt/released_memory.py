"""Trains the memory of a released language model, whose table no process holds as a whole, on other text.

    python -m examples.adopt.released_memory --text FOLDER --released MODEL --train all      # makes a small model first
    python -m examples.adopt.released_memory --text OTHER --released MODEL --train memory
    rowcast overlay runs/released_memory --out overlay.safetensors
    rowcast overlay overlay.safetensors --apply MODEL --out NEW

The model is that of `ngram_lm.py`; its memory is released in bfloat16. `--train memory` reads rows from the files when
a step needs them, trains them in float32 beside the frozen backbone, and saves what changed. `--train head` trains the
last layer instead, `--train nothing` evaluates.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rowcast
from examples.adopt.ngram_lm import Model, evaluated, windows

TABLE, FILES = "memory.weight", ("memory.safetensors", "model.safetensors")


def release(model: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors = model.state_dict()
    save_file({TABLE: tensors.pop(TABLE).bfloat16()}, folder / FILES[0])
    save_file(tensors, folder / FILES[1])


def opened(folder: Path, rows: int, capacity: str) -> Model:
    """The released model, frozen."""
    with torch.device("meta"):
        model = Model(rows, None)
    rowcast.adopt(model, capacity, files={TABLE: folder})
    model.load_state_dict(load_file(folder / FILES[1]), assign=True)
    return model.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the memory of a released language model.")
    parser.add_argument("--text", type=Path, required=True, help="a folder of text files")
    parser.add_argument("--released", type=Path, required=True, help="the folder of the released model")
    parser.add_argument("--train", choices=["all", "memory", "head", "nothing"], default="memory")
    for name, value in {"rows": 1_000_000, "steps": 400, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--capacity", default="64MiB", help="what the device has for tables")
    parser.add_argument("--run", type=Path, default=Path("runs/released_memory"), help="where changed rows are saved")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    is_new = options.train == "all"
    model = Model(options.rows, None) if is_new else opened(options.released, options.rows, options.capacity)
    trained = {"all": model, "memory": model.memory, "head": model.out, "nothing": nn.Module()}[options.train]
    parameters = [*trained.requires_grad_().parameters()]
    memory = [parameter for parameter in parameters if parameter is model.memory.weight]
    others = [parameter for parameter in parameters if parameter is not model.memory.weight]
    groups: list[Any] = [{"params": memory, "lr": 5e-3, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    steps = 0 if options.train == "nothing" else options.steps
    for batch in rowcast.ahead(windows(options.text, "train", options.rows, steps, options.seed)):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluated(model, options)
    if is_new:
        release(model, options.released)
    elif options.train == "memory":
        rowcast.save(options.run, model, optimizer, step=steps)


if __name__ == "__main__":
    main()
