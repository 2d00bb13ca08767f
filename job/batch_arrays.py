"""Checks data.of, data.columns.inputs and data.negatives. All functions raise ValueError."""

from collections.abc import Mapping

from rowcast.job.embedding_tables import Table
from rowcast.job.formats import BATCH, Data, format_of
from rowcast.runtime.errors import nearest


def check_batch_arrays(data: Data, tables: Mapping[str, Table]) -> None:
    """`tables`: by feature."""
    if data.of and BATCH in tables:
        raise ValueError(f'data.of: a feature is called "{BATCH}", which here means the whole batch; rename it')
    for name, of in data.of.items():
        if name in tables:
            check_feature(name, of, data)
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


def check_feature(name: str, of: str, data: Data) -> None:
    if of != BATCH:
        raise ValueError(f'data.of: {name} is a feature, which belongs to samples or the "{BATCH}", not {of!r}')
    if format_of(data.format).has_files:
        raise ValueError(
            f'data.of: {name} = "{BATCH}" needs a data set of your own, which makes batches; {data.format} has samples'
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
