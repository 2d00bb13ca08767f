"""The row optimizers that a job file may name, as far as they are known without torch: what a record keeps for each, and its defaults.

What each does is `trainer/kernels/row_optimizers/<name>.py`. A new one is that file and a line below.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowState:
    """One fp32 part of a row's record."""

    name: str  # as torch.optim calls it
    per_row: bool = False  # one element a row; otherwise one for each of the row's weights
    accumulates: bool = False  # begins at optimizer.sparse.initial_accumulator; otherwise at 0

    def width(self, dim: int) -> int:
        return 1 if self.per_row else dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptimizer:
    states: tuple[RowState, ...] = ()  # in the order of the record
    eps: float | None = None  # default of optimizer.sparse.eps; None where the rule has none
    trains_at_zero_lr: bool = True  # otherwise a learning rate of 0 is refused
    note: str = ""  # for docs/job-file.md


ROW_OPTIMIZERS = {
    "sgd": RowOptimizer(),
    "adagrad": RowOptimizer(states=(RowState(name="sum", accumulates=True),), eps=1e-10),
    "rowwise_adagrad": RowOptimizer(
        states=(RowState(name="sum", per_row=True, accumulates=True),), eps=1e-10, note="one accumulator a row"
    ),
    "adam": RowOptimizer(
        states=(RowState(name="exp_avg"), RowState(name="exp_avg_sq")),
        eps=1e-8,
        trains_at_zero_lr=False,
        note="as `torch.optim.SparseAdam`",
    ),
}
