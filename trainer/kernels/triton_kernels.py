"""Defines the Triton kernels; each assigns bags or rows to programs and stores their results.

    lookup_kernel     bags                            -> pooled
    segments_kernel   chunks of long rows first,      -> their sums
                      then rows, without long ones    -> row gradients, or trained at once
    join_kernel       long rows, from chunks' sums    -> row gradients, or trained at once
    apply_kernel      rows, from row gradients        -> trained

Chunks are first, because the longest work should begin first. All except `lookup_kernel` train the rows if `row_grads`
is None.
"""

import triton.language as tl

from rowcast.trainer.kernels.triton_code import device, kernel, rows_at, scaled, sum_of, train_rows


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
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = own < num_rows
    columns = tl.arange(0, BLOCK)[None, :]
    grads = tl.load(row_grads + own.to(tl.int64)[:, None] * D + columns, mask=live[:, None] & (columns < D), other=0.0)
    slots = tl.load(unique_slots + own, mask=live, other=0)
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
