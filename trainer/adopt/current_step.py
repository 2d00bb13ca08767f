"""The step that the script has in hand: what it may still look up of it, and whether it was trained as the script seems to mean it.

    begin   next_slice   (look up, backward) ...   next_slice   (look up, backward)   check_done   end

Nothing here drives the engine or waits for anything.
"""

from collections import deque

import torch

from rowcast.trainer.adopt.optimizer_steps import OptimizerSteps
from rowcast.trainer.adopt.slices import Slice, SlicedStep, slices_of
from rowcast.trainer.adopt.stream_order import StreamOrder
from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.runner import step_lookups
from rowcast.trainer.models.sequences import Embedded

ACCUMULATED = (
    "two train batches were looked up without a step of the dense optimizer between them: rows are updated in every backward pass, so "
    "accumulated gradients would train them more often than the dense weights; use larger batches, which connect(..., accumulate=k) "
    "yields as k micro-batches each, or connect(..., dense_optimizer=False) where no torch.optim optimizer is used"
)
STEPPED_WITHIN = (
    "an optimizer has stepped between two micro-batches of train step {}: with accumulate={} the gradients of all of them make one step; "
    "call optimizer.step() and zero_grad() where batch.is_last"
)
FORGOTTEN = (
    "train step {} was looked up in eval mode alone, and an optimizer has stepped: its rows were not trained; call model.train() "
    "before it, or look up under torch.no_grad() where the rows are to stay as they are"
)


class CurrentStep:
    def __init__(
        self,
        embeddings: Embeddings,
        uses: StreamOrder,
        steps: OptimizerSteps,
        *,
        dense_optimizer: bool,
        accumulate: int,
    ) -> None:
        """`dense_optimizer`: it must step once for each train batch. `accumulate`: micro-batches that each batch is cut into."""
        self.step: ArrivedStep | None = None  # begun, and not finished
        self.slice = Slice(0, 0, 0, is_last=True)  # that the script was given last
        self.is_trained = False  # whether it was looked up to be trained
        self.uses = uses
        self._embeddings, self._steps = embeddings, steps
        self._dense_optimizer, self._accumulate = dense_optimizer, accumulate
        self._slices: deque[Slice] = deque()  # that follow
        self._sliced: SlicedStep | None = None  # where there are several
        self._is_slice_trained = False
        self._is_looked_up = False
        self._steps_begun = 0  # of dense optimizers, when the step was begun
        self._steps_seen: int | None = None  # and at the last forward that trained, of any step
        self._steps_looked_at: int | None = None  # and when the step was only looked up, though gradients were enabled

    @property
    def awaits_backward(self) -> bool:
        """Whether what was looked up last to be trained has had no backward pass."""
        return self._embeddings.awaits_backward if self._sliced is None else self._sliced.awaits_backward

    @property
    def awaits_optimizer(self) -> bool:
        """Whether rows were trained, and the dense optimizer has not stepped since."""
        return self.is_trained and self._dense_optimizer and self._steps_seen == self._steps.count

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to be done: no micro-batch, no backward pass and no step of the optimizer."""
        return not (self._slices or self.awaits_backward or self.awaits_optimizer)

    @property
    def is_used(self) -> bool:
        """Whether the script has done anything with it."""
        return self._is_looked_up or self._steps.count > self._steps_begun

    @property
    def has_slices(self) -> bool:
        """Whether the script has not been given all of it."""
        return self.step is not None and bool(self._slices)

    def begin(self, step: ArrivedStep) -> None:
        self._slices = deque(slices_of(step.header.batch_size, self._accumulate))
        is_whole = len(self._slices) == 1
        self._sliced = (
            None if is_whole else SlicedStep(self._embeddings, self.uses, step_lookups(step), step.header.train_step)
        )
        self.is_trained = self._is_slice_trained = self._is_looked_up = False
        self._steps_begun, self._steps_looked_at = self._steps.count, None
        self.step = step

    def next_slice(self) -> Slice | None:
        """The next micro-batch is the script's now; None where it has had all. Raises RuntimeError where the one before awaits its
        backward pass."""
        if self.step is None or not self._slices:
            return None
        self._require_backward(self.step)
        self._is_slice_trained = False
        self.slice = self._slices.popleft()
        return self.slice

    def look_up(self) -> list[Embedded]:
        """The slice in hand, by feature; with gradients enabled its backward pass trains the rows."""
        assert self.step is not None, "the module looks up the step in hand"
        self._is_looked_up = True
        if self._sliced is not None:
            return self._sliced.look_up(self.slice)
        return self._embeddings(step_lookups(self.step), self.step.header.train_step)

    def note_eval_lookup(self) -> None:
        """It is looked up in eval mode, with gradients enabled: right for a prediction, wrong where it is trained by that."""
        assert self.step is not None, "the module looks up the step in hand"
        if self.step.header.kind == "train" and self._steps_looked_at is None:
            self._steps_looked_at = self._steps.count

    def mark_trained(self) -> None:
        """It is looked up to be trained. Raises RuntimeError where it must not be."""
        assert self.step is not None, "the module looks up the step in hand"
        header, counted = self.step.header, self._steps.count
        if header.kind == "eval":
            raise RuntimeError(
                "this is an evaluation batch, whose rows may not change: call model.eval(), or look up under torch.no_grad()"
            )
        if self._is_slice_trained and not self.awaits_backward:
            raise RuntimeError(
                f"the rows of train step {header.train_step} were updated already; train on each batch once"
            )
        if self._dense_optimizer and not self.is_trained and self._steps_seen == counted:
            raise RuntimeError(ACCUMULATED)
        if self._dense_optimizer and self.is_trained and self._steps_seen != counted:
            raise RuntimeError(STEPPED_WITHIN.format(header.train_step, self._accumulate))
        self.is_trained, self._is_slice_trained, self._steps_seen = True, True, counted

    def end(self) -> None:
        """The script is through with it: everything that was issued for it comes before what the current stream does next. Raises
        RuntimeError where it was not trained as the script seems to mean it."""
        step = self.step
        assert step is not None, "only a step that was begun is ended"
        self._require_backward(step)
        is_stepped = self._steps_looked_at is not None and self._steps_looked_at < self._steps.count
        if is_stepped and not self.is_trained and self._dense_optimizer:
            raise RuntimeError(FORGOTTEN.format(step.header.train_step))
        if self._sliced is not None:
            self._sliced.finish()
        self.step, self._sliced = None, None
        self.uses.gather()

    def drop(self) -> None:
        """The script was given it and has done nothing with it."""
        self.step, self._sliced = None, None
        self.uses.gather()

    def labels(self) -> torch.Tensor:
        """f32 [size], of the slice in hand."""
        assert self.step is not None, "there is a step in hand"
        return self.step.arrays["labels"][self.slice.start : self.slice.stop]

    def _require_backward(self, step: ArrivedStep) -> None:
        if self.awaits_backward:
            raise RuntimeError(
                f"the embeddings of train step {step.header.train_step} have had no backward pass; call backward() once for each forward, "
                "or look up under torch.no_grad()"
            )
