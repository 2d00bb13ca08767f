"""What the engine's loop sees where the script has the model: nothing but the dense side of a checkpoint."""

import numpy as np
import torch

from trainer.adopt.dense import DenseSide
from trainer.cache import ArrivedStep
from trainer.dense import Tensors
from trainer.evaluate import EvalCounts
from trainer.report import Evaluation


class ScriptRunner:
    """Implements `loop.Runner`; the loop only attends, so it asks for no step."""

    def __init__(self, dense: DenseSide | None) -> None:
        self._dense = dense

    def train(self, step: ArrivedStep, loss: torch.Tensor) -> None:
        raise AssertionError("the script trains")

    def evaluate(self, step: ArrivedStep) -> None:
        raise AssertionError("the script evaluates")

    def close_evaluation(self) -> EvalCounts:
        raise AssertionError("the script evaluates")

    def state(self) -> Tensors:
        return {} if self._dense is None else self._dense.state()

    def restore(self, tensors: Tensors) -> bool:
        if self._dense is not None:
            self._dense.restore(tensors)
        return False


class ScriptResults:
    """Implements `loop.Results`."""

    def loss(self, train_step: int, loss: np.float32) -> None:
        raise AssertionError("the script has the loss")

    def evaluation(self, result: Evaluation) -> None:
        raise AssertionError("the script evaluates")

    def state(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> None:
        """There are none."""
