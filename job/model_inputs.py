"""Checks that the job's tables fit its built-in model. All functions raise ValueError."""

from rowcast.job.models import BUILT_IN_MODELS, EMBEDDING_DIM, BottomAndTop, NextItemSettings
from rowcast.job.schema import Job


def check_model_inputs(job: Job) -> None:
    check_labels(job)
    check_widths(job)
    check_sequences(job)
    check_linear(job)
    check_candidates(job)
    job.model.check_inputs({feature: table for table in job.tables for feature in table.features}, job.ranks.num_parts)


def check_candidates(job: Job) -> None:
    model = job.model
    if isinstance(model, NextItemSettings) and model.candidate_feature not in job.data.batch_features:
        raise ValueError(
            f"{model.kind} ranks positives among the look-ups of a batch, and {model.candidate_feature} has those of "
            f'samples; draw it with [[data.negatives]] without per, or set data.of.{model.candidate_feature} = "batch"'
        )


def check_labels(job: Job) -> None:
    labels = job.data.columns.labels
    if labels and job.model.kind in BUILT_IN_MODELS:
        raise ValueError(
            f"data.columns.labels names {len(labels)} labels, and {job.model.kind} has one logit a sample; name one as "
            "data.columns.label, or use a model of your own, such as examples.mmoe:build"
        )


def check_widths(job: Job) -> None:
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    if built_in is not None and built_in.layers.get("bottom_mlp") == EMBEDDING_DIM:
        assert isinstance(job.model, BottomAndTop)
        for table in job.tables:
            if table.embedding_dim != job.model.bottom_mlp[-1]:
                raise ValueError(
                    f"model.bottom_mlp ends in {job.model.bottom_mlp[-1]}, but table {table.name} has embedding_dim = "
                    f"{table.embedding_dim}; {job.model.kind} needs them equal"
                )
    if built_in is not None and built_in.one_width:
        for table in job.tables:
            if table.embedding_dim != job.tables[0].embedding_dim:
                raise ValueError(
                    f"{job.model.kind} needs tables of one embedding_dim, but {job.tables[0].name} has "
                    f"{job.tables[0].embedding_dim} and {table.name} {table.embedding_dim}; make them equal"
                )


def check_linear(job: Job) -> None:
    """Checks that a built-in model gets linear weights if it needs them, and otherwise none."""
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    if built_in is None:
        return
    linear = [table.name for table in job.tables if table.linear]
    if linear and not built_in.linear:
        homes = " or ".join(f'"{name}"' for name, other in BUILT_IN_MODELS.items() if other.linear)
        raise ValueError(
            f"table {linear[0]} has linear = true, but {job.model.kind} has no use for linear weights; remove it, or "
            f"set model.kind = {homes}"
        )
    if built_in.linear and not linear:
        raise ValueError(f"{job.model.kind} needs linear weights; set linear = true in at least one table")


def check_sequences(job: Job) -> None:
    """Checks that the model gets the tables without pooling that it needs, and no others."""
    kind, sequences = job.model.kind, [table.name for table in job.tables if table.pooling == "none"]
    built_in = BUILT_IN_MODELS.get(kind)
    if built_in is None:
        return
    if sequences and not built_in.sequences:
        homes = " or ".join(f'"{name}"' for name, other in BUILT_IN_MODELS.items() if other.sequences)
        raise ValueError(
            f'table {sequences[0]} has pooling = "none", but {kind} needs one vector for each feature; use "sum" or '
            f'"mean", or model.kind = {homes}'
        )
    if not sequences and built_in.sequences:
        raise ValueError(f'{kind} needs a table with pooling = "none": {built_in.sequences}')
