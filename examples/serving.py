"""Answers requests with the newest published version: raw ids -> rows -> the job's own model -> scores.

python -m examples.serving served < requests.jsonl         a line: {"dense": [[0.5]], "ids": {"user": [["u17"]]}}
"""

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from rowcast.serving import Model
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.sequences import Embedded, Sequences


class Scorer:
    def __init__(self, folder: str) -> None:
        self._model = Model(folder, warm="64MiB")
        self._held = self._hold()

    def _hold(self) -> Any:
        now = self._model.now()
        side = JobModel(now.job, now.version.num_dense, trains=False, needs_labels=False)
        side.model.load_state_dict({name: torch.tensor(value) for name, value in now.dense().items()})
        return now, side

    @torch.no_grad()
    def score(self, dense: Any, ids: dict[str, list[Any]]) -> Any:
        """`dense` f32 [n, num_dense]; for each feature n lists of raw ids. Returns logits f32 [n]."""
        now, side = self._held  # one reference, so one step
        embedded = [self._embedded(now, table, ids[name]) for table in now.job.tables for name in table.features]
        inputs = torch.tensor(np.asarray(dense, np.float32)), embedded
        return side.logits(side.forward(*inputs, {}, training=False)).numpy()

    def _embedded(self, now: Any, table: Any, bags: list[Any]) -> Embedded:
        [name] = table.features
        offsets = np.cumsum([0, *map(len, bags)])
        ids = [own for bag in bags for own in bag]
        if table.pooling == "none":
            return Sequences(values=torch.tensor(now.rows(name, ids)) + 0.0, offsets=torch.tensor(offsets).int())
        return torch.tensor(now.bags(name, ids, offsets))

    def follow(self, every_s: float) -> None:
        """Takes new versions until the process ends. Call it in a thread."""
        while True:
            time.sleep(every_s)
            if self._model.refresh():
                self._held = self._hold()


if __name__ == "__main__":
    scorer = Scorer(sys.argv[1])
    threading.Thread(target=scorer.follow, args=(5.0,), daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(scorer.score(**json.loads(line)).tolist()), flush=True)
