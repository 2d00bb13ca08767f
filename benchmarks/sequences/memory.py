"""How much memory does a ranking among all items take, beside the block that is asked for?

    python -m benchmarks.sequences.memory --config examples/sasrec.toml [--items 1000000] [--memory 64]

Method: an export of random rows is written block by block, and `examples/all_items.py` ranks the job's data.eval_path
among them in this process. The resident memory is read when all modules are imported, also those that Parquet and the
models import at their first use. Its peak is read at the end. Linux only. The export goes to the folder for temporary
files (TMPDIR), takes 4 bytes a weight, and is removed.
"""

import argparse
import json
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas  # noqa: F401  pyarrow imports both when it first reads a file
import pyarrow.dataset  # noqa: F401

from examples import all_items
from rowcast.job.file import load_job
from rowcast.trainer.models import build_model

BLOCK = 2**14  # rows written together


def write_export(path: Path, config: Path, items: int) -> None:
    """Writes a file as `prefetcher export` does, with the job's first dense weights."""
    job = load_job(config)
    width = job.tables[0].embedding_dim
    weights = {name: own.numpy() for name, own in build_model(job, num_dense=0).state_dict().items()}
    header, end = {}, 4 * width * items
    header[f"embedding_bags.{job.tables[0].name}.weight"] = tensor((items, width), 0, end)
    for name, own in weights.items():
        header[name] = tensor(own.shape, end, end + own.nbytes)
        end += own.nbytes
    text, rng = json.dumps(header).encode(), np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for first in range(0, items, BLOCK):
            file.write(rng.standard_normal((min(BLOCK, items - first), width), np.float32).tobytes())
        for own in weights.values():
            file.write(own.tobytes())


def tensor(shape: tuple[int, ...], start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": (start, stop)}


def resident(field: str) -> float:
    """Returns MiB: VmRSS is what the process has now, VmHWM the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--memory", type=int, default=64, help="MiB, as in examples/all_items.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "export.safetensors"
        write_export(export, options.config, options.items)  # imports the model
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = resident("VmRSS")
        sys.argv[1:] = [f"--config={options.config}", f"--export={export}", f"--memory={options.memory}"]
        all_items.main()
    over = resident("VmHWM") - before
    print(f"peak over imports {over:.1f} MiB, less the block of {options.memory} MiB: {over - options.memory:.1f} MiB")


if __name__ == "__main__":
    main()
