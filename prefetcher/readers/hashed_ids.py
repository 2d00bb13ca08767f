"""Hashes strings and numbers to rows of a table, for data.columns.hash.

missing   null                      row 0, which no value gets
value     hash: xxh3_64(bytes)      row 1 + hash % (num_embeddings - 1)

bytes: a string's UTF-8, an integer's int64, little-endian. Readers keep hashes; rows are made of them batch by batch.
With data.columns.hash_by_value, text and floats that are a whole number have the bytes of this integer, other floats
and booleans those of their text in Python. data.columns.value_rule:

1    (here "earlier") a float is a whole number if its text in numpy is one: 1000000.0 in float32 is the text 1e+06
2    any float is, below the first whole number that its type may have rounded; from there on it is refused. So is text
     with such an exponent, from 2**53 on
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.id_check import ByValue
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.checkpoint_manifest import IdType

SHORT = 17  # digits, which int64 holds whatever they are
SHORT_WHOLE = r"^[\s\v]*(-?(?:0|[1-9][0-9]{0,16}))(?:\.0*)?[\s\v]*$"
FLIP, FACTOR = np.uint64(0xC73AB174C5ECD5A2), np.uint64(0x9FB21C651E98DF25)  # of xxh3
WHOLE = re.compile(rb"\s*(-?(?:0|[1-9][0-9]*))(?:\.0*)?\s*")
EXPONENT = re.compile(rb"\s*[+-]?[0-9]+(?:\.[0-9]*)?[eE]\+[0-9]{1,3}\s*")
EXACT = {2: 2**11, 4: 2**24, 8: 2**53}  # bytes of a float -> below this, it holds every whole number


class Inexact(ValueError):
    """A whole number that may stand for another."""

    def __init__(self, value: Any, limit: int) -> None:
        self.value = value
        super().__init__(
            f"the id {value.decode() if isinstance(value, bytes) else value} is a float of {limit} or more, which may "
            "stand for another whole number; write ids as integers, or as text with all digits"
        )


def hashed_rows(values: Any, num_embeddings: int, *, by_value: ByValue) -> Ids:
    """Returns the rows of a pyarrow array that `can_hash`. Raises Inexact."""
    return rows_of_hashes(hashes_of(values, by_value=by_value), num_embeddings)


def hashes_of(values: Any, *, by_value: ByValue) -> Any:
    """Returns uint64 hashes, null where a value is, of a pyarrow array that `can_hash`.

    `by_value`: as in `CheckedFeature`. Raises Inexact."""
    if pa.types.is_integer(values.type):
        numbers = (values.fill_null(0) if values.null_count else values).to_numpy().astype(np.int64)  # uint64: its bits
        mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
        return pa.array(integer_hashes(numbers), mask=mask)
    encoded = values
    if pa.types.is_dictionary(values.type) and (values.dictionary.null_count or len(values.dictionary) > len(values)):
        encoded = values.dictionary_decode()
    if pa.types.is_floating(encoded.type):
        encoded = pc.if_else(pc.is_nan(encoded), None, encoded)
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return pa.array(distinct_hashes(encoded.dictionary, by_value=by_value)).take(encoded.indices)


def distinct_hashes(values: Any, *, by_value: ByValue) -> U64:
    """Returns the hashes of values without nulls. Raises Inexact."""
    if pa.types.is_integer(values.type):
        return integer_hashes(values.to_numpy().astype(np.int64))
    if pa.types.is_floating(values.type) or pa.types.is_boolean(values.type):
        numbers = values.to_numpy(zero_copy_only=False)
        refuse_inexact(numbers, by_value)
        text = str if by_value == "earlier" else text_of
        return text_hashes([by_its_value(text(own).encode(), by_value) for own in numbers])
    texts = values.cast(pa.large_binary())
    return hashes_by_value(texts, by_value) if by_value else text_hashes(texts.to_numpy(zero_copy_only=False).tolist())


def refuse_inexact(numbers: npt.NDArray[Any], rule: ByValue) -> None:
    if rule == "earlier" or numbers.dtype.kind != "f":
        return
    limit, wide = EXACT[numbers.itemsize], numbers.astype(np.float64)
    beyond = np.isfinite(wide) & (np.abs(wide) >= limit) & (np.rint(wide) == wide)
    if beyond.any():
        raise Inexact(wide[np.argmax(beyond)].item(), limit)


def text_of(number: Any) -> str:
    """Returns the text of a number of numpy in Python, the same for all floats of one value: 1234567.5 in float32 is
    not 1.2345675e+06."""
    return str(float(str(number))) if isinstance(number, np.floating) else str(number)


def hashes_by_value(texts: Any, rule: ByValue) -> U64:
    """Arrow finds the short whole numbers at once; the rest is checked one by one."""
    are_whole = pc.match_substring_regex(texts, SHORT_WHOLE).to_numpy(zero_copy_only=False)
    hashes = np.empty(len(texts), np.uint64)
    numbers = pc.replace_substring_regex(texts.filter(pa.array(are_whole)), SHORT_WHOLE, r"\1").cast(pa.large_string())
    hashes[are_whole] = integer_hashes(numbers.cast(pa.int64()).to_numpy())
    others = texts.filter(pa.array(~are_whole)).to_numpy(zero_copy_only=False).tolist()
    hashes[~are_whole] = text_hashes(
        [by_its_value(text, rule) if len(text) > SHORT or b"+" in text else text for text in others]
    )
    return hashes


def text_hashes(texts: list[bytes]) -> U64:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts))


def integer_hashes(values: I64) -> U64:
    """Hashes the 8 bytes of each number, many at once: xxh3_64 for this length, with its secret and seed 0."""
    words = np.ascontiguousarray(values).view(np.uint64)
    keyed = (words << np.uint64(32) | words >> np.uint64(32)) ^ FLIP
    keyed ^= rotated(keyed, 49) ^ rotated(keyed, 24)
    keyed *= FACTOR
    keyed ^= (keyed >> np.uint64(35)) + np.uint64(8)
    keyed *= FACTOR
    return keyed ^ keyed >> np.uint64(28)


def rotated(words: U64, bits: int) -> U64:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)


def rows_of_hashes(hashes: Any, num_embeddings: int) -> Ids:
    """Returns the rows of uint64 hashes. A table of one row has only row 0."""
    if num_embeddings == 1:
        return np.zeros(len(hashes), np.int64)
    number = np.uint64(num_embeddings - 1)
    plain = (hashes.fill_null(0) if hashes.null_count else hashes).to_numpy()
    rows: Ids = (plain - plain // number * number).view(np.int64) + 1  # numpy vectorizes division, not the remainder
    if hashes.null_count:
        rows[hashes.is_null().to_numpy(zero_copy_only=False)] = 0
    return rows


def by_its_value(text: bytes, rule: ByValue) -> bytes:
    """Returns the bytes of an integer of 64 bits if the text is one, such as 35 and 35.0; other text unchanged. Raises
    Inexact."""
    if rule is True and EXPONENT.fullmatch(text) and (exact := Decimal(text.decode())) == exact.to_integral_value():
        if abs(exact) >= EXACT[8]:
            raise Inexact(text, EXACT[8])
        text = str(int(exact)).encode()
    found = WHOLE.fullmatch(text)
    number = int(found[1]) if found else 2**64
    return (number % 2**64).to_bytes(8, "little") if -(2**63) <= number < 2**64 else text


def can_hash(kind: Any, *, by_value: ByValue) -> bool:
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
        *((pa.types.is_floating, pa.types.is_boolean) if by_value else ()),
    )
    return any(test(own) for test in tests)


def is_text(kind: Any) -> bool:
    return can_hash(kind, by_value=False) and not pa.types.is_integer(kind)


def is_all_missing(kind: Any) -> bool:
    """Whether it is the type of a column without any value, as pandas and Spark write one."""
    return bool(pa.types.is_null(getattr(kind, "value_type", kind)))


def type_of(kind: Any) -> IdType:
    """`kind`: of ids, or of lists of them."""
    return "text" if is_text(kind) or is_text(getattr(kind, "value_type", kind)) else "integers"


def first_kinds(schemas: Sequence[Any]) -> dict[str, Any]:
    """Returns the type of each column in the first of several files that has a value in it."""
    return {own.name: own.type for schema in reversed(schemas) for own in schema if not is_all_missing(own.type)}
