"""Warns when the script changes a learning rate of its optimizers, because the rows do not follow it."""

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rowcast.runtime.telemetry.logs import get_logger

ROWS_KEEP_THEIRS = (
    "the script has changed its optimizer's learning rate, which the rows do not follow: give the "
    "EmbeddingBagCollection a schedule in train steps, as "
    "optimizer={..., 'schedule': {'kind': 'cosine', 'decay_steps': N}}"
)


class DenseRates:
    """Watches the learning rates of every torch.optim optimizer of this process, until it is closed."""

    def __init__(self, rows_lr: float) -> None:
        self._rows_lr = rows_lr
        self._first = WeakKeyDictionary[Optimizer, list[Any]]()
        self._has_warned = False
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        rates = [group.get("lr") for group in optimizer.param_groups]
        if not self._has_warned and self._first.setdefault(optimizer, rates) != rates:
            self._has_warned = True
            get_logger().warning(ROWS_KEEP_THEIRS, rows_lr=self._rows_lr)
