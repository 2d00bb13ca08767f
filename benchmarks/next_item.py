"""How good is a next-item model next to rules that need no training?

    python -m benchmarks.next_item --config examples/sasrec.toml --counts data/next-item/counts.npy

Ranks each positive of data.eval_path among the candidates that an evaluation of the job draws for it, by two rules:

    most popular       an item's count in the training windows
    last item again    1 for the newest item of the history, 0 for all others

Prints HR@k, NDCG@k and MRR@k for each k of eval.ranks. Ties count against a rule, as they do against a model.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from rowcast.job.file import load_job
from rowcast.job.models import NextItemSettings
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.trainer.models.ranking import RANK_BINS, count_ranks, ranking_figures, ranks_among


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    options = parser.parse_args()
    job = load_job(options.config)
    assert isinstance(job.model, NextItemSettings), "the model has next items"
    settings, data = job.model, job.data
    counts = np.zeros(max(table.num_embeddings for table in job.tables), np.int64)
    found = np.load(options.counts)
    counts[: len(found)] = found
    windows = pq.read_table(data.eval_path).to_pydict()
    last = np.array([history[-1] for history in windows[settings.history_feature]])
    bins = {rule: torch.zeros(RANK_BINS, dtype=torch.int64) for rule in ("most popular", "last item again")}
    for number, batch in enumerate(open_reader(job).batches("eval", 0)):
        positives = batch.inputs[f"{settings.positive_feature}.id"]
        candidates = batch.inputs[f"{settings.candidate_feature}.id"]
        of_batch = last[number * data.batch_size :][: batch.size, None]
        shape = (batch.size, len(candidates))
        scores = {
            "most popular": (counts[positives], np.broadcast_to(counts[candidates], shape)),
            "last item again": ((positives == of_batch[:, 0]).astype(int), (candidates == of_batch).astype(int)),
        }
        same = torch.from_numpy(candidates == positives[:, None])
        for rule, (own, others) in scores.items():
            count_ranks(bins[rule], ranks_among(torch.tensor(own), torch.tensor(others), same))
    for rule, own in bins.items():
        figures = ranking_figures(own.tolist(), job.eval.ranks)
        print(f"{rule:16}", *(f"{name.upper()} {value:.4f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
