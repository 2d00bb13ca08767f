"""Parts of records as numpy arrays, and fp32 values as elements of a part. numpy has no bfloat16: bf16 stands as its bits, uint16."""

import numpy as np
import numpy.typing as npt

from rowcast.job.schema import RowType
from rowcast.job.tables import RecordPart
from rowcast.prefetcher.stores.store import Records
from rowcast.runtime.arrays import F32, U16

Elements = npt.NDArray[np.generic]  # float32, float16, or uint16 for bf16
ELEMENTS: dict[RowType, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
BF16_NAN = 0x7FC0


def elements_of(records: Records, part: RecordPart) -> Elements:
    """A view [n, width] of a part of records u8 [n, record_bytes]."""
    elements: Elements = records.view(ELEMENTS[part.dtype])[:, part.elements]
    return elements


def rounded(values: F32, dtype: RowType) -> Elements:
    """Each value as the nearest that `dtype` has, ties to even: the bits of torch's `.to`, but for a NaN, which stays some NaN.

    What lies beyond the largest becomes an infinity.
    """
    match dtype:
        case "fp32":
            return values
        case "fp16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16)
        case "bf16":
            return upper_halves(np.ascontiguousarray(values))


def upper_halves(values: F32) -> U16:
    """bf16 is the upper half of fp32: half of its last bit is added, a little less where that bit is 0, and the lower half is cut off."""
    bits = values.view(np.uint32)
    rest = bits >> 16
    rest &= 1
    rest += bits
    rest += 0x7FFF
    rest >>= 16
    halves = rest.astype(np.uint16)
    halves[np.isnan(values)] = BF16_NAN
    return halves


def widened(elements: Elements, dtype: RowType) -> F32:
    """Elements of `dtype` as fp32, exactly."""
    if dtype == "bf16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32, copy=False)
