"""Computes rows' first values with a counter-based generator: they need no storage and no order of creation.

Philox 4x32-10 turns a counter of four 32-bit words and a key of two into four random words, for columns 4c to 4c + 3:

    key      seed, low and high half
    counter  row, low 32 bits | row's bits 32 to 47 + c << 16 | xxh3_64 of the table's name, low and high half

    uniform  lo + (hi - lo) * (word >> 8) / 2**24 in float64, rounded to float32 (may reach hi if hi - lo is tiny beside
             it)
    normal   Box-Muller on words 0, 1 and on words 2, 3: std * sqrt(-2 ln((w0 + 1) / 2**32)) * cos, sin(2 pi w1 / 2**32)
             in float64
    constant the constant, without a random word
    linear   0: the last weight in a row, if the table has linear weights

Weights of fp16 and bf16 are these float32 values, rounded to the nearest, ties to even; a record's master weights are
the values themselves. A table's values do not depend on its index or width, so they stay the same when tables are
added, moved or widened. A piece of a table has its columns' values: c counts from its first column.
"""

from collections.abc import Callable
from functools import partial
from math import cos, log, pi, sin, sqrt
from typing import NamedTuple

import numpy as np
import xxhash

from rowcast.job.embedding_tables import parse_init
from rowcast.job.tables import TableSpec
from rowcast.protocol.released_rows import ReleasedRows
from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.compiled import compiled_loop, compiled_part, inlined
from rowcast.runtime.first_values import FirstValues, RowRule

UNIFORM, NORMAL, CONSTANT = 0, 1, 2
KINDS = {"uniform": UNIFORM, "normal": NORMAL, "constant": CONSTANT}

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

RowsOnDemand = Callable[[I64], F32]  # numbers of rows [n] -> their first values, f32 [n, width]
Words = tuple[np.uint64, np.uint64, np.uint64, np.uint64]  # each below 2**32


class Initializer(NamedTuple):
    """What decides a table's first values, in a form for compiled loops."""

    kind: int  # UNIFORM on [a, b), NORMAL with mean a and deviation b, CONSTANT a
    a: float
    b: float
    seed: np.uint64
    table: np.uint64  # xxh3_64 of the table's name
    linear: bool  # the last weight in a row is its linear weight
    first: np.uint64  # c of the first column


def table_initializer(seed: int, table: TableSpec) -> Initializer:
    """`seed`: the job's, 0 to 2**63 - 1."""
    kind, a, b = parse_init(table.init, table.num_embeddings)
    name = np.uint64(xxhash.xxh3_64_intdigest(table.name.encode()))
    first = np.uint64(table.first_column // 4)
    return Initializer(KINDS[kind], a, b, np.uint64(seed), name, table.linear, first)


def initial_rows(seed: int, table: TableSpec, rows: I64) -> F32:
    """Returns the first values of `rows` [n] of a table, f32 [n, embedding_dim]. A row's bits never depend on other
    rows."""
    out = np.empty((len(rows), table.embedding_dim), np.float32)
    fill_initial(table_initializer(seed, table), rows, out)
    return out


def rows_by(rule: RowRule, numbers: I64) -> F32:
    """Returns the first values of these rows, f32 [n, width]."""
    values = initial_rows(rule.seed, spec_of(rule), numbers)
    values[numbers == rule.zero_row] = 0
    return values


def rows_on_demand(first: FirstValues) -> RowsOnDemand:
    """Raises DataError for a released file that is not as long as it was."""
    return ReleasedRows(first) if first.rule is None else partial(rows_by, first.rule)


def spec_of(rule: RowRule) -> TableSpec:
    return TableSpec(
        index=0,
        name=rule.table,
        num_embeddings=rule.num_rows,
        embedding_dim=rule.width,
        features=(),
        pooling="none",
        init=rule.init,
    )


@compiled_loop
def fill_initial(initializer: Initializer, rows: I64, out: F32) -> None:
    """Fills out[i], f32 [n, dim], with the first values of row rows[i]. For Python and for compiled loops."""
    for i in range(len(rows)):
        fill_row(initializer, rows[i], out[i])


@compiled_loop
def fill_row(initializer: Initializer, row: int, out: F32) -> None:
    """Fills `out`, f32 [dim]."""
    if initializer.linear:
        out[-1] = 0.0
        out = out[:-1]
    if initializer.kind == CONSTANT:
        out[:] = initializer.a
        return
    row_low, row_high = np.uint64(row) & LOW, np.uint64(row) >> HALF
    table_low, table_high = initializer.table & LOW, initializer.table >> HALF
    seed_low, seed_high = initializer.seed & LOW, initializer.seed >> HALF
    whole = len(out) // 4 if initializer.kind == UNIFORM else 0
    for own in range(whole):  # without a branch or a call: the compiler computes eight at once
        block = row_high | ((initializer.first + np.uint64(own)) << np.uint64(16))
        words = philox((row_low, block, table_low, table_high), (seed_low, seed_high))
        at = np.uint64(4 * own)
        out[at] = uniform_1(words[0], initializer.a, initializer.b)
        out[at + np.uint64(1)] = uniform_1(words[1], initializer.a, initializer.b)
        out[at + np.uint64(2)] = uniform_1(words[2], initializer.a, initializer.b)
        out[at + np.uint64(3)] = uniform_1(words[3], initializer.a, initializer.b)
    for first in range(4 * whole, len(out), 4):
        block = row_high | ((initializer.first + np.uint64(first // 4)) << np.uint64(16))
        words = philox((row_low, block, table_low, table_high), (seed_low, seed_high))
        values = (
            uniform(words, initializer.a, initializer.b)
            if initializer.kind == UNIFORM
            else normal(words, initializer.a, initializer.b)
        )
        for column in range(min(4, len(out) - first)):
            out[first + column] = values[column]


@inlined
def philox(counter: Words, key: tuple[np.uint64, np.uint64]) -> Words:
    """Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> HALF) ^ c1 ^ k0, product_1 & LOW, (product_0 >> HALF) ^ c3 ^ k1, product_0 & LOW
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return c0, c1, c2, c3


@compiled_part
def uniform(words: Words, low: float, high: float) -> tuple[float, float, float, float]:
    return (
        uniform_1(words[0], low, high),
        uniform_1(words[1], low, high),
        uniform_1(words[2], low, high),
        uniform_1(words[3], low, high),
    )


@compiled_part
def uniform_1(word: np.uint64, low: float, high: float) -> float:
    return low + (high - low) * (np.int64(word >> np.uint64(8)) * 2.0**-24)


@compiled_part
def normal(words: Words, mean: float, deviation: float) -> tuple[float, float, float, float]:
    first = normal_2(words[0], words[1], mean, deviation)
    second = normal_2(words[2], words[3], mean, deviation)
    return first[0], first[1], second[0], second[1]


@compiled_part
def normal_2(word_0: np.uint64, word_1: np.uint64, mean: float, deviation: float) -> tuple[float, float]:
    radius = deviation * sqrt(-2.0 * log((np.int64(word_0) + 1) * 2.0**-32))
    angle = 2.0 * pi * (np.int64(word_1) * 2.0**-32)
    return mean + radius * cos(angle), mean + radius * sin(angle)
