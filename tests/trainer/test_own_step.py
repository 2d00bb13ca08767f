"""A model that owns its step: what is refused, and when; what is tried before the first step; what says who trains."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rowcast.analysis.check.data import Seen
from rowcast.analysis.check.machine import Device, ask_trainer, check_model
from rowcast.analysis.check.memory import check_memory
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError, Diverged, Mismatch
from rowcast.trainer.models.job_model import JobModel, OptimizerStep, dense_step
from rowcast.trainer.models.model_state import require_finite
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.report.page import job_sections
from rowcast.trainer.run.rank_group import RankGroup, same_states
from rowcast.trainer.step.engine import learning_rates
from tests.support import jobs
from tests.support.batches import NUM_DENSE, small_job
from tests.support.facts import facts
from tests.support.own_steps import Everything, Notes, without_dense

BOTH = small_job("sgd", model={"kind": "tests.support.own_steps:everything"})
JOB = without_dense(BOTH)
KINDS = ("AdamW", "RMSprop", "StepLR", "OneCycleLR", "AveragedModel", "Notes")


class Odd(nn.Module):
    def __init__(self, make: Callable[["Odd"], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.make, self.steps = make, 0

    def training_objects(self) -> Any:
        return self.make(self)

    def step(self, n: int) -> None:
        self.steps += 1


class Keeper(Notes):
    """Holds one value; restores what `restored` makes of it."""

    def __init__(self, value: Any, restored: Callable[[Any], Any] = lambda value: value) -> None:
        self.value, self.restored = value, restored

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = self.restored(state["value"])


def runner_of(job: Job, *, trains: bool = True) -> StepRunner:
    return StepRunner(job, [torch.zeros(4, own.record_floats) for own in group_specs(job)], NUM_DENSE, trains=trains)


def added(model: Odd) -> list[Any]:
    model.average = nn.Linear(1, 1)
    return []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda model: torch.optim.SGD(model.parameters()), ("SGD", "list")),
        (lambda model: [torch.optim.SGD(model.parameters()), 3], ("int", "state_dict")),
        (lambda model: [torch.optim.SGD([nn.Parameter(torch.zeros(3))])], ("SGD", "no parameter of the model")),
        (added, ("average.bias", "evaluation")),
    ],
)
def test_objects_that_no_run_could_keep_are_refused_at_once(make: Callable[[Odd], Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=facts("Odd.training_objects()", *named)):
        dense_step(JOB, Odd(make), 1, trains=True)


def doubled(value: Any) -> Any:
    return value * 2


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (Keeper(np.random.default_rng(0)), ("Generator",)),
        (Keeper(np.float32(1)), ("float32",)),
        (Keeper({(1, 2): 3}), ("the key (1, 2)",)),
        (Keeper(torch.zeros(2).to_sparse()), ("cannot be saved",)),
        (Keeper(1, doubled), ("load_state_dict",)),
        (Keeper(0, lambda value: 1 / value), ("division",)),
    ],
)
def test_a_state_that_cannot_be_saved_or_restored_is_named_before_the_first_step(
    kept: Keeper, named: tuple[str, ...]
) -> None:
    own = dense_step(JOB, Odd(lambda model: [Notes(), kept]), 1, trains=True)
    with pytest.raises(ConfigError, match=facts("Odd.training_objects()[1]", "Keeper", *named)):
        own.tried()


def test_what_a_user_s_object_raises_later_names_the_object() -> None:
    """Its state has come to hold what no checkpoint can; or other code restores a checkpoint."""
    kept = Keeper(0)
    own = dense_step(JOB, Odd(lambda model: [Notes(), kept]), 1, trains=True)
    saved = own.state()
    kept.value = deque([1])
    with pytest.raises(ConfigError, match=facts("the state of Keeper holds a deque")):
        own.state()
    for wrong in (lambda value: value.missing, lambda value: value["x"], lambda value: 1 / value):
        kept.restored = wrong
        with pytest.raises(Mismatch, match=facts("the checkpoint's Keeper is not this one")):
            own.restore(saved)


def test_an_extra_state_of_the_model_is_a_tensor_that_is_restored() -> None:
    def noted(extra: str) -> StepRunner:
        model = {"kind": "tests.support.own_steps:noted", "options": {"extra": extra}}
        return runner_of(without_dense(small_job("sgd", model=model)))

    assert set(noted("tensor").tried()) == {
        "Noted",
        *(f"Noted.training_objects()[{n}] of type {kind}" for n, kind in enumerate(KINDS)),
    }
    with pytest.raises(ConfigError, match=facts("_extra_state", "dict", "get_extra_state()", "training_objects()")):
        noted("text").tried()
    with pytest.raises(ConfigError, match=facts("Noted", "nothing is restored")):
        noted("lost").tried()


def test_the_dense_weights_are_trained_by_the_model_or_by_the_job_file() -> None:
    with pytest.raises(ConfigError, match=facts("Everything", "[optimizer.dense]", "training_objects()", "both")):
        JobModel(BOTH, NUM_DENSE)
    with pytest.raises(ConfigError, match=facts("SmallModel", "[optimizer.dense]", "training_objects()", "neither")):
        JobModel(without_dense(small_job("sgd")), NUM_DENSE)
    objects_alone = Odd(lambda model: [])
    objects_alone.step = 3  # type: ignore[assignment, method-assign]
    for job in (BOTH, JOB):
        with pytest.raises(ConfigError, match=facts("Odd has training_objects()", "no method step(n)")):
            dense_step(job, objects_alone, 1, trains=True)
    with pytest.raises(ConfigError, match=facts("[optimizer.dense]", "dlrm")):
        jobs.job(optimizer={"dense": None}, model={"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]})


def test_a_model_with_a_step_and_no_objects_is_trained_by_the_job_file() -> None:
    model = Odd(lambda model: [])
    model.training_objects = None  # type: ignore[assignment, method-assign]
    own = dense_step(small_job("sgd"), model, 1, trains=True)
    assert isinstance(own, OptimizerStep)
    own.step(0)
    assert model.steps == 0


def test_what_only_evaluates_makes_no_objects_and_takes_the_weights_of_a_checkpoint() -> None:
    trained = runner_of(JOB)
    evaluates = runner_of(JOB, trains=False)
    assert isinstance(evaluates.model, Everything)
    assert not hasattr(evaluates.model, "optimizers")
    assert evaluates.restore(trained.state()) is False


def test_a_closure_is_refused() -> None:
    model = Odd(lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)])
    [optimizer] = dense_step(JOB, model, 1, trains=True).objects
    optimizer.step()
    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(ConfigError, match=facts("SGD", "closure")):
            call(lambda: torch.zeros(()))


async def coroutine() -> None:
    pass


def test_gradients_are_cleared_and_only_false_counts_as_skipped() -> None:
    model = Odd(lambda model: [])
    own = dense_step(JOB, model, 1, trains=True)
    skipped: list[int] = []
    own.skipped = skipped
    for n, answer in enumerate([None, True, False, torch.tensor(False), np.True_]):
        setattr(model, "step", lambda n, answer=answer: answer)  # noqa: B010
        model.layer(torch.ones(1, 2)).sum().backward()
        own.step(n)
        assert model.layer.weight.grad is None
    assert skipped == [2, 3]
    waiting = coroutine()
    for wrong in (
        1.0,
        torch.zeros(()),
        torch.zeros(2, dtype=torch.bool),
        np.zeros(2),
        "",
        waiting,
        (own for own in ""),
    ):
        setattr(model, "step", lambda n, wrong=wrong: wrong)  # noqa: B010
        with pytest.raises(ConfigError, match=facts("Odd.step(n) returned a", type(wrong).__name__, "return False")):
            own.step(5)
    waiting.close()
    assert skipped == [2, 3]


def test_tensors_of_objects_must_be_finite() -> None:
    kept = Keeper({"mean": torch.zeros(2), "best": float("inf")})
    require_finite([kept], 0)
    kept.value["mean"][0] = torch.nan
    with pytest.raises(Diverged, match=facts("Keeper", "nan", "3 train steps")):
        require_finite([kept], 3)


class Ranks(RankGroup):
    """The other rank answers as it was told to."""

    def __init__(self, other: bytes | None = None) -> None:
        self.other = other

    def gather(self, content: bytes) -> list[bytes]:
        return [content, content if self.other is None else self.other]


def test_a_state_that_differs_between_ranks_and_a_failure_of_one_end_all_by_name() -> None:
    same_states(Ranks(), lambda: {"a": "1", "b": "2"})
    with pytest.raises(ConfigError, match=facts("b", "rank 1", "rank 0")):
        same_states(Ranks(b'{"a": "1", "b": "3"}'), lambda: {"a": "1", "b": "2"})
    with pytest.raises(ConfigError, match=r"^the other's$"):
        same_states(Ranks(b'{"": "the other\'s"}'), dict)

    def fails() -> dict[str, str]:
        raise Diverged("this one's")

    with pytest.raises(ConfigError, match=r"^this one's$"):
        same_states(Ranks(), fails)


def test_page_gauge_and_check_say_who_trains() -> None:
    assert any('dense = "the model\'s own"' in text for text in job_sections(JOB))
    assert set(learning_rates(JOB.optimizer, 0)) == {"sparse"}
    [finding] = check_model(JOB, Device(dense_bytes=8))
    assert "the model's own step" in finding.sentence
    [finding] = check_memory(JOB, Seen(groups=group_specs(JOB)), (), 2**40, 2**20, 0, 2**20)
    assert finding.sentence.endswith("; the model's own optimizer state is unknown and not counted")
    refused = ask_trainer(BOTH, NUM_DENSE).model_refusal
    assert refused is not None
    assert "[optimizer.dense]" in refused
