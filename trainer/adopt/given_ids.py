"""Ids that a script gives itself: `rowcast.ahead(batches, ids=function)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, listed, nearest
from rowcast.trainer.adopt.id_program import Table
from rowcast.trainer.adopt.read_ahead import GiveIds, distinct_rows, no_ids
from rowcast.trainer.adopt.table_parameter import TableParameter

FUNCTION = "the function of rowcast.ahead(..., ids=...)"


@dataclass(frozen=True)
class LookedUp:
    """A table as `ReadAhead` knows it, which outlives tables."""

    name: str
    num_embeddings: int


def given_by(function: Callable[[Any], Any], parameters: Mapping[str, nn.Parameter]) -> GiveIds:
    """`function`: the script's. `parameters`: of its models, by name. The result raises ConfigError."""
    if function is no_ids:
        return no_ids

    def give_ids(batch: Any) -> dict[Table, I64]:
        [given] = (function(own) for own in (batch,))  # in a generator, a StopIteration is an error: it ends no loop
        if not isinstance(given, Mapping):
            raise ConfigError(f"{FUNCTION} returns a {type(given).__name__}; give a dict {{parameter: ids}}")
        ids: dict[Table, list[I64]] = {}
        for key, own in given.items():
            parameter = parameters.get(key) if isinstance(key, str) else key
            if not isinstance(parameter, nn.Parameter):
                raise ConfigError(
                    f"{FUNCTION} gives ids of {str(key)!r}, which is no parameter of an adopted model"
                    f"{nearest(str(key), parameters)}; give ids of {listed(list(parameters))}"
                )
            if isinstance(parameter, TableParameter):  # others are on the device
                table = LookedUp(parameter.table.name, len(parameter))
                ids.setdefault(table, []).append(ids_of(table, own))
        return {table: distinct_rows(table.num_embeddings, np.concatenate(own)) for table, own in ids.items()}

    return give_ids


def ids_of(table: LookedUp, given: Any) -> I64:
    ids = flat(given)
    is_id = (ids >= 0) & (ids < table.num_embeddings) if ids.dtype.kind in "iu" else np.zeros(len(ids), np.bool_)
    if not is_id.all():
        raise ConfigError(
            f"{FUNCTION} gives {ids[~is_id][0]} for {table.name}; its ids are integers from 0 to "
            f"{table.num_embeddings - 1:,}, in lists, arrays or tensors"
        )
    rows: I64 = ids.astype(np.int64)
    return rows


def flat(ids: Any) -> Any:
    """Of a tensor, an array, numbers, or a list of these: an array [n]."""
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple | np.ndarray | Tensor):
        return np.concatenate([flat(own) for own in ids if len(own)] or [np.empty(0, np.int64)])
    return (ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)).reshape(-1)
