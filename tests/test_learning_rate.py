"""Learning rates as a function of the train step: up in a line, down as the job file says."""

import itertools
import math
from typing import Any

import msgspec
import pytest

from rowcast.job.optimizers import LearningRateSchedule, SparseOptimizer, learning_rate
from rowcast.job.schema import DenseOptimizer
from rowcast.runtime.errors import ConfigError
from tests.support.full_capacity import make_job


def rates(num_steps: int, lr: float = 0.8, **schedule: Any) -> list[float]:
    settings = SparseOptimizer(kind="sgd", lr=lr, schedule=msgspec.convert(schedule, LearningRateSchedule))
    return [learning_rate(settings, step) for step in range(num_steps)]


def mlperf(step: int, base: float, warmup: int, start: int, num_decay: int) -> float:
    """As LRPolicyScheduler of MLPerf's DLRM has it, whose `_step_count` is 1 in the first train step."""
    count = step + 1
    if count < warmup:
        return base * (1.0 - (warmup - count) / warmup)
    if start <= count < start + num_decay:
        return max(1e-7, base * ((num_decay - (count - start)) / num_decay) ** 2)
    assert count < start, "its rate behind the decay is another"
    return base


def test_the_warm_up_rises_in_a_line_and_ends_at_lr() -> None:
    assert rates(6, warmup=4) == [0.2, 0.4, 0.6000000000000001, 0.8, 0.8, 0.8]


def test_a_linear_decay_begins_behind_the_warm_up_and_stays_at_the_final_rate() -> None:
    expected = [0.4, 0.8, 0.65, 0.5, 0.35, 0.2, 0.2, 0.2]
    assert rates(8, warmup=2, kind="linear", decay_steps=4, final=0.2) == pytest.approx(expected, abs=1e-15)


def test_a_cosine_decay_is_half_way_down_in_its_middle() -> None:
    found = rates(12, kind="cosine", decay_start=2, decay_steps=8, final=0.2)
    assert found[:2] == [0.8, 0.8]
    assert found[3] == pytest.approx(0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[5] == pytest.approx(0.5)
    assert found[9:] == [0.2] * 3


def test_a_polynomial_decay_of_power_two_is_mlperfs() -> None:
    terms = {"warmup": 30, "decay_start": 50, "decay_steps": 40}
    found = rates(89, lr=24.0, kind="polynomial", **terms)
    assert found == pytest.approx([mlperf(step, 24.0, 30, 50, 40) for step in range(89)], rel=1e-12)
    assert found[20] < found[29] == found[49] == 24.0
    assert found[88] < 0.02


def test_the_rate_never_jumps_and_never_leaves_its_bounds() -> None:
    for kind in ("linear", "cosine", "polynomial"):
        found = rates(400, lr=1.0, warmup=100, kind=kind, decay_start=150, decay_steps=200, final=0.1)
        assert max(found) == 1.0
        assert found[0] == 0.01
        assert found[-1] == 0.1
        assert max(abs(after - before) for before, after in itertools.pairwise(found)) <= 0.0101


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ({"warmup": -1}, "warmup = -1 must be a whole number from 0"),
        ({"final": 0.1}, "decay_start, decay_steps and final belong to a decay"),
        ({"decay_steps": 5}, "decay_start, decay_steps and final belong to a decay"),
        ({"kind": "linear"}, 'kind = "linear" needs decay_steps = N'),
        ({"kind": "cosine", "decay_steps": 0}, "decay_steps = 0 must be a whole number from 1"),
        (
            {"kind": "linear", "decay_steps": 9, "warmup": 5, "decay_start": 4},
            "decay_start = 4 is within the warm-up of 5 train steps",
        ),
        ({"kind": "polynomial", "decay_steps": 9, "power": 0.0}, "power = 0.0 must be a finite number above 0"),
        ({"kind": "linear", "decay_steps": 9, "power": 3.0}, 'power belongs to kind = "polynomial"'),
        ({"kind": "linear", "decay_steps": 9, "final": 0.2}, "schedule.final = 0.2 must be from 0 to lr = 0.1"),
        (
            {"kind": "linear", "decay_steps": 9, "final": float("nan")},
            "schedule.final = nan must be a finite number",
        ),
        ({"kind": "step"}, 'kind = "step" must be "constant", "cosine", "linear" or "polynomial"'),
    ],
)
def test_an_impossible_schedule_is_refused_with_its_section(schedule: dict[str, Any], sentence: str) -> None:
    tables = [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["f"]}]
    with pytest.raises(ConfigError, match=r"optimizer\.dense") as refused:
        make_job(tables, dense={"kind": "sgd", "lr": 0.1, "schedule": schedule})
    assert sentence in str(refused.value)


@pytest.mark.parametrize("settings", [SparseOptimizer, DenseOptimizer])
def test_both_sides_have_a_schedule(settings: type[SparseOptimizer] | type[DenseOptimizer]) -> None:
    warm = settings(kind="adagrad", lr=1.0, schedule=LearningRateSchedule(warmup=10))
    assert learning_rate(warm, 0) == 0.1
