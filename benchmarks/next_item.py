"""How good is a next-item model next to rules that need no training?

    python -m benchmarks.next_item --config examples/sasrec.toml --counts data/next-item/counts.npy

Ranks each positive of data.eval_path among the candidates that an evaluation of the job draws for it, by two rules:

    most popular       an item's count in the training windows
    last item again    1 for the newest item of the history, 0 for all others
    as a day ago       1 for the item that followed the one nearest to a day before the newest, 0 for all others; only
                       if the windows have times

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


def as_a_day_ago(history: list[int], times: list[int]) -> int:
    """Returns -1 if nothing followed."""
    apart = [abs(times[-1] - 86_400 - time) for time in times]
    return [*history[1:], -1][apart.index(min(apart))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for rowcast train")
    options = parser.parse_args()
    job = load_job(options.config, tuple(options.set))
    assert isinstance(job.model, NextItemSettings), "the model has next items"
    settings, data = job.model, job.data
    counts = np.zeros(max(table.num_embeddings for table in job.tables), np.int64)
    found = np.load(options.counts)
    counts[: len(found)] = found
    windows = pq.read_table(data.eval_path).to_pydict()
    histories = windows[settings.history_feature]
    guesses = {"last item again": np.array([history[-1] for history in histories])}
    if settings.time in windows:
        guesses["as a day ago"] = np.array([*map(as_a_day_ago, histories, windows[settings.time])])
    bins = {rule: torch.zeros(RANK_BINS, dtype=torch.int64) for rule in ("most popular", *guesses)}
    for number, batch in enumerate(open_reader(job).batches("eval", 0)):
        positives = batch.inputs[f"{settings.positive_feature}.id"]
        candidates = batch.inputs[f"{settings.candidate_feature}.id"]
        shape = (batch.size, len(candidates))
        scores = {"most popular": (counts[positives], np.broadcast_to(counts[candidates], shape))}
        for rule, of_all in guesses.items():
            of_batch = of_all[number * data.batch_size :][: batch.size]
            scores[rule] = (positives == of_batch).astype(int), (candidates == of_batch[:, None]).astype(int)
        same = torch.from_numpy(candidates == positives[:, None])
        for rule, (own, others) in scores.items():
            count_ranks(bins[rule], ranks_among(torch.tensor(own), torch.tensor(others), same))
    for rule, own in bins.items():
        figures = ranking_figures(own.tolist(), job.eval.ranks)
        print(f"{rule:16}", *(f"{name.upper()} {value:.4f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
