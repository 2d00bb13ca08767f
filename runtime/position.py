"""Defines the position of a run between two batches: the reader's state in a checkpoint."""

import msgspec


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A position between two batches of the schedule; the default is the start."""

    step: int = 0  # batches of both kinds before this position
    train_step: int = 0  # training batches before it
    epoch: int = 0
    train_batch: int = 0  # training batches of this epoch before it
    eval_batch: int | None = None  # batches of the current evaluation before it; None outside an evaluation

    def after_train(self) -> "Position":
        return msgspec.structs.replace(
            self, step=self.step + 1, train_step=self.train_step + 1, train_batch=self.train_batch + 1, eval_batch=None
        )

    def begin_eval(self) -> "Position":
        return msgspec.structs.replace(self, eval_batch=0)

    def after_eval(self) -> "Position":
        return msgspec.structs.replace(self, step=self.step + 1, eval_batch=(self.eval_batch or 0) + 1)

    def end_eval(self) -> "Position":
        return msgspec.structs.replace(self, eval_batch=None)

    def next_epoch(self) -> "Position":
        return Position(step=self.step, train_step=self.train_step, epoch=self.epoch + 1)
