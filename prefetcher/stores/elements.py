"""Converts between records and numpy arrays of their elements; bf16, which numpy lacks, is stored as uint16."""

import numpy as np
import numpy.typing as npt

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import RecordPart
from rowcast.prefetcher.stores.store import Records
from rowcast.runtime.arrays import F32, U16

Elements = npt.NDArray[np.generic]  # float32, float16, or uint16 for bf16
ELEMENTS: dict[RowType, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
BF16_NAN = 0x7FC0


def elements_of(records: Records, part: RecordPart) -> Elements:
    """Returns a view [n, width] of a part of records u8 [n, record_bytes]."""
    elements: Elements = records.view(ELEMENTS[part.dtype])[:, part.elements]
    return elements


def rounded(values: F32, dtype: RowType) -> Elements:
    """Rounds to the nearest value of `dtype`, ties to even, with the bits of torch's `.to` (except which NaN).

    Values beyond the largest become infinite."""
    match dtype:
        case "fp32":
            return values
        case "fp16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16)
        case "bf16":
            return upper_halves(np.ascontiguousarray(values))


def upper_halves(values: F32) -> U16:
    """Rounds fp32 to bf16, its upper half: adds half of the last bit, slightly less if that bit is 0, and truncates."""
    bits = values.view(np.uint32)
    rounded_bits = bits >> 16
    rounded_bits &= 1
    rounded_bits += bits
    rounded_bits += 0x7FFF
    rounded_bits >>= 16
    halves = rounded_bits.astype(np.uint16)
    halves[np.isnan(values)] = BF16_NAN
    return halves


def widened(elements: Elements, dtype: RowType) -> F32:
    if dtype == "bf16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32, copy=False)
