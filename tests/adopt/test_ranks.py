"""`sum_gradients` on one rank, without a group, and for weights that are unfrozen later."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rowcast
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.gradient_sum import add_dense
from rowcast.trainer.adopt.ranks import GroupCollectives
from rowcast.trainer.device.cuda import adopted_streams
from rowcast.trainer.models.exchanges import Complete, Exchanges, LocalCollectives


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
    collectives._begun.append((Complete(), "the counts of an evaluation"))
    assert not collectives.leaves_work
