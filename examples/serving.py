"""Answers requests with the newest published version: raw ids -> rows -> the job's own model -> logits.

python -m examples.serving served < requests.jsonl         a line: {"dense": [[0.5]], "ids": {"user": [["u17"]]}}

A model of your own, which the version names, is imported only if you name it too: served my.module:build
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rowcast.job.named_code import trusted
from rowcast.serving import Model
from rowcast.trainer.models.embedding import Embedded, Sequences
from rowcast.trainer.models.job_model import JobModel


class Scorer:
    def __init__(self, now: Any, trust: Sequence[str] = ()) -> None:
        """`trust`: code that the version may name for its model. Raises ConfigError for other code."""
        job = trusted(now.job, trust, " ".join, "model.kind")
        self._now, self._side = now, JobModel(job, now.version.num_dense, trains=False, needs_labels=False)
        self._side.model.load_state_dict({name: torch.tensor(value) for name, value in now.dense().items()})

    @torch.no_grad()
    def score(self, dense: Any, ids: dict[str, list[Any]]) -> Any:
        """`dense` f32 [n, num_dense]; for each feature n lists of raw ids. Returns f32 [n]: what `rowcast score` writes
        without --probability, such as logits."""
        embedded = [self._embedded(table, name, ids[name]) for table in self._now.job.tables for name in table.features]
        inputs = torch.tensor(np.asarray(dense, np.float32)), embedded
        return self._side.logits(self._side.forward(*inputs, {}, training=False)).numpy()

    def _embedded(self, table: Any, name: str, bags: list[Any]) -> Embedded:
        ids, offsets = [own for bag in bags for own in bag], np.cumsum([0, *map(len, bags)])
        if table.pooling == "none":
            rows = self._now.taken(self._now.rows(name, ids) + 0.0)
            return Sequences(values=torch.tensor(rows), offsets=torch.tensor(offsets).int())
        return torch.tensor(self._now.bags(name, ids, offsets))


def follow(model: Model, held: list[Scorer], trust: Sequence[str]) -> None:
    while True:
        time.sleep(5)
        if model.refresh():
            held[0] = Scorer(model.now(), trust)


if __name__ == "__main__":
    newest = Model(sys.argv[1], warm="64MiB")
    scorers = [Scorer(newest.now(), sys.argv[2:])]
    threading.Thread(target=follow, args=(newest, scorers, sys.argv[2:]), daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(scorers[0].score(**json.loads(line)).tolist()), flush=True)  # one reference, so one step
