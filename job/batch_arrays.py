"""Checks data.of and data.columns.inputs. All functions raise ValueError."""

from collections.abc import Mapping

from rowcast.job.embedding_tables import Table
from rowcast.job.formats import BATCH, Data, format_of
from rowcast.runtime.name_lists import nearest


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
