"""Watches the steps of the script's dense optimizers: counts them, and warns of learning rates that the rows do not
follow."""

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rowcast.runtime.telemetry.logs import get_logger

ROWS_KEEP_THEIRS = (
    "the script has changed its optimizer's learning rate, which the rows do not follow: give the "
    "EmbeddingBagCollection a schedule in train steps, as "
    "optimizer={..., 'schedule': {'kind': 'cosine', 'decay_steps': N}}"
)


class OptimizerSteps:
    """Counts the steps of every torch.optim optimizer of this process, until it is closed."""

    def __init__(self, rows_lr: float, *, rows_follow: bool) -> None:
        """`rows_follow`: whether the rows have a schedule of their own, so that other learning rates are right."""
        self.count = 0
        self._rows_lr, self._warns = rows_lr, not rows_follow
        self._first = WeakKeyDictionary[Optimizer, list[Any]]()
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        self.count += 1
        if self._warns:
            rates = [group.get("lr") for group in optimizer.param_groups]
            if self._first.setdefault(optimizer, rates) != rates:
                self._warns = False
                get_logger().warning(ROWS_KEEP_THEIRS, rows_lr=self._rows_lr)
