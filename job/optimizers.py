"""Computes the learning rate of a train step only from the job file and the step, so a restart cannot change it.

    lr             ._____________.
                 . |             | .
    lr / warmup .  |             |    . . ________________ final
                1  warmup        decay_start  + decay_steps

Train steps are counted from 1 here, so that the first one has a learning rate above 0. With kind = "polynomial" and
power 2 this is the schedule of MLPerf's DLRM.

Lists the rules of `optimizer.sparse.kind` and their settings, without importing torch.

A new one is a line here and the rule's file; settings of its own are a struct above the line.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from rowcast.job.section import Kinds, Section

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


RULES = "rowcast.trainer.kernels.row_optimizers"
Beta = Annotated[float, Meta(ge=0, lt=1)]
Clip = Annotated[float, Meta(gt=0)]


class SparseOptimizer(Section, frozen=True, kw_only=True):
    """Trains the rows. Momentum and weight decay are refused: they change rows that no batch touches."""

    kind: str  # {kinds}
    lr: Rate  # the learning rate
    eps: float | None = None  # by default 1e-10 for Adagrad and 1e-8 for Adam; above 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # for adam
    initial_accumulator: Annotated[float, Meta(ge=0)] = 0.0  # for adagrad and rowwise_adagrad
    # fp16 and bf16 tables: also keeps fp32 master weights; look-ups read the rounded weights, an update changes the
    # master weights and rounds them again
    master: bool = False
    momentum: float = 0.0  # must be 0
    weight_decay: float = 0.0  # must be 0
    # the largest 2-norm of a row's gradient, summed over the batch; a longer gradient is scaled down to it
    clip_rows: Clip | None = None
    schedule: LearningRateSchedule = LearningRateSchedule()

    def check(self) -> None:
        for name in ("momentum", "weight_decay"):
            if getattr(self, name) != 0:
                raise ValueError(
                    f"{name} on rows is refused: it changes rows that no batch touches, as only rowcast.adopt does; "
                    "remove it, or adopt a script of your own"
                )
        check_learning_rate(self)
        known = ROW_OPTIMIZERS[self.kind]
        if not known.trains_at_zero_lr and self.lr == 0:
            raise ValueError(f'lr = 0 is refused for kind = "{self.kind}"; to freeze rows use kind = "sgd"')
        if known.eps is not None and not self.epsilon > 0:
            raise ValueError(f"eps = {self.eps} must be above 0: with 0, rows that no batch touches would become NaN")

    @property
    def epsilon(self) -> float:
        """`eps` or its default; 0 for an optimizer without one."""
        default = ROW_OPTIMIZERS[self.kind].eps
        return self.eps if self.eps is not None else default or 0.0


@dataclass(frozen=True, slots=True)
class RowState:
    """One fp32 field of a row's record."""

    name: str  # as torch.optim calls it
    per_row: bool = False  # one element for the whole row; otherwise one for each of its weights
    accumulates: bool = False  # starts at optimizer.sparse.initial_accumulator; otherwise at 0
    is_signed: bool = True  # False: a sum or mean of squares, at least 0

    def width(self, dim: int) -> int:
        return 1 if self.per_row else dim


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    module: str  # has `train`, see trainer/kernels/row_optimizers; imported only by the trainer
    states: tuple[RowState, ...] = ()  # in the order of the record
    eps: float | None = None  # the default of optimizer.sparse.eps; None if the rule has no eps
    trains_at_zero_lr: bool = True  # if False, a learning rate of 0 is refused
    settings: type[SparseOptimizer] = SparseOptimizer  # the keys of the section
    note: str = ""  # for docs/job-file.md


ROW_OPTIMIZERS = {
    "sgd": RowOptimizer(f"{RULES}.sgd"),
    "adagrad": RowOptimizer(
        f"{RULES}.adagrad", states=(RowState("sum", accumulates=True, is_signed=False),), eps=1e-10
    ),
    "rowwise_adagrad": RowOptimizer(
        f"{RULES}.rowwise_adagrad",
        states=(RowState("sum", per_row=True, accumulates=True, is_signed=False),),
        eps=1e-10,
        note="one accumulator per row",
    ),
    "adam": RowOptimizer(
        f"{RULES}.adam",
        states=(RowState("exp_avg"), RowState("exp_avg_sq", is_signed=False)),
        eps=1e-8,
        trains_at_zero_lr=False,
        note="as `torch.optim.SparseAdam`",
    ),
}
SparseOptimizer.kinds = Kinds(ROW_OPTIMIZERS)
