"""Converts batches as training scripts have them to `rowcast.protocol.batch.Batch`.

No framework is imported: `numpy.asarray` converts tensors.

    Batch                                          unchanged
    an object                                      with dense_features, sparse_features and labels, as in TorchRec
    a mapping                                      with dense, sparse and labels (or dense_features, sparse_features,
                                                   label); every other key is an array for the model
    (dense, sparse, labels)                        a tuple or list

where `labels` are [B], or [B, T] with data.columns.labels, and a mapping may have none;
dense features, labels and weights become fp32, and values that this changes are refused (`id_check.py`);

`sparse` is one of

    a KeyedJaggedTensor                            or any object with keys(), values() and lengths() or offsets():
                                                   features by name, in any order
    a mapping                                      feature -> bags
    an array of ids [B, F]                         one id per bag, features in the job's order
    a list of F bags                               features in the job's order

and the bags of a feature are ids [B], ids [B, L], a list of B lists of ids, or what nn.EmbeddingBag takes: a tuple
(ids [N], offsets [B] or [B + 1]). A list of arrays is always bags, and a tuple of arrays is always ids and offsets. The
bags of a feature that is the batch's (data.of) are ids [n].
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.prefetcher.readers.columns import Column, join_columns
from rowcast.prefetcher.readers.id_check import LARGEST_ID, refuse_changed, to_fp32
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.errors import DataError

NAMES = (("dense", "dense_features"), ("sparse", "sparse_features"), ("labels", "label"))
KNOWN = {name for names in NAMES for name in names}
SHAPES = (
    "yield rowcast.protocol.batch.Batch, or dense features, sparse features and labels as an object, a mapping or "
    "a tuple (docs/data.md)"
)

LABELS = (
    "give [B], such as labels.reshape(-1), and compare them with predictions [B]; labels [B, T] need names, such as "
    'data.columns.labels = ["click", "buy"]'
)


def as_batch(offered: Any, features: Sequence[str], where: str, label_shape: tuple[int, ...], whole: Set[str]) -> Batch:
    """`features`: names in the job's order; `whole`: those whose look-ups are the batch's. Labels are [B], or [B, T]
    with a `label_shape` of (T,). Raises DataError that starts with `where`; `BatchCheck` checks values.
    """
    if isinstance(offered, Batch):
        return offered
    parts = parts_of(offered)
    if parts is None:
        raise DataError(f"{where} is {type(offered).__name__}; {SHAPES}")
    dense, sparse, labels = parts
    if labels is None:
        labels = np.full((num_samples(dense, sparse, features, whole, where), *label_shape), np.nan, np.float32)
    own_labels = as_floats(labels, f"{where}: labels")
    if own_labels.ndim != 1 and not label_shape:
        raise DataError(f"{where}: labels have shape {list(own_labels.shape)}; {LABELS}")
    own_labels = np.atleast_1d(own_labels)
    own_dense = np.zeros((len(own_labels), 0), np.float32) if dense is None else as_floats(dense, f"{where}: dense")
    in_first_bag = {name: first_bag(sparse[name], len(own_labels)) for name in whole & keys_of(sparse)}
    columns, weighted = columns_of(
        {**sparse, **in_first_bag} if in_first_bag else sparse, features, len(own_labels), f"{where}: sparse"
    )
    ids = join_columns(columns, len(own_labels), weighted)
    inputs = {name: as_input(offered[name], f"{where}: {name}") for name in sorted(keys_of(offered) - KNOWN, key=str)}
    return Batch(
        dense=own_dense, labels=own_labels, ids=ids.ids, offsets=ids.offsets, weights=ids.weights, inputs=inputs
    )


def keys_of(value: Any) -> set[str]:
    return set(value) if isinstance(value, Mapping) else set()


def first_bag(ids: Any, size: int) -> Any:
    """Puts ids [n] of a feature that is the batch's into its first bag. Anything else may be bags already."""
    are_bags = isinstance(ids, tuple) or (
        any(np.ndim(bag) for bag in ids[:1]) if isinstance(ids, list) else np.ndim(ids) > 1
    )
    return ids if are_bags else [ids, *[()] * (size - 1)]


def num_samples(dense: Any, sparse: Any, features: Sequence[str], whole: Set[str], where: str) -> int:
    """Returns the samples of a batch without labels."""
    if dense is not None:
        return len(dense)
    if is_keyed(sparse):
        return len(keyed_lengths(sparse, where)) // max(1, len(list(sparse.keys())))
    if isinstance(sparse, Mapping):
        columns = [sparse[name] for name in features if name in sparse and name not in whole]
    else:
        columns = list(sparse) if isinstance(sparse, list | tuple) else [sparse]
    counted = [bags for bags in columns if not isinstance(bags, tuple)]  # offsets may be [B] or [B + 1]
    if not counted:
        raise DataError(f"{where} has no labels to count its samples by; give labels, or dense features [B, 0]")
    return len(counted[0])


def is_by_position(offered: Any) -> bool:
    """Returns whether the ids belong to features only by their order."""
    parts = None if isinstance(offered, Batch) else parts_of(offered)
    return parts is not None and not isinstance(parts[1], Mapping) and not is_keyed(parts[1])


def parts_of(offered: Any) -> tuple[Any, Any, Any] | None:
    if isinstance(offered, Mapping):
        found = tuple(next((offered[name] for name in names if name in offered), NAMES) for names in NAMES)
        dense, sparse, labels = (None if part is NAMES else part for part in found)
        return None if sparse is None else (dense, sparse, labels)
    if all(hasattr(offered, name) for name in ("dense_features", "sparse_features", "labels")):
        return offered.dense_features, offered.sparse_features, offered.labels
    if isinstance(offered, tuple | list) and len(offered) == 3:
        return offered[0], offered[1], offered[2]
    return None


def as_array(value: Any, dtype: type[np.generic] | None, what: str) -> npt.NDArray[Any]:
    """Raises DataError if numpy cannot read it or would drop a mask, or if ids are not integers."""
    if any(isinstance(own, np.ma.MaskedArray) for own in (value, *(value[:1] if isinstance(value, list) else ()))):
        raise DataError(f"{what} is a masked array, whose mask would be lost; give an array, such as .filled(value)")
    try:
        array = np.asarray(value)
        if dtype is np.int64 and array.size:
            require_integers(value, array)
        return array if dtype is None else array.astype(dtype, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:
        sentence = str(error).partition("\n")[0]
        raise DataError(
            f"{what} of type {type(value).__name__} cannot be read as an array ({sentence}); give CPU tensors or arrays"
        ) from None


def as_floats(value: Any, what: str) -> F32:
    """Raises DataError for a value that is not a number, and for a number that fp32 changes."""
    array = as_array(value, None, what)
    array = np.asarray(array.tolist()) if array.dtype.kind == "O" else array  # such as integers of Python
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{what} of {array.dtype} are no numbers; give bool, integers or floats, NaN where one is unknown"
        )
    cast = to_fp32(array)
    flat = array.reshape(-1, 1), cast.reshape(-1, 1)
    refuse_changed(*flat, lambda i, _: f"{what}{[int(at) for at in np.unravel_index(i, array.shape)]}")
    return cast


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def as_input(value: Any, what: str) -> npt.NDArray[Any]:
    """Returns an array of any dtype, in the byte order of this machine. Raises DataError."""
    array = as_array(value, None, what)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def require_integers(value: Any, array: npt.NDArray[Any]) -> None:
    """Raises TypeError. numpy converts integers that fit no single type to floats, and wraps large unsigned ones."""
    own = array if array.dtype.kind in "iu" else np.asarray(value, object)
    for at, each in enumerate(own.ravel()) if own.dtype.kind == "O" or beyond(own) else ():
        if isinstance(each, int | np.integer) and not -(2**63) <= each <= LARGEST_ID:
            raise TypeError(f"id {each} at {at} does not fit int64; hash ids to rows yourself, as docs/data.md shows")
        if each is None or each != each:
            raise TypeError(f"the id at {at} is missing; give missing ones an id of their own")
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, these are {array.dtype}")


def beyond(ids: npt.NDArray[Any]) -> bool:
    return ids.dtype == np.uint64 and int(ids.max()) > LARGEST_ID


def columns_of(sparse: Any, features: Sequence[str], size: int, what: str) -> tuple[list[Column], bool]:
    """Returns the features in the job's order, and whether they have weights."""
    if is_keyed(sparse):
        return keyed_columns(sparse, features, size, what)
    if isinstance(sparse, Mapping):
        require_keys(list(sparse), features, what)
        return [column(sparse[name], size, f"{what}, feature {name}") for name in features], False
    if isinstance(sparse, list | tuple):
        if len(sparse) != len(features):
            raise DataError(
                f"{what} lists {len(sparse)} features, but the tables have {len(features)}: {', '.join(features)}; "
                "give them by name, as a mapping from feature to bags"
            )
        return [
            column(bags, size, f"{what}, feature {name}") for name, bags in zip(features, sparse, strict=True)
        ], False
    ids = as_array(sparse, np.int64, what)
    if ids.shape != (size, len(features)):
        raise DataError(
            f"{what} has shape {list(ids.shape)}; give one id per sample and feature: [{size}, {len(features)}]"
        )
    return [Column(ids=ids[:, f]) for f in range(len(features))], False


def is_keyed(sparse: Any) -> bool:
    has_both = callable(getattr(sparse, "keys", None)) and callable(getattr(sparse, "values", None))
    return has_both and not isinstance(sparse, Mapping)


def keyed_columns(sparse: Any, features: Sequence[str], size: int, what: str) -> tuple[list[Column], bool]:
    keys = list(sparse.keys())
    require_keys(keys, features, what)
    values, lengths = as_array(sparse.values(), np.int64, what), keyed_lengths(sparse, what)
    if len(lengths) != len(keys) * size or lengths.sum() != len(values):
        raise DataError(
            f"{what} has {len(values)} ids in {len(lengths)} bags for {len(keys)} features of {size} samples"
        )
    given: Callable[[], Any] = getattr(sparse, "weights_or_none", lambda: None)
    weights = None if given() is None else as_floats(given(), f"{what}, weights")
    ends = np.concatenate([[0], np.cumsum(lengths)])[::size]
    columns = []
    for at in map(keys.index, features):
        own = slice(ends[at], ends[at + 1])
        columns.append(
            Column(
                ids=values[own],
                lengths=lengths[at * size : (at + 1) * size],
                weights=None if weights is None else weights[own],
            )
        )
    return columns, weights is not None


def keyed_lengths(sparse: Any, what: str) -> I64:
    if callable(getattr(sparse, "lengths", None)):
        return as_array(sparse.lengths(), np.int64, what)
    if callable(getattr(sparse, "offsets", None)):
        return np.diff(as_array(sparse.offsets(), np.int64, what))
    raise DataError(f"{what} has keys and values but neither lengths() nor offsets(); give a KeyedJaggedTensor")


def require_keys(keys: Sequence[str], features: Sequence[str], what: str) -> None:
    for feature in features:
        if feature not in keys:
            raise DataError(
                f"{what} has no feature {feature}, only {', '.join(keys) or 'none'}; "
                "add it, or remove it from its table"
            )


def column(bags: Any, size: int, what: str) -> Column:
    holds_arrays = isinstance(bags, list | tuple) and any(np.ndim(bag) for bag in bags[:1])
    if holds_arrays and isinstance(bags, tuple):
        return offset_column(bags, size, what)
    if holds_arrays:
        own = [as_array(bag, np.int64, what).reshape(-1) for bag in bags]
        lengths, ids = np.array([len(bag) for bag in own], np.int64), np.concatenate(own)
    else:
        array = as_array(bags, np.int64, what)
        if array.ndim not in (1, 2):
            raise DataError(f"{what} has {array.ndim} dimensions; give ids [B] or [B, L], or B lists of ids")
        width = array.shape[1] if array.ndim == 2 else 1
        lengths, ids = np.full(len(array), width, np.int64), array.reshape(-1)
    if len(lengths) != size:
        hint = "; give ids and offsets as a tuple, because a list holds bags" if holds_arrays else ""
        raise DataError(f"{what} has {len(lengths)} bags for {size} samples{hint}")
    return Column(ids=ids, lengths=lengths)


def offset_column(bags: tuple[Any, ...], size: int, what: str) -> Column:
    """`bags`: ids [N], and where each bag starts, [B], or [B + 1] as with `include_last_offset`."""
    expected = f"give (ids [N], offsets [{size}]) as to nn.EmbeddingBag, or a list of {size} bags"
    if len(bags) != 2:
        raise DataError(f"{what} is a tuple of {len(bags)} arrays; {expected}")
    ids, offsets = as_array(bags[0], np.int64, f"{what}, ids"), as_array(bags[1], np.int64, f"{what}, offsets")
    if ids.ndim != 1 or offsets.shape not in ((size,), (size + 1,)):
        raise DataError(f"{what} has ids {list(ids.shape)} and offsets {list(offsets.shape)}; {expected}")
    bounds = offsets if len(offsets) > size else np.append(offsets, len(ids))
    lengths = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != len(ids) or (lengths < 0).any():
        raise DataError(
            f"{what}: offsets must be where the bags start, rising from 0, and an offset [{size}] the number of ids, "
            f"{len(ids)}; they are from {bounds.min()} to {bounds.max()}"
        )
    return Column(ids=ids, lengths=lengths)
