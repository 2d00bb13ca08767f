"""Maps raw ids to rows by the rule of training.

hash                 text, or integers as int64: `readers/hashed_ids.py`; missing: row 0
hash of text         the same, where training had no integers, as in CSV
hash of integers     the same, where training had no text
hash by value        text, integers, floats and booleans: the same with data.columns.hash_by_value, by rule 1
hash by value 2      the same by rule 2 of data.columns.value_rule
remainder            of Criteo's hashes, 0 to 2**32 - 1, by num_embeddings; missing: row 0
unsigned remainder   the same of all bits of an integer, as in npy files
buckets              of numbers or times, prepared as in training: `prefetcher/readers/arrow_rows.py`
row                  the id is the row; data.on_invalid_id decides about others and missing ones
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import Rules, bucket_ids, prepared
from rowcast.prefetcher.readers.hashed_ids import Inexact, can_hash, hashed_rows, is_text
from rowcast.prefetcher.readers.id_check import LARGEST_ID, MISSING, ByValue, CheckedFeature, job_features
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import DataError
from rowcast.serving import index_loops
from rowcast.serving.version_file import IdRule, Rule

HASHES: dict[Rule, tuple[ByValue, str]] = {  # rule -> `CheckedFeature.by_value`, what was hashed
    "hash": (False, "text or integers"),
    "hash of text": (False, "text"),
    "hash of integers": (False, "integers"),
    "hash by value": ("earlier", "text or numbers"),
    "hash by value 2": (True, "text or numbers"),
}
OF_TYPES: dict[str, Rule] = {"text": "hash of text", "integers": "hash of integers"}
DIVISIONS: dict[Rule, int] = {"remainder": index_loops.REMAINDER, "row": index_loops.ROW}


def id_rules(job: Job, types: Mapping[str, str]) -> tuple[IdRule, ...]:
    """In the order of the job's features. `types`: as `TrainingData.id_types`."""
    data = job.data
    return tuple(
        IdRule(
            feature=feature.name,
            table=feature.table,
            rule="buckets"
            if feature.name in data.columns.prepare
            else rule_of(data.format, feature, types.get(feature.name, ""), unsigned=data.hash),
            on_invalid=data.on_invalid_id,
        )
        for feature in job_features(job)
    )


def rule_of(form: str, feature: CheckedFeature, kind: str, *, unsigned: bool) -> Rule:
    if feature.hashed and feature.by_value:
        return "hash by value" if feature.by_value == "earlier" else "hash by value 2"
    if feature.hashed:
        return "hash of text" if format_of(form).text_cells else OF_TYPES.get(kind, "hash")
    return "remainder" if form == "criteo-tsv" else "unsigned remainder" if unsigned else "row"


def divided_by(rule: IdRule) -> int:
    """Returns the rule by which compiled loops turn int64 into rows, AS_IS if they cannot. pyarrow takes 100 us."""
    return DIVISIONS.get(rule.rule, index_loops.AS_IS)


def rows_of(rule: IdRule, num_embeddings: int, ids: Any, prepare: Rules) -> I64:
    """Returns rows i64 [n]. `ids`: a numpy or pyarrow array, or a list; None, null and -2**63 are missing.

    Raises ValueError, with the feature's name.
    """
    values = arrow_of(rule, ids)
    if rule.rule == "buckets":
        return bucket_ids(prepared_numbers(values, prepare, rule.feature), prepare[rule.feature].bounds)
    if rule.rule in HASHES:
        by_value, needed = HASHES[rule.rule]
        others = {"text": pa.types.is_integer, "integers": is_text}.get(needed, pa.types.is_null)
        is_other = others(values.type) and values.null_count < len(values)
        if not can_hash(values.type, by_value=by_value) or is_other:
            raise ValueError(f"feature {rule.feature}: ids are {values.type}, but training hashed {needed}")
        try:
            rows: I64 = hashed_rows(values, num_embeddings, by_value=by_value)
        except Inexact as error:
            raise ValueError(f"feature {rule.feature}: {error}") from None
        return rows
    if rule.rule == "unsigned remainder":
        return unsigned_remainders(rule, num_embeddings, values)
    rows_given = integers(rule, values)
    return (
        remainders(rule, num_embeddings, rows_given)
        if rule.rule == "remainder"
        else checked(rule, num_embeddings, rows_given)
    )


def prepared_numbers(values: Any, prepare: Rules, name: str) -> npt.NDArray[Any]:
    """Returns numbers [n], prepared as in training. `values`: as for `pa.array`. Raises ValueError with the name."""
    try:
        given = values if isinstance(values, pa.Array) else pa.array(values)
        return prepared(given, prepare, name, lambda i: f"value {i}")
    except (pa.ArrowException, DataError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from None


def arrow_of(rule: IdRule, ids: Any) -> Any:
    if isinstance(ids, str | bytes | bytearray | Mapping):  # pyarrow takes their letters, or keys
        raise ValueError(f"feature {rule.feature}: ids are {type(ids).__name__}; give a list or an array of ids")
    try:
        values = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"feature {rule.feature}: ids are no array of one type ({error})") from None
    if pa.types.is_null(values.type):
        return values.cast(pa.string() if rule.rule in HASHES else pa.int64())
    return values


def integers(rule: IdRule, values: Any) -> I64:
    if not pa.types.is_integer(values.type):
        raise ValueError(f"feature {rule.feature}: ids are {values.type}, but training read integers")
    try:
        ids: I64 = values.cast(pa.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise ValueError(f"feature {rule.feature}: an id is beyond {LARGEST_ID}, the largest int64") from None
    return ids


def unsigned_remainders(rule: IdRule, num_embeddings: int, values: Any) -> I64:
    if not pa.types.is_integer(values.type) or values.null_count:
        raise ValueError(
            f"feature {rule.feature}: training read integers of {values.type.bit_width} bits, none missing"
        )
    numbers = values.to_numpy(zero_copy_only=False)
    unsigned = numbers.view(numbers.dtype.str.replace("i", "u")).astype(np.uint64)
    rows: I64 = (unsigned % np.uint64(num_embeddings)).astype(np.int64)
    return rows


def remainders(rule: IdRule, num_embeddings: int, ids: I64) -> I64:
    is_missing = ids == MISSING
    outside = ((ids < 0) | (ids >= index_loops.BELOW)) & ~is_missing
    if outside.any():
        raise ValueError(
            f"feature {rule.feature}: id {ids[np.argmax(outside)]} is no hash from 0 to {index_loops.BELOW - 1}"
        )
    return np.asarray(np.where(is_missing, 0, ids % np.int64(num_embeddings)), np.int64)


def checked(rule: IdRule, num_embeddings: int, ids: I64) -> I64:
    outside = ids.view(np.uint64) >= np.uint64(num_embeddings)  # a negative id is a huge one
    if not outside.any():
        return ids
    if rule.on_invalid == "error":
        first = int(ids[np.argmax(outside)])
        described = "a missing id" if first == MISSING else f"id {first}"
        raise ValueError(
            f"feature {rule.feature}: {described} is outside table {rule.table} (num_embeddings = {num_embeddings}), "
            'and training had data.on_invalid_id = "error"'
        )
    if rule.on_invalid == "zero":
        return np.where(outside, 0, ids)
    return np.where(ids == MISSING, 0, ids % np.int64(num_embeddings))
