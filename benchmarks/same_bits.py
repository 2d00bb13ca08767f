"""Does one seed give one model, whatever the number of trainers? Trains each job file three times on 1, 2 and 4.

Method: each run is new and has the same `ranks.parts`; its export (rows, row states, dense weights) is hashed, tensor
by tensor in the order of their names. Prints one sha256 a run; exits with 1 if a job has more than one.

    python -m benchmarks.same_bits examples/hstu.toml benchmarks/jobs/dlrm.toml --steps 40
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.commands import command


def trained(config: Path, settings: list[str], steps: int, ranks: int, parts: int) -> str:
    """Returns the sha256 of all that a new run of these trainers has trained."""
    with tempfile.TemporaryDirectory() as folder:
        run, out = f"{folder}/run", f"{folder}/model.safetensors"
        values = [f'job.run_dir="{run}"', f"ranks.count={ranks}", f"ranks.parts={parts}", *settings]
        options = [f"--set={value}" for value in values]
        command("rowcast.deploy.local", "--config", str(config), "--max-steps", str(steps), "--fresh", *options)
        command("rowcast.prefetcher", "export", "--run", run, "--out", out)
        digest = hashlib.sha256()
        for name, values_of in sorted(load_file(out).items()):
            digest.update(f"{name} {values_of.dtype} {values_of.shape}".encode() + values_of.tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="of each job with each number of trainers")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for rowcast train")
    options = parser.parse_args()
    print("| job | trainers | run | sha256 |\n|---|---|---|---|", flush=True)
    differs = False
    for config in options.configs:
        digests = set()
        for ranks in options.ranks:
            for run in range(options.runs):
                digest = trained(config, options.set, options.steps, ranks, options.parts)
                print(f"| {config.stem} | {ranks} | {run + 1} | {digest} |", flush=True)
                digests.add(digest)
        print(f"{config.stem}: {len(digests)} different in {len(options.ranks) * options.runs} runs", flush=True)
        differs |= len(digests) > 1
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
