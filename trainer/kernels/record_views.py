"""Splits records into views of their fields, and computes the row optimizer's rule of a train step."""

import torch
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.learning_rate import learning_rate
from rowcast.job.row_optimizers import SparseOptimizer
from rowcast.job.tables import GroupSpec, RecordPart
from rowcast.trainer.kernels import RecordViews, Rule

DTYPES: dict[RowType, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rule_at(settings: SparseOptimizer, train_step: int) -> Rule:
    """`train_step` counts the train batches before this one."""
    return Rule(
        kind=settings.kind,
        lr=learning_rate(settings, train_step),
        eps=settings.epsilon,
        settings=settings,
        step=train_step + 1,
        clip=settings.clip_rows,
    )


def rows_of(records: Tensor, group: GroupSpec) -> RecordViews:
    """Returns the fields of records f32 [num_slots, record_floats], as views."""
    parts = {part.name: part_of(records, part) for part in group.parts}
    return RecordViews(weight=parts.pop("weight"), master=parts.pop("master", None), states=tuple(parts.values()))


def part_of(records: Tensor, part: RecordPart) -> Tensor:
    """Returns a view [n, width] of a field, in its dtype; `records` are contiguous rows of record_bytes, of any
    dtype."""
    return records.view(DTYPES[part.dtype])[:, part.elements]
