"""How good is a next-item model next to rules that need no training?

    python -m benchmarks.next_item --config examples/sasrec.toml --counts data/next-item/counts.npy

Ranks each positive of data.eval_path by rules, among the candidates that an evaluation of the job draws for it, and
among all items, which are the ids of --counts:

    most popular           an item's count in the training windows
    last item again        1 for the newest item of the history, 0 for all others
    own newest first       items of the history, the newest first; then the most popular
    pairs "a, then b"      how often an item followed the history's newest item in the training windows; then the most
                           popular
    as a day ago           1 for the item that followed the one nearest to a day before the newest, 0 for all others;
                           only if the windows have times

Prints HR@k, NDCG@k and MRR@k for each k of eval.ranks. Ties count against a rule, as they do against a model.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from rowcast.job.file import load_job
from rowcast.job.models import NextItemSettings
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.trainer.models.evaluate import RANK_BINS, count_ranks, ranking_figures, ranks_among

Rule = Callable[[list[int], list[int]], npt.NDArray[np.int64]]  # history and its times -> scores of all rows


def as_a_day_ago(history: list[int], times: list[int]) -> int:
    """Returns -1 if nothing followed."""
    apart = [abs(times[-1] - 86_400 - time) for time in times]
    return [*history[1:], -1][apart.index(min(apart))]


def pair_counts(histories: list[list[int]], positives: list[list[int]], rows: int) -> npt.NDArray[np.int64]:
    """Returns [a, b]: how often item b followed item a. The positives of a window follow its newest items."""
    counts = np.zeros((rows, rows), np.int64)
    for history, following in zip(histories, positives, strict=True):
        np.add.at(counts, (history[len(history) - len(following) :], following), 1)
    return counts


def rules(counts: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64], *, with_times: bool) -> dict[str, Rule]:
    def placed(places: list[int], scores: Any) -> npt.NDArray[np.int64]:
        found = np.zeros_like(counts)
        found[places] = scores  # of equal places the last, so the newest
        return found

    above = 1 + counts.max()  # popularity decides between equal scores only
    own: dict[str, Rule] = {
        "most popular": lambda history, times: counts,
        "last item again": lambda history, times: placed(history[-1:], 1),
        "own newest first": lambda history, times: counts + above * placed(history, 1 + np.arange(len(history))),
        'pairs "a, then b"': lambda history, times: counts + above * pairs[history[-1]],
    }
    if with_times:
        own["as a day ago"] = lambda history, times: placed([n for n in [as_a_day_ago(history, times)] if n >= 0], 1)
    return own


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
    trained, windows = (pq.read_table(path).to_pydict() for path in (data.path, data.eval_path))
    pairs = pair_counts(trained[settings.history_feature], trained[settings.positive_feature], len(counts))
    histories = windows[settings.history_feature]
    times = windows.get(settings.time, histories)
    own_rules = rules(counts, pairs, with_times=settings.time in windows)
    bins = {
        (rule, among): torch.zeros(RANK_BINS, dtype=torch.int64) for rule in own_rules for among in ("drawn", "all")
    }
    items = np.arange(len(found))
    for number, batch in enumerate(open_reader(job).batches("eval", 0)):
        positives = batch.inputs[f"{settings.positive_feature}.id"]
        among = {"drawn": batch.inputs[f"{settings.candidate_feature}.id"], "all": items}
        at = slice(number * data.batch_size, number * data.batch_size + batch.size)
        for rule, score in own_rules.items():
            scores = np.stack([score(*window) for window in zip(histories[at], times[at], strict=True)])
            of_positives = torch.tensor(scores[np.arange(batch.size), positives])
            for name, candidates in among.items():
                same = torch.from_numpy(candidates == positives[:, None])
                count_ranks(bins[rule, name], ranks_among(of_positives, torch.tensor(scores[:, candidates]), same))
    for (rule, name), own in bins.items():
        figures = ranking_figures(own.tolist(), job.eval.ranks)
        print(f"{rule:18} {name:5}", *(f"{name.upper()} {value:.4f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
