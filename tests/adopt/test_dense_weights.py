"""Ranks of a script whose dense weights come apart are refused, with the cause."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.dense_weights import DenseWeights

RANKS = 3


class Told:
    """What all ranks tell in one call; each waits for the others."""

    def __init__(self) -> None:
        self._contents, self._all = [b""] * RANKS, Barrier(RANKS)

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(content: bytes) -> list[bytes]:
            self._contents[rank] = content
            self._all.wait(30)
            told = [*self._contents]
            self._all.wait(30)
            return told

        return gather


def refused(change: Callable[[int, Tensor], object], *, at_the_step: bool) -> list[str]:
    """What each rank is told after a step. `change`: of a rank's weight, at the step or before it."""
    layers = []
    for rank in range(RANKS):
        torch.manual_seed(0)
        layers.append(nn.Linear(3, 2))
        layers[-1].weight.grad = torch.ones(2, 3)
        with torch.no_grad():
            change(rank, layers[-1].weight.grad if at_the_step else layers[-1].weight)
    of_rank = [DenseWeights(lambda weight, own=layer: weight is own.weight, lambda: None) for layer in layers]  # type: ignore[misc]
    for layer in layers:
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    told = Told()

    def compare(rank: int) -> str:
        try:
            of_rank[rank].compare(told.of(rank), 5)
        except ConfigError as error:
            return str(error)
        finally:
            of_rank[rank].close()
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(compare, range(RANKS)))


def test_ranks_that_stay_equal_go_on() -> None:
    assert refused(lambda rank, weight: None, at_the_step=True) == [""] * RANKS


@pytest.mark.parametrize("at_the_step", [True, False])
def test_ranks_that_come_apart_are_all_told_where_and_since_when(at_the_step: bool) -> None:
    apart = "after train step 4 rank 1 has other dense weights than rank 0 (first: weight 0 of SGD, [2, 3])"
    cause = ": each rank has trained" if at_the_step else ", and had before the optimizer's step: make the model from"
    [sentence] = {*refused(lambda rank, weight: weight.add_(0.5 * (rank == 1)), at_the_step=at_the_step)}
    assert sentence.startswith(apart + cause)
