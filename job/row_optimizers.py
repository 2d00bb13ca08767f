"""Lists the rules of `optimizer.sparse.kind` and their settings, without importing torch.

A new one is a line here and the rule's file; settings of its own are a struct above the line.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rowcast.job.learning_rate import LearningRateSchedule, Rate, check_learning_rate
from rowcast.job.section import Kinds, Section

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
