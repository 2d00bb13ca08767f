"""Defines the Triton kernels; each assigns bags or rows to programs and stores their results.

    lookup_kernel     bags                            -> pooled
    segments_kernel   chunks of long rows first,      -> their sums
                      then rows, without long ones    -> row gradients, or trained at once
    join_kernel       long rows, from chunks' sums    -> row gradients, or trained at once
    apply_kernel      rows, from row gradients        -> trained

Chunks are first, because the longest work should begin first. All except `lookup_kernel` train the rows if `row_grads`
is None. They combine these functions, each for a block of bags or rows:

    rows_at      one look-up of each
    scaled       divided and multiplied
    sum_of       0.0 + source[index[first]] + source[index[first + 1]] + ... of each
    row_sums     the sum of each over its columns, in an order that depends only on D
    train_rows   the row optimizer on their gradients

A program holds ROWS bags or rows, BLOCK columns wide: the dimension D, rounded up to a power of two. Numbers of bags
or rows are i32 [ROWS], their values f32 [ROWS, BLOCK].

So every path applies the same operations in the same order to a gradient. Each operation is rounded separately, except
`tl.fma` where torch's operation is fused; so kernels must be launched with `rounded` (triton_ops.py), which keeps the
compiler from fusing others.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import triton
import triton.language as tl

Function = TypeVar("Function", bound=Callable[..., Any])


def device(function: Function) -> Function:
    return cast(Function, triton.jit(function))


def kernel(*counts: str) -> Callable[[Callable[..., None]], Any]:
    """Compiles a kernel, which kernel[n,] launches on n programs.

    It is not recompiled when one of the integers `counts` is 1 or a multiple of 16."""
    return cast(Callable[[Callable[..., None]], Any], triton.jit(do_not_specialize=counts))


@device
def rows_at(
    source: tl.tensor,
    stride: tl.constexpr,
    index: tl.tensor,
    place: tl.tensor,
    live: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns f32 [ROWS, BLOCK]: the rows index[place] of `source`, or rows `place` without an index.

    WIDTH: the columns to read; other columns, and rows that are not `live`, are 0.0.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    row = number_at(index, place, live).to(tl.int64)  # 16.8 M rows of 128 columns exceed 2**31 elements
    at = source + row[:, None] * stride + columns
    return tl.load(at, mask=live[:, None] & (columns < WIDTH), other=0.0).to(tl.float32)


@device
def scaled(
    values: tl.tensor,
    index: tl.tensor,
    place: tl.tensor,
    live: tl.tensor,
    divisors: tl.tensor,
    weights: tl.tensor,
    weight_order: tl.tensor,
) -> tl.tensor:
    """Divides each row by its divisor, then multiplies it by weights[weight_order[place]], or by weights[place] without
    an order."""
    if divisors is not None:
        row = number_at(index, place, live)
        values = tl.div_rn(values, tl.load(divisors + row, mask=live, other=1.0)[:, None])
    if weights is not None:
        lookup = number_at(weight_order, place, live)
        values = values * tl.load(weights + lookup, mask=live, other=0.0)[:, None]
    return values


@device
def number_at(index: tl.tensor, place: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Returns index[place], or `place` without an index."""
    return place if index is None else tl.load(index + place, mask=live, other=0)


@device
def sum_of(
    source: tl.tensor,
    stride: tl.constexpr,
    index: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    divisors: tl.tensor,
    weights: tl.tensor,
    weight_order: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tl.tensor:
    """Returns f32 [ROWS, BLOCK]: starts from 0.0 and adds the `scaled` row of each position, from first to
    first + count - 1.

    A row without further look-ups adds 0.0: a sum that starts from 0.0 is never -0.0, so this changes no bits.
    """
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, tl.max(count, 0), UNROLL):
        loaded = ()
        for k in tl.static_range(UNROLL):  # all loads before the first division, which is a branch
            live = start + k < count
            loaded += (rows_at(source, stride, index, first + (start + k), live, WIDTH, BLOCK),)  # type: ignore[assignment]
        for k in tl.static_range(UNROLL):
            live = start + k < count
            total += scaled(loaded[k], index, first + (start + k), live, divisors, weights, weight_order)
    return total


@device
def row_sums(values: tl.tensor) -> tl.tensor:
    """Returns f32 [ROWS, 1]: adds neighbours, then their sums, and so on. Each addition has two terms: the order is
    fixed."""
    for _ in tl.static_range(10):
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]), 2)
    return values


@device
def clipped(grads: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    """Clips like `torch_ops.clip_rows`."""
    norms = tl.sqrt_rn(row_sums(grads * grads))
    return grads * tl.minimum(tl.div_rn(1.0, norms + 1e-6) * CLIP, 1.0, propagate_nan=tl.PropagateNan.ALL)


@device
def train_rows(
    grads: tl.tensor,
    slots: tl.tensor,
    live: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    states: tl.tuple,
    rate: tl.tensor,
    RULE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    CLIP: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Trains the `live` rows in `slots` by one step. grads are 0 from column D on.

    Strides and widths are in elements, STRIDE and WIDTH in fp32 elements. A width includes a field's padding, which is
    read and written back unchanged: a mask that ends within 16 bytes would move each element separately. RULE, rate and
    CONSTANTS: `train_block` and `scalars` of a row optimizer. PER_ROW: which states have one element per row.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    mask = live[:, None] & (columns < WIDTH)
    weight_mask = live[:, None] & (columns < (WEIGHT_WIDTH if master is None else D))  # the master is read instead
    first = slots.to(tl.int64)[:, None]
    at_weight, at = weight + first * WEIGHT_STRIDE + columns, first * STRIDE + columns
    if master is None:
        old = tl.load(at_weight, mask=weight_mask, other=0.0).to(tl.float32)
    else:
        old = tl.load(master + at, mask=mask, other=0.0)
    olds = ()
    for i in tl.static_range(len(PER_ROW)):
        if PER_ROW[i]:
            olds += (tl.load(states[i] + first * STRIDE, mask=live[:, None], other=0.0),)  # type: ignore[assignment]
        else:
            olds += (tl.load(states[i] + at, mask=mask, other=0.0),)  # type: ignore[assignment]
    new, news = RULE(old, olds, grads if CLIP is None else clipped(grads, CLIP), rate, CONSTANTS, D)
    for i in tl.static_range(len(PER_ROW)):
        if PER_ROW[i]:
            tl.store(states[i] + first * STRIDE, news[i], mask=live[:, None])
        else:
            tl.store(states[i] + at, unpadded(news[i], olds[i], WIDTH, D, BLOCK), mask=mask)
    new = unpadded(new, old, WEIGHT_WIDTH, D, BLOCK)
    tl.store(at_weight, new.to(weight.dtype.element_ty), mask=weight_mask)
    if master is not None:
        tl.store(master + at, new, mask=mask)


@device
def unpadded(new: tl.tensor, old: tl.tensor, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Returns `new`, with `old` in the columns from D on, if there are any."""
    if WIDTH > D:
        new = tl.where(tl.arange(0, BLOCK)[None, :] < D, new, old)
    return new


@kernel("num_bags")
def lookup_kernel(
    pooled: tl.tensor,
    weight: tl.tensor,
    slots: tl.tensor,
    offsets: tl.tensor,
    weights: tl.tensor,
    divisors: tl.tensor,
    num_bags: tl.tensor,
    WEIGHT_STRIDE: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = bag < num_bags
    if offsets is None:
        rows = rows_at(weight, WEIGHT_STRIDE, slots, bag, live, WEIGHT_WIDTH, BLOCK)
        total = 0.0 + scaled(rows, slots, bag, live, None, weights, None)
    else:
        first = tl.load(offsets + bag, mask=live, other=0)
        count = tl.load(offsets + bag + 1, mask=live, other=0) - first
        total = sum_of(
            weight, WEIGHT_STRIDE, slots, first, count, None, weights, None, WEIGHT_WIDTH, BLOCK, ROWS, UNROLL
        )
    if divisors is not None:
        total = tl.div_rn(total, tl.load(divisors + bag, mask=live, other=1.0)[:, None])
    put(pooled, bag, total, live, D, D, BLOCK)


@kernel("num_rows", "num_chunks")
def segments_kernel(
    pooled_grad: tl.tensor,
    divisors: tl.tensor,
    weights: tl.tensor,
    bag_order: tl.tensor,
    lookup_order: tl.tensor,
    segment_offsets: tl.tensor,
    long_rows: tl.tensor,
    chunk_offsets: tl.tensor,
    chunk_rows: tl.tensor,
    chunk_sums: tl.tensor,
    row_grads: tl.tensor,
    unique_slots: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    states: tl.tuple,
    rate: tl.tensor,
    num_rows: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    CHUNK_UNROLL: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    RULE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    CLIP: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    chunk_programs = tl.cdiv(num_chunks, CHUNK_ROWS)
    if tl.program_id(0) < chunk_programs:
        chunk = tl.program_id(0) * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
        is_chunk = chunk < num_chunks
        which = tl.load(chunk_rows + chunk, mask=is_chunk, other=0)
        row = tl.load(long_rows + which, mask=is_chunk, other=0)
        place = chunk - tl.load(chunk_offsets + which, mask=is_chunk, other=0)
        begin = tl.load(segment_offsets + row, mask=is_chunk, other=0) + place * CHUNK
        end = tl.load(segment_offsets + row + 1, mask=is_chunk, other=0)
        size = tl.where(is_chunk, tl.minimum(end - begin, CHUNK), 0)
        chunk_sum = sum_of(
            pooled_grad, D, bag_order, begin, size, divisors, weights, lookup_order, D, BLOCK, CHUNK_ROWS, CHUNK_UNROLL
        )
        put(chunk_sums, chunk, chunk_sum, is_chunk, SUM_STRIDE, SUM_STRIDE, BLOCK)
    else:
        own = (tl.program_id(0) - chunk_programs) * ROWS + tl.arange(0, ROWS)
        live = own < num_rows
        first = tl.load(segment_offsets + own, mask=live, other=0)
        count = tl.load(segment_offsets + own + 1, mask=live, other=0) - first
        live = live & (count <= CHUNK)
        count = tl.where(live, count, 0)
        slots = None if unique_slots is None else tl.load(unique_slots + own, mask=live, other=0)
        total = sum_of(pooled_grad, D, bag_order, first, count, divisors, weights, lookup_order, D, BLOCK, ROWS, UNROLL)
        if row_grads is not None:
            put(row_grads, own, total, live, D, D, BLOCK)
        else:
            train_rows(
                total, slots, live, weight, master, states, rate,
                RULE, CONSTANTS, PER_ROW, CLIP, WEIGHT_STRIDE, STRIDE, WEIGHT_WIDTH, WIDTH, D, BLOCK,
            )  # fmt: skip


@kernel("num_long")
def join_kernel(
    chunk_sums: tl.tensor,
    long_rows: tl.tensor,
    chunk_offsets: tl.tensor,
    row_grads: tl.tensor,
    unique_slots: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    states: tl.tuple,
    rate: tl.tensor,
    num_long: tl.tensor,
    SUM_STRIDE: tl.constexpr,
    RULE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    CLIP: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = own < num_long
    row = tl.load(long_rows + own, mask=live, other=0)
    first = tl.load(chunk_offsets + own, mask=live, other=0)
    count = tl.load(chunk_offsets + own + 1, mask=live, other=0) - first
    slots = None if unique_slots is None else tl.load(unique_slots + row, mask=live, other=0)
    total = sum_of(chunk_sums, SUM_STRIDE, None, first, count, None, None, None, SUM_STRIDE, BLOCK, ROWS, UNROLL)
    if row_grads is not None:
        put(row_grads, row, total, live, D, D, BLOCK)
    else:
        train_rows(
            total, slots, live, weight, master, states, rate,
            RULE, CONSTANTS, PER_ROW, CLIP, WEIGHT_STRIDE, STRIDE, WEIGHT_WIDTH, WIDTH, D, BLOCK,
        )  # fmt: skip


@kernel("num_rows")
def apply_kernel(
    row_grads: tl.tensor,
    unique_slots: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    states: tl.tuple,
    rate: tl.tensor,
    num_rows: tl.tensor,
    RULE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    CLIP: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    columns = tl.arange(0, BLOCK)[None, :]
    grads = tl.load(row_grads + row.to(tl.int64)[:, None] * D + columns, mask=live[:, None] & (columns < D), other=0.0)
    slots = tl.load(unique_slots + row, mask=live, other=0)
    train_rows(
        grads, slots, live, weight, master, states, rate,
        RULE, CONSTANTS, PER_ROW, CLIP, WEIGHT_STRIDE, STRIDE, WEIGHT_WIDTH, WIDTH, D, BLOCK,
    )  # fmt: skip


@device
def put(
    out: tl.tensor,
    row: tl.tensor,
    values: tl.tensor,
    live: tl.tensor,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Stores `values` in rows of f32 [.., STRIDE], up to column WIDTH."""
    columns = tl.arange(0, BLOCK)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * STRIDE + columns, values, mask=live[:, None] & (columns < WIDTH))
