"""Ranks of a script, as threads: sums of gradients, dense weights that come apart, and rows of coming batches."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Timer, get_ident
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from torch import Tensor, nn

import rowcast
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import ranks
from rowcast.trainer.adopt.gradient_sum import add_dense
from rowcast.trainer.adopt.ranks import MOST_LISTS, ComingRows, DenseWeights, GroupCollectives
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.models.exchanges import CompletedWork, Exchanges, LocalCollectives


def test_gradients_are_summed_on_one_rank_by_leaving_them_and_on_several_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(2, 1)
    torch.autograd.backward(layer(torch.ones(1, 2)).sum())
    rowcast.sum_gradients(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(
        ConfigError, match=r"no process group to add over; call torch\.distributed\.init_process_group\(\) first"
    ):
        rowcast.sum_gradients(layer)


class OnlyRank:
    """What the sum of dense gradients needs of the ranks."""

    def __init__(self) -> None:
        self.rank, self.train_steps = Rank(number=0, count=1, parts=1), 0
        self.streams = adopted_streams(torch.device("cpu"))
        self.exchanges = Exchanges(LocalCollectives(), lambda lap: None)


def test_weights_that_are_unfrozen_later_are_summed_too() -> None:
    ranks: Any = OnlyRank()
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    for given in (False, True):
        layer.bias.requires_grad_(given)
        layer.zero_grad()
        torch.autograd.backward(layer(torch.ones(1, 2)).sum())
        found = layer.bias.grad
        add_dense(layer, {name: own for name, own in layer.named_parameters() if own.requires_grad}, ranks)
        assert (layer.bias.grad is None) != given
        assert not given or layer.bias.grad is not found, "it came back from the exchange"


def test_a_collective_that_has_ended_is_no_work_left() -> None:
    group: Any = SimpleNamespace(get_group_store=lambda: None)
    collectives = GroupCollectives(Rank(number=0, count=1, parts=1), 1.0, group)
    collectives._begun.append((CompletedWork(), "the counts of an evaluation"))
    assert not collectives.leaves_work


RANKS = 3


class Told:
    """What all ranks tell in one call; each waits for the others."""

    def __init__(self, count: int) -> None:
        self._contents, self._all = [b""] * count, Barrier(count)

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
    of_rank = [DenseWeights(lambda weight, own=layer: weight is own.weight) for layer in layers]  # type: ignore[misc]
    for layer in layers:
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    told = Told(RANKS)

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


Pair = tuple[ComingRows, ComingRows]


def joined() -> Pair:
    told = Told(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [Rank(number=number, count=2, parts=2) for number in range(2)]
        first, second = pool.map(lambda rank: ComingRows(rank, told.of(rank.number)), ranks)
    for each in (first, second):
        each.tables.add("item")
    return first, second


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield joined()
    ranks.JOINED.clear()


def rows_of(ranks: ComingRows, ahead: int) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in ranks.told(ahead)}


def until(ranks: ComingRows, ahead: int) -> dict[str, list[int]]:
    """What has come of a batch, once it has."""
    end_s = time.monotonic() + 10
    while not (rows := rows_of(ranks, ahead)) and time.monotonic() < end_s:
        time.sleep(0.001)
    return rows


def test_a_batch_gets_the_rows_of_the_batch_that_another_rank_trains_with_it(pair: Pair) -> None:
    first, second = pair
    for ahead in range(3):
        second.tell(ahead, {"item": np.array([ahead, 10 + ahead]), "other": np.array([1])})
    assert until(first, 2) == {"item": [2, 12]}
    assert [rows_of(first, ahead) for ahead in (0, 1, 3)] == [{"item": [0, 10]}, {"item": [1, 11]}, {}]
    assert rows_of(second, 0) == {}
    first.num_begun, second.num_begun = 5, 1  # the first rank has begun four batches by itself, such as of a warm-up
    first.compare([5, 1])
    second.compare([5, 1])
    assert [rows_of(first, ahead) for ahead in (0, 1, 2)] == [{"item": [1, 11]}, {"item": [2, 12]}, {}]
    first.tell(0, {"item": np.array([7])})
    second.tell(2, {"item": np.array([8])})
    assert (until(second, 0), until(first, 2)) == ({"item": [7]}, {"item": [8]})


def test_a_rank_that_does_not_listen_keeps_nobody_waiting_and_lists_are_few(pair: Pair) -> None:
    first, second = pair
    for ahead in range(20 * MOST_LISTS):
        second.tell(ahead, {"item": np.arange(1000)})
    assert until(first, 0)
    assert len(first._lists) <= MOST_LISTS
    first.compare([0, MOST_LISTS // 2])
    assert len(first._lists) <= MOST_LISTS // 2


def test_a_rank_waits_for_the_others_when_a_loop_begins_but_not_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    monkeypatch.setattr(ranks, "WAIT_S", 10)
    later = Timer(0.05, second.tell, (2, {"item": np.array([2])}))
    later.start()
    first.await_lists(2)
    assert rows_of(first, 2) == {"item": [2]}
    later.join()
    monkeypatch.setattr(ranks, "WAIT_S", 0.01)
    first.await_lists(3)
    assert rows_of(first, 3) == {}


def test_what_is_no_list_is_dropped(pair: Pair) -> None:
    first, second = pair
    for content in (b"", b"\xc1", b"\x80", bytes(100)):
        second._ways[0].send(content)
    second._ways[0].send(msgspec.msgpack.encode({"rank": 7, "number": 0, "rows": {"item": bytes(8)}}))
    second._ways[0].send(msgspec.msgpack.encode({"rank": 1, "number": 0, "rows": {"item": bytes(12)}}))
    second.tell(1, {"item": np.array([3])})
    assert until(first, 1) == {"item": [3]}
    assert rows_of(first, 0) == {"item": [0]}  # whole numbers alone
    assert {rank for rank, _ in first._lists} == {1}


def test_a_rank_of_another_host_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "boot_id", lambda: str(get_ident()))
    _, second = joined()
    second.tell(0, {"item": np.array([3])})
    with pytest.raises(zmq.Again):  # not even queued
        second._ways[0].send(b"", zmq.NOBLOCK)
    ranks.JOINED.clear()
