"""Lists the rules of `optimizer.sparse.kind` without importing torch. A new one is a line here and the rule's file."""

from dataclasses import dataclass

RULES = "rowcast.trainer.kernels.row_optimizers"


@dataclass(frozen=True, slots=True)
class RowState:
    """One fp32 part of a row's record."""

    name: str  # as torch.optim calls it
    per_row: bool = False  # one element for the whole row; otherwise one for each of its weights
    accumulates: bool = False  # starts at optimizer.sparse.initial_accumulator; otherwise at 0

    def width(self, dim: int) -> int:
        return 1 if self.per_row else dim


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    module: str  # has `train`, see trainer/kernels/row_optimizers; imported only by the trainer
    states: tuple[RowState, ...] = ()  # in the order of the record
    eps: float | None = None  # the default of optimizer.sparse.eps; None if the rule has no eps
    trains_at_zero_lr: bool = True  # if False, a learning rate of 0 is refused
    note: str = ""  # for docs/job-file.md


ROW_OPTIMIZERS = {
    "sgd": RowOptimizer(f"{RULES}.sgd"),
    "adagrad": RowOptimizer(f"{RULES}.adagrad", states=(RowState("sum", accumulates=True),), eps=1e-10),
    "rowwise_adagrad": RowOptimizer(
        f"{RULES}.rowwise_adagrad",
        states=(RowState("sum", per_row=True, accumulates=True),),
        eps=1e-10,
        note="one accumulator per row",
    ),
    "adam": RowOptimizer(
        f"{RULES}.adam",
        states=(RowState("exp_avg"), RowState("exp_avg_sq")),
        eps=1e-8,
        trains_at_zero_lr=False,
        note="as `torch.optim.SparseAdam`",
    ),
}
