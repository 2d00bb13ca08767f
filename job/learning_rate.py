"""Computes the learning rate of a train step from the job file and the step alone, so a restart cannot change it.

    lr             ._____________.
                 . |             | .
    lr / warmup .  |             |    . . ________________ final
                1  warmup        decay_start  + decay_steps

Train steps are counted from 1 here, so that the first one has a learning rate above 0. With kind = "polynomial" and
power 2 this is the schedule of MLPerf's DLRM.
"""

import math

from rowcast.job.schema import DenseOptimizer, LearningRateSchedule, SparseOptimizer


def learning_rate(settings: SparseOptimizer | DenseOptimizer, train_step: int) -> float:
    """`train_step` counts the training batches before this one, over the whole run."""
    lr, schedule, number = settings.lr, settings.schedule, train_step + 1
    if number < schedule.warmup:
        return lr * number / schedule.warmup
    if schedule.decay_steps is None or number <= schedule.decay_begin:
        return lr
    done = (number - schedule.decay_begin) / schedule.decay_steps
    return schedule.final if done >= 1 else schedule.final + (lr - schedule.final) * remaining_share(schedule, done)


def remaining_share(schedule: LearningRateSchedule, done: float) -> float:
    """How much of the decay remains, from 1 to 0, after the share `done` of its steps, from 0 to 1."""
    match schedule.kind:
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "polynomial":
            return math.pow(1 - done, schedule.power)
        case _:
            return 1 - done
