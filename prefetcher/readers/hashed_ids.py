"""Hashes strings and integers to rows of a table, for data.columns.hash.

missing   row 0, which no value gets
value     row 1 + xxh3_64(bytes) % (num_embeddings - 1)      bytes: a string's UTF-8, an integer's int64, little-endian
"""

from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rowcast.prefetcher.readers.columns import Ids


def hashed_rows(values: Any, num_embeddings: int) -> Ids:
    """Returns the rows of a pyarrow array of strings, binaries or integers. A table of one row has only row 0."""
    plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    encoded = plain.dictionary_encode()
    if num_embeddings == 1 or not len(encoded.dictionary):
        return np.zeros(len(values), np.int64)
    texts = value_bytes(encoded.dictionary)
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts))
    rows = np.append(1 + (hashes % np.uint64(num_embeddings - 1)).astype(np.int64), 0)  # the last is for missing ids
    taken: Ids = rows[encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)]
    return taken


def value_bytes(values: Any) -> list[bytes]:
    if pa.types.is_integer(values.type):
        wide = values.to_numpy(zero_copy_only=False).astype("<i8")  # uint64 keeps its bits
        own: list[bytes] = wide.view("V8").tolist()
        return own
    texts: list[bytes] = values.cast(pa.large_binary()).to_numpy(zero_copy_only=False).tolist()
    return texts


def can_hash(kind: Any) -> bool:
    own = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (
        pa.types.is_integer,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    )
    return any(test(own) for test in tests)
