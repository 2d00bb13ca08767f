"""Checks the sections of a job file together. All functions raise ValueError."""

from collections import Counter
from collections.abc import Mapping

from rowcast.job.embedding_tables import Table
from rowcast.job.formats import BATCH, FORMATS, Columns, Data, format_of
from rowcast.job.models import (
    BUILT_IN_MODELS,
    EMBEDDING_DIM,
    BottomAndTop,
    BuiltInModel,
    NextItemSettings,
    require_features,
)
from rowcast.job.schema import MAX_TABLES, Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs, needs_whole_rows, rows_in
from rowcast.job.units import parse_bytes
from rowcast.runtime.errors import nearest


def check_tables(tables: list[Table], columns: Columns) -> dict[str, Table]:
    """Returns the table of each feature. Raises ValueError for tables and columns that do not fit together."""
    if not tables:
        raise ValueError("no tables; give [[tables]] or [tables_from]")
    if (count := sum(max(1, table.pieces) for table in tables)) > MAX_TABLES:
        raise ValueError(f"{count} tables and column pieces are more than {MAX_TABLES}")
    for name in sorted(name for name, count in Counter(table.name for table in tables).items() if count > 1):
        raise ValueError(f"table {name} appears more than once in [[tables]]")
    by_feature = dict[str, Table]()
    for table in tables:
        for feature in table.features:
            if feature in by_feature:
                raise ValueError(
                    f"feature {feature} is in table {by_feature[feature].name} and in table {table.name}, and can be "
                    "in one; give the ids of one of them under a second feature name"
                )
            by_feature[feature] = table
    hashed = [] if isinstance(columns.hash, bool) else columns.hash
    for key, features in (("weights", list(columns.weights)), ("lists", list(columns.lists)), ("hash", hashed)):
        require_features(features, f"data.columns.{key}", by_feature)
    check_prepare(columns, by_feature)
    for feature in columns.weights:
        if by_feature[feature].pooling == "mean":
            raise ValueError(
                f'data.columns.weights: feature {feature} is pooled by mean; a weighted mean is refused, use "sum"'
            )
    return by_feature


def check_prepare(columns: Columns, by_feature: Mapping[str, Table]) -> None:
    numbers = [*columns.label_names, *(columns.dense or []), *columns.weights.values()]
    for name, prepare in columns.prepare.items():
        key = f"data.columns.prepare.{name}"
        if name not in by_feature and name not in numbers:
            found = nearest(name, [*by_feature, *numbers])
            raise ValueError(f"{key}: no label, dense feature, weight or feature has this name{found}; correct it")
        if name in by_feature and not prepare.bounds:
            raise ValueError(f"{key}: {name} is a feature, and ids need buckets; give them, or remove this")
        if prepare.buckets and name not in by_feature:
            raise ValueError(
                f"{key}.buckets makes ids, and {name} is no feature; give it a table, or remove the buckets"
            )
        if prepare.clock:
            check_clock(key, name, prepare.of or name, columns, by_feature)
        rule = "clock" if prepare.clock and not prepare.buckets else "buckets"
        if name in by_feature and by_feature[name].num_embeddings < len(prepare.bounds) + 2:
            raise ValueError(
                f"{key}.{rule} makes ids up to {len(prepare.bounds) + 1}, and table {by_feature[name].name} has "
                f"num_embeddings = {by_feature[name].num_embeddings}; enlarge it"
            )
        if name in by_feature and columns.is_hashed(name):
            raise ValueError(f"{key}.{rule} makes ids, and data.columns.hash would hash them; remove one of them")


def check_clock(key: str, name: str, source: str, columns: Columns, by_feature: Mapping[str, Table]) -> None:
    """`source`: the column of times."""
    if name not in by_feature and name not in (columns.dense or []):
        raise ValueError(f"{key}.clock makes a feature or a dense feature, and {name} is neither; name it as one")
    if {name, source} & columns.lists.keys() or (source in by_feature and columns.is_hashed(source)):
        raise ValueError(
            f"{key}.clock reads times, and data.columns.hash or lists makes ids of {source}; give one of them a column "
            "of its own"
        )


def check_whole(job: Job) -> None:
    """Checks the sections together. Raises ValueError."""
    by_feature = check_tables(job.tables, job.data.columns)
    check_batch_arrays(job.data, by_feature)
    check_model_inputs(job)
    check_next(job)
    if job.optimizer.dense is None and job.model.kind in BUILT_IN_MODELS:
        raise ValueError(
            f"[optimizer.dense] is missing, and {job.model.kind} has no step of its own; write it, with kind and lr"
        )
    for table in job.tables:
        if job.model.compile and table.pooling == "none":
            raise ValueError(
                f'model.compile: table {table.name} has pooling = "none", so every batch has another shape and '
                "would be compiled again; remove model.compile"
            )
    if job.model.compile and job.data.batch_size % job.ranks.num_parts:
        raise ValueError(
            f"model.compile: data.batch_size = {job.data.batch_size} is not a multiple of ranks.parts = "
            f"{job.ranks.num_parts}, so parts would have two shapes; change one of them, or remove model.compile"
        )
    if job.ranks.memory is not None and isinstance(job.store, StoreWithTier):
        raise ValueError(
            f'ranks.memory = {job.ranks.memory}: with store.kind = "{job.store.kind}", rows beyond store.memory = '
            f"{job.store.memory} leave the host's memory; remove ranks.memory"
        )
    sparse = job.optimizer.sparse
    for table in job.tables:
        needs = needs_whole_rows(sparse, table)
        if table.is_cut and needs:
            raise ValueError(
                f'table {table.name}: placement = "{table.placement}" cuts rows, and {" and ".join(needs)} needs a '
                'whole row; place the table whole: placement = "table"'
            )
        if table.linear and sparse.kind in needs:
            raise ValueError(
                f"table {table.name} has linear = true, but {sparse.kind} keeps one state for a row as a "
                'whole; set optimizer.sparse.kind = "adagrad"'
            )
        if table.linear and sparse.clip_rows is not None:
            raise ValueError(
                f"table {table.name} has linear = true, but optimizer.sparse.clip_rows takes the norm of a row as a "
                "whole; remove one of them"
            )
    if sparse.master and all(table.dtype == "fp32" for table in job.tables):
        raise ValueError(
            "optimizer.sparse.master = true keeps fp32 weights beside rounded ones, but every table has "
            'dtype = "fp32"; remove it, or set dtype = "bf16"'
        )
    kinds = group_specs(job)
    if job.cache.capacity_rows is not None and len(kinds) > 1:
        raise ValueError(
            f'cache.capacity: "{job.cache.capacity}" counts rows, but the tables have rows of {len(kinds)} widths or '
            'dtypes; give bytes, such as "64MiB"'
        )
    if isinstance(job.store, StoreWithTier) and job.cache.policy != "lookahead":
        raise ValueError(
            f'store.kind = "{job.store.kind}" chooses the rows in memory by cache.policy = "lookahead", not '
            f'"{job.cache.policy}"; remove cache.policy, or set another store.kind'
        )
    check_group_shares(job)


def check_next(job: Job) -> None:
    data, has_files = job.data, job.data.format in FORMATS and format_of(job.data.format).has_files
    of_eval = {"every": job.eval.every, "patience": job.eval.patience, "keep": job.eval.keep == "best"}
    of_data = {"epochs": data.epochs > 1, "shuffle": data.shuffle == "full", "format": not has_files}
    of_data |= {"eval_fraction": data.eval_fraction > 0, "eval_path": bool(data.eval_path)}
    of_data["negatives"] = bool(data.negatives)
    for section, refused in (("eval", of_eval), ("data", of_data)) if job.eval.next == "file" else ():
        for key in [key for key, value in refused.items() if value]:
            found = f"{section}.{key} = {getattr(getattr(job, section), key)!r}"
            raise ValueError(f'eval.next = "file" does not go with {found}; change one of them')


def check_group_shares(job: Job) -> None:
    """Checks that cache.groups names known groups and gives each at least a row, all within cache.capacity."""
    if not job.cache.groups:
        return
    groups = {group.name: group for group in group_specs(job)}
    for name, share in job.cache.groups.items():
        if name not in groups:
            raise ValueError(f"cache.groups: {name} is no group of this job; it has {', '.join(groups)}")
        if rows_in(groups[name], share) < 1:
            raise ValueError(
                f"cache.groups.{name} = {share!r} is less than one row of {groups[name].record_bytes} bytes; give more"
            )
    taken = sum(rows_in(groups[name], share) * groups[name].record_bytes for name, share in job.cache.groups.items())
    rows, (first, *_) = job.cache.capacity_rows, groups.values()
    capacity = parse_bytes(job.cache.capacity) if rows is None else rows * first.record_bytes
    if taken > capacity:
        raise ValueError(
            f"cache.groups: the named groups take {taken} bytes, more than cache.capacity = {job.cache.capacity!r} "
            f"({capacity} bytes); give them less or raise it to {taken} bytes or more"
        )


# arrays and features that are not of samples


def check_batch_arrays(data: Data, tables: Mapping[str, Table]) -> None:
    """`tables`: by feature."""
    if data.of and BATCH in tables:
        raise ValueError(f'data.of: a feature is called "{BATCH}", which here means the whole batch; rename it')
    for name, of in data.of.items():
        if name in tables:
            if of != BATCH:
                raise ValueError(f'data.of: {name} is a feature, which belongs to samples or the "{BATCH}", not {of!r}')
            if format_of(data.format).has_files:
                raise ValueError(
                    f'data.of: {name} = "{BATCH}" needs a data set of your own, which makes batches; {data.format} has '
                    "samples"
                )
        else:
            check_array(name, of, data, tables)
        require_unpooled(tables[name if name in tables else of], f'data.of: {name} = "{of}"')
    arrays = [name for name in data.of if name not in tables]
    for name in (*arrays, *data.columns.inputs):
        if "." in name:
            raise ValueError(f"data: the array {name} has a dot in its name; rename it")
    for name in data.columns.inputs:
        if name in tables:
            require_unpooled(tables[name], f"data.columns.inputs: {name}")
    check_negatives(data, tables)


def check_negatives(data: Data, tables: Mapping[str, Table]) -> None:
    drawn = [own.feature for own in data.negatives]
    for own in data.negatives:
        key = f"data.negatives: {own.feature}"
        if not format_of(data.format).draws:
            raise ValueError(f"{key}: {data.format} makes its batches itself; draw there, with rowcast.draws")
        for name in {own.feature, own.per} - {BATCH}:
            if name not in tables:
                raise ValueError(f"{key}: {name} has no table{nearest(name, tables)}; add it to a table's features")
            require_unpooled(tables[name], f"{key} with per = {own.per!r}: {name}")
        if drawn.count(own.feature) > 1 or own.feature in {*data.of, *data.of.values(), *data.columns.inputs}:
            raise ValueError(
                f"{key} is drawn, and named again in data.negatives, data.of or columns.inputs; remove one"
            )
        if own.per in drawn or (own.per != BATCH and not format_of(data.format).named_columns):
            raise ValueError(
                f"{key}.per = {own.per!r} is no feature of files with named columns; name one, or {BATCH!r}"
            )
        rows = tables[own.feature].num_embeddings
        if own.avoid is not None and (tables[own.avoid].name != tables[own.feature].name or rows < 2):
            raise ValueError(
                f"{key}.avoid = {own.avoid!r} needs one table of at least 2 rows for both; {own.avoid} has "
                f"{tables[own.avoid].name}, and {own.feature} {tables[own.feature].name} of {rows}"
            )
        if own.by == "log-uniform" and rows >= 2**31:
            raise ValueError(
                f'{key}.by = "log-uniform" takes tables of less than 2**31 rows, not {rows}; use "uniform"'
            )


def check_array(name: str, of: str, data: Data, tables: Mapping[str, Table]) -> None:
    if of == BATCH:
        raise ValueError(
            f"data.of: {name} is no feature of a table{nearest(name, tables)}; only a feature belongs to the "
            f'"{BATCH}", and an array to a feature'
        )
    if of not in tables:
        raise ValueError(f"data.of: {name} = {of!r} names no feature of a table{nearest(of, tables)}")
    if format_of(data.format).has_files and name not in data.columns.inputs:
        near = nearest(name, data.columns.inputs)
        raise ValueError(f"data.of: {name} is not in data.columns.inputs{near}; name it there, or remove it")


def require_unpooled(table: Table, what: str) -> None:
    if table.pooling != "none":
        raise ValueError(f'{what} needs separate look-ups, and table {table.name} pools them; set its pooling = "none"')


# what the model gets


def check_model_inputs(job: Job) -> None:
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    if built_in is not None:
        check_labels(job)
        check_widths(job, built_in)
        check_sequences(job, built_in)
        check_linear(job, built_in)
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
    values = job.data.columns.label_values
    if values == ("binary" if job.model.task == "regression" else "real"):
        raise ValueError(
            f'model.task = "{job.model.task}" does not go with data.columns.label_values = "{values}"; write "real" '
            'for a regression, and "binary" otherwise'
        )
    if labels:
        raise ValueError(
            f"data.columns.labels names {len(labels)} labels, and {job.model.kind} has one logit a sample; name one as "
            "data.columns.label, or use a model of your own, such as examples.mmoe:build"
        )


def check_widths(job: Job, built_in: BuiltInModel) -> None:
    if built_in.layers.get("bottom_mlp") == EMBEDDING_DIM:
        assert isinstance(job.model, BottomAndTop)
        for table in job.tables:
            if table.embedding_dim != job.model.bottom_mlp[-1]:
                raise ValueError(
                    f"model.bottom_mlp ends in {job.model.bottom_mlp[-1]}, but table {table.name} has embedding_dim = "
                    f"{table.embedding_dim}; {job.model.kind} needs them equal"
                )
    if built_in.one_width:
        for table in job.tables:
            if table.embedding_dim != job.tables[0].embedding_dim:
                raise ValueError(
                    f"{job.model.kind} needs tables of one embedding_dim, but {job.tables[0].name} has "
                    f"{job.tables[0].embedding_dim} and {table.name} {table.embedding_dim}; make them equal"
                )


def check_linear(job: Job, built_in: BuiltInModel) -> None:
    """Checks that a built-in model gets linear weights if it needs them, and otherwise none."""
    linear = [table.name for table in job.tables if table.linear]
    if linear and not built_in.linear:
        homes = " or ".join(f'"{name}"' for name, other in BUILT_IN_MODELS.items() if other.linear)
        raise ValueError(
            f"table {linear[0]} has linear = true, but {job.model.kind} has no use for linear weights; remove it, or "
            f"set model.kind = {homes}"
        )
    if built_in.linear and not linear:
        raise ValueError(f"{job.model.kind} needs linear weights; set linear = true in at least one table")


def check_sequences(job: Job, built_in: BuiltInModel) -> None:
    """Checks that the model gets the tables without pooling that it needs, and no others."""
    kind, sequences = job.model.kind, [table.name for table in job.tables if table.pooling == "none"]
    if sequences and not built_in.sequences:
        homes = " or ".join(f'"{name}"' for name, other in BUILT_IN_MODELS.items() if other.sequences)
        raise ValueError(
            f'table {sequences[0]} has pooling = "none", but {kind} needs one vector for each feature; use "sum" or '
            f'"mean", or model.kind = {homes}'
        )
    if not sequences and built_in.sequences:
        raise ValueError(f'{kind} needs a table with pooling = "none": {built_in.sequences}')
