"""Computes the learning rate of a train step only from the job file and the step, so a restart cannot change it.

    lr             ._____________.
                 . |             | .
    lr / warmup .  |             |    . . ________________ final
                1  warmup        decay_start  + decay_steps

Train steps are counted from 1 here, so that the first one has a learning rate above 0. With kind = "polynomial" and
power 2 this is the schedule of MLPerf's DLRM.
"""

import math
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from rowcast.job.section import Section

Steps = Annotated[int, Meta(ge=0, le=2**53 - 1)]  # floats count exactly up to there
Rate = Annotated[float, Meta(ge=0)]


class LearningRateSchedule(Section, frozen=True, kw_only=True):
    """How the learning rate changes over the run: it rises linearly to `lr`, then falls to `final` as `kind` says."""

    warmup: Steps = 0  # train steps of the rise: the first uses lr / warmup, the last uses lr
    kind: Literal["constant", "linear", "cosine", "polynomial"] = "constant"  # the shape of the decay; `constant`: none
    decay_start: Steps | None = None  # train steps before the decay; `warmup` by default
    decay_steps: Annotated[int, Meta(ge=1, le=2**53 - 1)] | None = None  # train steps that the decay takes
    power: Annotated[float, Meta(gt=0)] = 2.0  # polynomial: the exponent of the remaining fraction of the decay
    final: Rate = 0.0  # the learning rate after the decay

    def check(self) -> None:
        if self.kind == "constant" and (self.decay_start is not None or self.decay_steps is not None or self.final):
            raise ValueError(
                'decay_start, decay_steps and final belong to a decay; set kind = "linear", "cosine" or "polynomial"'
            )
        if self.kind != "constant" and self.decay_steps is None:
            raise ValueError(f'kind = "{self.kind}" needs decay_steps = N, the train steps that the decay takes')
        if self.decay_begin < self.warmup:
            raise ValueError(
                f"decay_start = {self.decay_start} is within the warm-up of {self.warmup} train steps; start after it"
            )
        if self.kind != "polynomial" and self.power != 2.0:
            raise ValueError(f'power belongs to kind = "polynomial", not {self.kind!r}')

    @property
    def decay_begin(self) -> int:
        return self.warmup if self.decay_start is None else self.decay_start


class HasLearningRate(Protocol):
    @property
    def lr(self) -> float: ...

    @property
    def schedule(self) -> LearningRateSchedule: ...


def check_learning_rate(settings: HasLearningRate) -> None:
    if settings.schedule.final > settings.lr:
        raise ValueError(
            f"schedule.final = {settings.schedule.final} must be from 0 to lr = {settings.lr}: a learning rate decays"
        )


def learning_rate(settings: HasLearningRate, train_step: int) -> float:
    """`train_step` counts the training batches before this one, over the whole run."""
    lr, schedule, number = settings.lr, settings.schedule, train_step + 1
    if number < schedule.warmup:
        return lr * number / schedule.warmup
    if schedule.decay_steps is None or number <= schedule.decay_begin:
        return lr
    done = (number - schedule.decay_begin) / schedule.decay_steps
    return schedule.final if done >= 1 else schedule.final + (lr - schedule.final) * remaining_share(schedule, done)


def remaining_share(schedule: LearningRateSchedule, done: float) -> float:
    """Returns the remaining fraction of the decay, from 1 to 0, after the fraction `done` of its steps, from 0 to 1."""
    match schedule.kind:
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "polynomial":
            return math.pow(1 - done, schedule.power)
        case _:
            return 1 - done
