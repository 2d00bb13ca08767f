"""Implements the kernels for CUDA devices in Triton. Each pass reads its input once; the host never waits.

`update` is one launch, and a second one if the batch has long rows. There are no atomics and no sorting: the plan has
grouped the look-ups, and every sum has one order, given in `trainer.kernels`. So a step always has the same bits, with
any block table.

The fused interaction: a program has one sample, whose vectors it reads once.

    forward     v[0], ..., v[i - 1] times v[i], for each i; only the pairs i > j, in tiles of 2, 4, 8, ... vectors
    backward    all gradients together, one vector's share after the other
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

import rowcast.protocol.plan
import rowcast.trainer.kernels
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.tables import ALIGNMENT, aligned
from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, row_optimizers, torch_ops
from rowcast.trainer.kernels.triton_kernels import (
    apply_kernel,
    device,
    join_kernel,
    kernel,
    lookup_kernel,
    row_sums,
    segments_kernel,
)

Options = dict[str, Any]
RULES = row_optimizers.having("train_block")
TRAIN = {}
for kind, file in RULES.items():
    vars(file).update(tl=tl, row_sums=row_sums)  # these files are also read where Triton is missing
    TRAIN[kind] = device(file.train_block)
SMALLEST, LARGEST = 4, 1024  # columns
UNUSED = (None,) * 5  # unique_slots to rate, for kernels that train no rows

# The block shapes of the kernels, by the width of a row and the bytes of a weight.
#
# A warp moves 16 bytes per lane, so its 32 lanes hold 128 fp32 values: eight rows of dimension 16, or a quarter of a
# row of dimension 512. There is no tuning at run time: a kernel that writes in place cannot run twice, and a run must
# not depend on timings. No entry changes the bits of a result.
#
# Sums of a row's look-ups wait for memory, so a thread should have many loads under way. The compiler gives a block of
# one warp the registers for that; larger blocks it makes smaller, and their loads wait for each other.


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    rows: int  # bags or rows per program; a power of two
    warps: int  # per program
    unroll: int  # look-ups of a row loaded at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    columns: int  # the dimension, rounded up to a power of two
    lookup: BlockShape
    chunk: BlockShape  # sums of chunks of long rows: few rows, with many look-ups in sequence
    update: BlockShape  # sums of other rows, most of one look-up, and the row optimizer; as many warps as `chunk`
    join: BlockShape  # sums of a long row's chunks: most threads per row


# by columns: rows and warps of `lookup` with weights of 4 bytes, the same with 2; rows of `chunk`, rows of `update`,
# warps of both; rows and warps of `join`
BLOCK_TABLE = {
    4: ((128, 2), (128, 2), (32, 128, 1), (8, 1)),
    8: ((128, 4), (128, 2), (16, 64, 1), (4, 1)),
    16: ((64, 4), (64, 2), (8, 32, 1), (2, 1)),
    32: ((32, 4), (64, 4), (4, 16, 1), (1, 1)),
    64: ((16, 4), (32, 4), (2, 8, 1), (1, 2)),
    128: ((8, 4), (16, 4), (1, 2, 1), (1, 2)),
    256: ((4, 4), (8, 4), (1, 4, 2), (1, 8)),
    512: ((2, 4), (4, 4), (1, 4, 4), (1, 8)),
    1024: ((1, 4), (2, 4), (1, 4, 8), (1, 8)),
}
UNROLL_LOOKUP, UNROLL_CHUNK, UNROLL_UPDATE, UNROLL_JOIN = 4, 8, 2, 16


@lru_cache
def blocks_for(dim: int, weight_bytes: int) -> Blocks:
    assert 0 < dim <= LARGEST, f"rows of {dim} columns; at most {LARGEST} are cut into blocks"
    columns = max(SMALLEST, 1 << (dim - 1).bit_length())
    wide, narrow, (chunk_rows, update_rows, warps), join = BLOCK_TABLE[columns]
    lookup = wide if weight_bytes == 4 else narrow
    return Blocks(
        columns=columns,
        lookup=BlockShape(rows=lookup[0], warps=lookup[1], unroll=UNROLL_LOOKUP),
        chunk=BlockShape(rows=chunk_rows, warps=warps, unroll=UNROLL_CHUNK),
        update=BlockShape(rows=update_rows, warps=warps, unroll=UNROLL_UPDATE),
        join=BlockShape(rows=join[0], warps=join[1], unroll=UNROLL_JOIN),
    )


def make_launcher() -> None:
    """Builds Triton's launcher or finds it in the cache. Raises RuntimeError, OSError or CalledProcessError."""
    driver.active.get_current_target()


def check_dims(dims: Iterable[int]) -> None:
    """Raises RuntimeError for rows that are too wide for a block."""
    widest = max(dims, default=0)
    if widest > LARGEST:
        raise RuntimeError(f"rows of {widest} columns; Triton's kernels take up to {LARGEST}")


def lookup(rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    num_bags = len(group.slots) if group.offsets is None else len(group.offsets) - 1
    dim, weight = rows.weight.shape[1], rows.weight
    if not len(group.slots):
        return torch.zeros(num_bags, dim, dtype=torch.float32, device=weight.device)
    pooled = torch.empty(num_bags, dim, dtype=torch.float32, device=weight.device)
    options = lookup_options(*layout_of(rows))
    divisors = None if group.offsets is None else divisors
    programs = cdiv(num_bags, options["ROWS"])
    lookup_kernel[(programs,)](pooled, weight, group.slots, group.offsets, group.weights, divisors, num_bags, **options)
    return pooled


def reduce(pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    row_grads = torch.empty(
        len(group.unique_slots), pooled_grad.shape[1], dtype=torch.float32, device=pooled_grad.device
    )
    if len(row_grads):
        run_update(pooled_grad, group, divisors, (row_grads, *UNUSED), reduce_options(row_grads.shape[1]))
    return row_grads


def apply(rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
    if rule.kind not in RULES:
        torch_ops.apply(rows, unique_slots, row_grads, rule)
    elif len(unique_slots):
        result, options = training(rows, unique_slots, rule)
        programs = cdiv(len(unique_slots), options["ROWS"])
        apply_kernel[(programs,)](row_grads.contiguous(), *result, len(unique_slots), **options)


def update(rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
    if rule.kind not in RULES:
        torch_ops.apply(rows, group.unique_slots, reduce(pooled_grad, group, divisors), rule)
    elif len(group.unique_slots):
        result, options = training(rows, group.unique_slots, rule)
        run_update(pooled_grad, group, divisors, (None, *result), options)


def run_update(
    pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, result: tuple[Any, ...], options: Options
) -> None:
    """`result`: the kernels' arguments from row_grads to rate."""
    long_rows, chunk_offsets, chunk_rows = group.chunks
    num_rows, num_chunks, num_long, dim = len(group.unique_slots), len(chunk_rows), len(long_rows), options["D"]
    blocks, sum_stride = blocks_for(dim, 4), aligned(4 * dim) // 4
    sums = torch.empty(num_chunks, sum_stride, dtype=torch.float32, device=pooled_grad.device)
    programs = cdiv(num_chunks, blocks.chunk.rows) + cdiv(num_rows, blocks.update.rows)
    segments_kernel[(programs,)](
        pooled_grad.contiguous(), divisors, group.weights, group.bag_order, group.lookup_order, group.segment_offsets,
        long_rows, chunk_offsets, chunk_rows, sums, *result, num_rows, num_chunks,
        CHUNK=rowcast.trainer.kernels.CHUNK_LOOKUPS, CHUNK_ROWS=blocks.chunk.rows,
        CHUNK_UNROLL=blocks.chunk.unroll, SUM_STRIDE=sum_stride, **options,
    )  # fmt: skip
    if num_long:
        options = options | shape_options(blocks.join)
        programs = cdiv(num_long, blocks.join.rows)
        join_kernel[(programs,)](sums, long_rows, chunk_offsets, *result, num_long, SUM_STRIDE=sum_stride, **options)


def training(rows: RecordViews, unique_slots: Tensor, rule: Rule) -> tuple[tuple[Any, ...], Options]:
    """Returns the kernels' arguments from unique_slots to rate, and their options."""
    rate, constants = RULES[rule.kind].scalars(rule)
    options = train_options(*layout_of(rows), rule.kind, constants, rule.clip)
    return (unique_slots, rows.weight, rows.master, rows.states, rate), options


def layout_of(rows: RecordViews) -> tuple[int, int, int]:
    """Returns dimension, bytes of a weight and bytes of a record. The kernels address every field by the bytes of a
    record: fields that are not views of the same records raise AssertionError.
    """
    weight, weight_bytes = rows.weight, rows.weight.element_size()
    record_bytes, first = weight.stride(0) * weight_bytes, weight.data_ptr()
    for part in rows.states if rows.master is None else (rows.master, *rows.states):
        stride, offset = part.stride(0) * part.element_size(), part.data_ptr() - first
        if stride != record_bytes or not 0 < offset < record_bytes:
            raise AssertionError(
                f"a part of the rows begins {offset} bytes after the weights and repeats every {stride} bytes; the "
                f"kernels need all parts inside one record of {record_bytes} bytes"
            )
    return weight.shape[1], weight_bytes, record_bytes


def rounded() -> Options:
    """Each operation is rounded separately, and denormal numbers are not flushed to zero: AMD's default, without this
    option."""
    of_backend = {} if torch.version.hip else {"enable_reflect_ftz": False}
    return {"enable_fp_fusion": False, **of_backend}


@lru_cache
def lookup_options(dim: int, weight_bytes: int, record_bytes: int) -> Options:
    blocks = blocks_for(dim, weight_bytes)
    return {
        **block_options(blocks.lookup, dim, blocks.columns),
        "WEIGHT_STRIDE": record_bytes // weight_bytes,
        "WEIGHT_WIDTH": padded(dim, weight_bytes, record_bytes),
    }


@lru_cache
def reduce_options(dim: int) -> Options:
    blocks = blocks_for(dim, 4)
    untrained = dict.fromkeys(
        ("RULE", "CONSTANTS", "PER_ROW", "CLIP", "WEIGHT_STRIDE", "STRIDE", "WEIGHT_WIDTH", "WIDTH")
    )
    return {**block_options(blocks.update, dim, blocks.columns), **untrained}


@lru_cache
def train_options(
    dim: int, weight_bytes: int, record_bytes: int, kind: str, constants: tuple[float, ...], clip: float | None
) -> Options:
    blocks = blocks_for(dim, weight_bytes)
    return {
        **block_options(blocks.update, dim, blocks.columns),
        "RULE": TRAIN[kind],
        "CONSTANTS": constants,
        "PER_ROW": tuple(state.per_row for state in ROW_OPTIMIZERS[kind].states),
        "CLIP": clip,
        "WEIGHT_STRIDE": record_bytes // weight_bytes,
        "STRIDE": record_bytes // 4,
        "WEIGHT_WIDTH": padded(dim, weight_bytes, record_bytes),
        "WIDTH": padded(dim, 4, record_bytes),
    }


def block_options(block: BlockShape, dim: int, columns: int) -> Options:
    return {"D": dim, "BLOCK": columns, **shape_options(block), **rounded()}


def shape_options(block: BlockShape) -> Options:
    return {"ROWS": block.rows, "UNROLL": block.unroll, "num_warps": block.warps}


def padded(dim: int, item_bytes: int, record_bytes: int) -> int:
    """Returns a field's elements with its padding up to the next multiple of 16 bytes, if records have such padding."""
    return aligned(dim * item_bytes) // item_bytes if record_bytes % ALIGNMENT == 0 else dim


def cdiv(count: int, size: int) -> int:
    return -(-count // size)


WARP_FLOATS = 2**10  # of a tile of all vectors, for a warp
MOST_WARPS = 8


def forward(bottom: Tensor, features: Tensor) -> Tensor:
    num_features, (batch_size, dim) = len(features), bottom.shape
    result = bottom.new_empty(batch_size, dim + num_features * (num_features + 1) // 2)
    if batch_size:
        interact_kernel[(batch_size,)](bottom, features, result, batch_size, **interaction_options(num_features, dim))
    return result


def backward(bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    bottom_grad, feature_grads = torch.empty_like(bottom), torch.empty_like(features)
    if len(bottom):
        interact_backward_kernel[(len(bottom),)](
            bottom, features, grad, bottom_grad, feature_grads, len(bottom), **interaction_options(*features.shape[::2])
        )
    return bottom_grad, feature_grads


def interaction_options(num_features: int, dim: int) -> dict[str, Any]:
    tile, columns = 1 << num_features.bit_length(), 1 << (dim - 1).bit_length()
    warps = min(MOST_WARPS, max(1, tile * columns // WARP_FLOATS))
    return {"N": num_features + 1, "TILE": tile, "D": dim, "BLOCK": columns, "num_warps": warps, **rounded()}


@kernel("batch_size")
def interact_kernel(
    bottom: tl.tensor,
    features: tl.tensor,
    result: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    out = result + sample * (D + N * (N - 1) // 2)
    tl.store(out + columns, tl.load(bottom + sample * D + columns, mask=columns < D), mask=columns < D)
    for k in tl.static_range(10):
        if (2 << k) <= TILE:  # vectors 2^k to 2^(k+1) - 1 have pairs with fewer vectors than the tile
            other = tl.arange(0, 2 << k)
            others = vectors_at(bottom, features, other, sample, batch_size, N, D, BLOCK)
            for i in range(1 << k, tl.minimum(2 << k, N)):
                vector = vectors_at(bottom, features, i + tl.arange(0, 1), sample, batch_size, N, D, BLOCK)
                sums = tl.reshape(row_sums(others * vector), [2 << k])
                tl.store(out + D + i * (i - 1) // 2 + other, sums, mask=other < i)


@kernel("batch_size")
def interact_backward_kernel(
    bottom: tl.tensor,
    features: tl.tensor,
    grad: tl.tensor,
    bottom_grad: tl.tensor,
    feature_grads: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    tile = tl.arange(0, TILE)
    grad += sample * (D + N * (N - 1) // 2)
    total = tl.load(grad + columns, mask=(tile == 0)[:, None] & (columns < D), other=0.0)
    for j in range(N):
        other = vectors_at(bottom, features, j + tl.arange(0, 1), sample, batch_size, N, D, BLOCK)
        more, fewer = tl.maximum(tile, j), tl.minimum(tile, j)
        is_pair = (tile != j) & (tile < N)
        pair = tl.load(grad + D + more * (more - 1) // 2 + fewer, mask=is_pair, other=0.0)
        total = tl.where(is_pair[:, None], total + pair[:, None] * other, total)
    row = (tile[:, None] - 1) * batch_size.to(tl.int64) + sample
    tl.store(bottom_grad + sample * D + columns + tile[:, None] * 0, total, mask=(tile == 0)[:, None] & (columns < D))
    tl.store(feature_grads + row * D + columns, total, mask=((tile > 0) & (tile < N))[:, None] & (columns < D))


@device
def vectors_at(
    bottom: tl.tensor,
    features: tl.tensor,
    number: tl.tensor,
    sample: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns f32 [numbers, BLOCK]: vectors of the sample; 0.0 in other columns and for numbers from N on."""
    columns = tl.arange(0, BLOCK)[None, :]
    row = (number[:, None] - 1) * batch_size.to(tl.int64) + sample
    of_bottom = tl.load(bottom + sample * D + columns, mask=(number == 0)[:, None] & (columns < D), other=0.0)
    is_feature = ((number > 0) & (number < N))[:, None]
    of_features = tl.load(features + row * D + columns, mask=is_feature & (columns < D), other=0.0)
    return tl.where((number == 0)[:, None], of_bottom, of_features)
