"""Checks that the job's tables are what its built-in model takes. All functions raise ValueError."""

from rowcast.job.models import BUILT_IN_MODELS, EMBEDDING_DIM
from rowcast.job.schema import Job, Table, parse_init
from rowcast.runtime.name_lists import nearest


def check_model_inputs(job: Job) -> None:
    check_labels(job)
    check_widths(job)
    check_sequences(job)
    check_linear(job)
    if job.model.kind == "din":
        check_targets(job)
    if job.model.kind == "two-tower":
        check_item_features(job)


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


def check_targets(job: Job) -> None:
    """Checks the pairs of DIN: each history and its target in one table, without pooling, and no other sequences."""
    targets, tables = job.model.targets, tables_by_feature(job)
    if not targets:
        raise ValueError('din needs model.targets, the target of each history, such as targets = { bought = "item" }')
    for history, target in targets.items():
        for feature in (history, target):
            require_feature(feature, "model.targets", tables)
        if tables[history].name != tables[target].name or history == target:
            raise ValueError(
                f"model.targets: history {history} has table {tables[history].name} and target {target} has "
                f"{tables[target].name}; list them as two features of one table"
            )
        if tables[history].pooling != "none":
            raise ValueError(
                f"model.targets: table {tables[history].name} of history {history} has pooling = "
                f'"{tables[history].pooling}"; set "none"'
            )
    used = {*targets, *targets.values()}
    for feature, table in tables.items():
        if table.pooling == "none" and feature not in used:
            raise ValueError(
                f'feature {feature} is in no pair of model.targets, but table {table.name} has pooling = "none"; add '
                'it to a pair, or give it a table with "sum" or "mean"'
            )
    if job.model.activation == "dice" and job.ranks.num_parts > 1:
        raise ValueError(
            f'model.activation = "dice" keeps running means, which have no one result where a batch is trained in '
            f'parts (ranks.parts = {job.ranks.num_parts}); set "prelu"'
        )


def check_item_features(job: Job) -> None:
    """Checks which features of a two-tower model are the item's, and that different items differ at first."""
    items, tables = job.model.item_features, tables_by_feature(job)
    if not items:
        raise ValueError('two-tower needs model.item_features, such as item_features = ["item", "category"]')
    for feature in items:
        require_feature(feature, "model.item_features", tables)
    if all(is_constant(tables[feature]) for feature in items):
        raise ValueError(
            f"model.item_features: all rows of table {tables[items[0]].name} begin as init = "
            f'"{tables[items[0]].init}", so that items could not be told apart; use "uniform"'
        )


def tables_by_feature(job: Job) -> dict[str, Table]:
    return {feature: table for table in job.tables for feature in table.features}


def require_feature(feature: str, key: str, tables: dict[str, Table]) -> None:
    if feature not in tables:
        raise ValueError(
            f"{key}: feature {feature} has no table{nearest(feature, tables)}; add it to a table's features"
        )


def is_constant(table: Table) -> bool:
    kind, a, b = parse_init(table.init, table.num_embeddings)
    return kind == "constant" or (b == 0 if kind == "normal" else a == b)
