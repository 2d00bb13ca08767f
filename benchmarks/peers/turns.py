"""A contestant in a benchmark in which processes take turns: it waits for a line, does what the line says, and answers
with one.

    step 7            ->  {"forward": 0.0041, "backward": 0.0068}   seconds of the phases of train step 7
    look_up 7 f.npy   ->  {}                                        f.npy gets the current pooled rows of step 7

Contestants run in different environments, so this file and theirs import numpy, torch and what they measure, but not
the project. They share one folder: `terms.json`, `ids.npy` (i64 [steps, F * B], feature-major) and `gradient.npy` (f32
[F * B, D]).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Seconds = dict[str, float]  # of each phase of a step, in order
DENSE_WIDTH = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What all contestants of a run share."""

    cardinalities: list[int]  # rows of each table
    dim: int
    batch_size: int
    optimizer: str  # sgd | adagrad | rowwise_adagrad
    lr: float
    eps: float
    slots: int  # of a cache; only rowcast has one


class Contestant(Protocol):
    def step(self, step: int) -> Seconds:
        """Train step `step`: look-up, and update by the gradient. Untimed work happens after the clock has stopped."""

    def look_up(self, step: int) -> Tensor:
        """Pooled rows f32 [F * B, D] of step `step`, without training."""


Maker = Callable[[Terms, npt.NDArray[np.int64], Tensor], Contestant]


def initial_rows(table: int, terms: Terms) -> npt.NDArray[np.float32]:
    """A table's first weights, the same in every process."""
    return np.random.default_rng([2, table]).random((terms.cardinalities[table], terms.dim), np.float32) - np.float32(
        0.5
    )


def by_feature(flat: Tensor, terms: Terms) -> tuple[Tensor, ...]:
    """f32 or i64 [F * B, ...] as one view [B, ...] per feature."""
    return flat.view(len(terms.cardinalities), terms.batch_size, *flat.shape[1:]).unbind(0)


class Clock:
    def __init__(self) -> None:
        self.seconds: Seconds = {}
        self._began_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        self.seconds[phase] = time.perf_counter() - self._began_s
        self._began_s = time.perf_counter()


def take_turns(make: Maker) -> None:
    """Serves lines of standard input until it ends. Arguments of the process: the shared folder and the number of
    threads.
    """
    folder, num_threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.ones(1).sqrt()  # the first one computed by several threads may be inaccurate (pytorch#188792)
    torch.set_num_threads(num_threads)
    terms = Terms(**json.loads((folder / "terms.json").read_text()))
    contestant = make(terms, np.load(folder / "ids.npy"), torch.from_numpy(np.load(folder / "gradient.npy")))
    answers = only_answers()
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(contestant, *line.split())), file=answers, flush=True)


def only_answers() -> Any:
    """Standard output for answers; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(contestant: Contestant, what: str, step: str, path: str = "") -> Seconds:
    if what == "step":
        dense_work()
        return contestant.step(int(step))
    np.save(path, contestant.look_up(int(step)).numpy())
    return {}


def dense_work() -> None:
    """A few milliseconds of matrix products, as a model has between two steps of its embeddings: wakes threads and
    clocks.
    """
    square = torch.ones(DENSE_WIDTH, DENSE_WIDTH)
    for _ in range(4):
        torch.mm(square, square)
