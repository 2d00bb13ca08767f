"""Scores rows with a trained model in plain PyTorch.

    python -m examples.predict --config job.toml --model model.safetensors --data new.csv

prints one probability per line, in the order of the rows, or a list of them with several labels; for a model with its
own `loss`, it prints its `logits`, or what it returns. The job's reader reads the rows, so columns, hashing and missing
values are those of training. The label column must exist; it may be all 0. It loads whole tables, so it is for models
that fit in memory.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.plain_loop import PlainTable
from rowcast.job.file import load_job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.trainer.models.job_model import JobModel


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Scores rows with a model that `prefetcher export` wrote.")
    for name in ("--config", "--model", "--data"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    job = load_job(options.config, (f"data.path={options.data}", "data.eval_fraction=0", "data.shuffle=none"))
    tensors, reader = load_file(options.model), open_reader(job)
    tables = [
        PlainTable(table, job.features.index(table.features[0]), job.optimizer.sparse, tensors) for table in job.tables
    ]
    side = JobModel(job, num_dense=reader.num_dense)
    side.model.load_state_dict({name: tensors[name] for name in side.model.state_dict()})
    for batch in reader.batches("train", epoch=0):
        embeddings = [feature for table in tables for feature in table.forward(batch)]
        outputs = side.forward(torch.tensor(batch.dense), embeddings, training=False)
        scores = torch.sigmoid(outputs) if side.own_loss is None else side.logits(outputs)
        print(*scores.tolist(), sep="\n")


if __name__ == "__main__":
    main()
