"""Counts how often the script's dense optimizers step."""

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps of every torch.optim optimizer of this process, until it is closed."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        self.count += 1
