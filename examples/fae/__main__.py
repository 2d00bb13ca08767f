"""FAE's knob, schedule and baseline on a job's log: python -m examples.fae JOB.toml --budget 0.4 --out runs/fae"""

import argparse
from pathlib import Path

import numpy as np
import torch

from examples.fae.blocks import block_order, write_blocks
from examples.fae.hot import draw_knob, knob_table, popularity
from examples.fae.ways import run
from rowcast.job.file import load_job, with_values
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for rowcast train")
    parser.add_argument("--out", type=Path, default=Path("runs/fae"), help="folder of hot.png and blocks/")
    parser.add_argument("--budget", type=float, default=0.2, help="share of the distinct rows that is hot")
    parser.add_argument("--block", type=int, default=20, help="batches of a block")
    parser.add_argument("--max-steps", type=int, help="train steps of each way")
    options = parser.parse_args()
    job = with_values(load_job(options.config, tuple(options.set)), {"data": {"epochs": 1}})
    rows, record_bytes = popularity(job), max(group.record_bytes for group in group_specs(job))
    budget = round(options.budget * len(rows.keys))
    options.out.mkdir(parents=True, exist_ok=True)
    draw_knob(rows, options.out / "hot.png")
    print(knob_table(rows, record_bytes), f"\n\nThe same as a plot: {options.out / 'hot.png'}\n")
    blocks = write_blocks(job, block_order(rows, budget, job.data.batch_size, options.block), options.out / "blocks")
    print(f'{budget:,} rows are hot. To train hot and cold blocks, add --set data.path="{blocks.data.path}"')
    print("--set data.shuffle=none to `rowcast train`.\n")
    torch.set_num_threads(1)
    print("Far and near memory are both the CPU's here; MB are what moved between them.\n")
    print("| way | order | mean of the last 20 losses | AUC | hot batches | MB to near | MB to far | processor s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    hot, cached = rows.keys[rows.ranks < budget], {"cache": {"capacity": f"{budget} rows"}}
    for order, ordered in (("log", job), ("blocks", blocks)):
        ordered = with_values(ordered, cached)
        batches = list(schedule(ordered, open_reader(ordered), options.max_steps))
        for way in ("cpu", "hybrid", "look-ahead") if order == "blocks" else ("cpu", "look-ahead"):
            trained = run(ordered, batches, hot, way)
            loss, auc = np.mean(trained.losses[-20:]), "" if trained.auc is None else f"{trained.auc:.4f}"
            moved = f"{trained.bytes_near / 1e6:,.0f} | {trained.bytes_far / 1e6:,.0f} | {trained.processor_s:.1f}"
            print(f"| {way} | {order} | {loss:.5f} | {auc} | {trained.hot_batches} | {moved} |", flush=True)


if __name__ == "__main__":
    main()
