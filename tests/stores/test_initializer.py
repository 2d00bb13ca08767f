"""First values of rows: the generator's published answers, their independence of order, and their statistics."""

from typing import Any

import numba
import numpy as np
import pytest
import xxhash

from rowcast.job.tables import TableSpec
from rowcast.protocol.first_values import fill_row, initial_rows, philox, table_initializer
from rowcast.runtime.compiled import STORES_PAST_CACHES as IS_X86

ONES = 0xFFFFFFFF


def table(
    init: str = "uniform",
    dim: int = 8,
    name: str = "t_cat_0",
    index: int = 0,
    num_embeddings: int = 10_000,
    *,
    linear: bool = False,
) -> TableSpec:
    return TableSpec(
        index=index,
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=dim,
        features=("cat_0",),
        pooling="sum",
        init=init,
        linear=linear,
    )


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (np.uint64(word) for word in counter)
    return tuple(int(word) for word in philox((c0, c1, c2, c3), (np.uint64(key[0]), np.uint64(key[1]))))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert words(counter, key) == answer


def expected_words(seed: int, name: str, row: int, column: int) -> tuple[int, ...]:
    """The documented counter and key of a column's call."""
    table_hash = xxhash.xxh3_64_intdigest(name.encode())
    counter = (row & ONES, (row >> 32) | (column // 4) << 16, table_hash & ONES, table_hash >> 32)
    return words(counter, (seed & ONES, seed >> 32))


def test_uniform_values_follow_the_documented_formula() -> None:
    seed, row = 2**40 + 7, 2**47 + 2**33 + 5
    got = initial_rows(seed, table("uniform:-0.5,0.25", dim=11, num_embeddings=2**48), np.array([row]))[0]
    units = [expected_words(seed, "t_cat_0", row, column)[column % 4] >> 8 for column in range(11)]
    np.testing.assert_array_equal(got, np.array([-0.5 + 0.75 * (unit / 2**24) for unit in units]).astype(np.float32))


def test_normal_values_follow_the_documented_formula() -> None:
    got = initial_rows(3, table("normal:2", dim=6), np.array([9]))[0]
    for column in (0, 2, 4):
        w = expected_words(3, "t_cat_0", 9, column)[column % 4 : column % 4 + 2]
        radius, angle = 2 * np.sqrt(-2 * np.log((w[0] + 1) / 2**32)), 2 * np.pi * w[1] / 2**32
        np.testing.assert_allclose(
            got[column : column + 2], [radius * np.cos(angle), radius * np.sin(angle)], rtol=1e-6
        )


@pytest.mark.parametrize("init", ["uniform", "normal:0.1", "constant:0.3"])
@pytest.mark.parametrize("dim", [1, 4, 7, 16])
def test_values_do_not_depend_on_order_or_block(init: str, dim: int) -> None:
    spec, rows = table(init, dim), np.arange(300)
    whole = initial_rows(5, spec, rows)
    shuffled = np.random.default_rng(0).permutation(rows)
    np.testing.assert_array_equal(initial_rows(5, spec, shuffled), whole[shuffled])
    np.testing.assert_array_equal(
        np.concatenate([initial_rows(5, spec, rows[i : i + 7]) for i in range(0, 300, 7)]), whole
    )
    assert whole.dtype == np.float32
    assert initial_rows(5, spec, rows[:0]).shape == (0, dim)


def test_values_depend_on_seed_name_row_and_column_and_on_nothing_else() -> None:
    rows = np.arange(50)
    base = initial_rows(5, table(), rows)
    assert len(np.unique(base)) > 395, "rows and columns differ"
    np.testing.assert_array_equal(initial_rows(5, table(index=9), rows), base)
    np.testing.assert_array_equal(initial_rows(5, table(dim=16), rows)[:, :8], base)
    for other in (
        initial_rows(6, table(), rows),
        initial_rows(5 + 2**32, table(), rows),
        initial_rows(5, table(name="t_cat_1"), rows),
    ):
        assert not np.any(other == base)
    high = table(num_embeddings=2**48, init="uniform:0,1")
    assert not np.any(initial_rows(5, high, rows) == initial_rows(5, high, rows + 2**32))


def test_uniform_without_bounds_spans_one_over_the_root_of_the_rows() -> None:
    values = initial_rows(1, table(num_embeddings=400), np.arange(20_000))
    assert -0.05 <= values.min() < -0.0499
    assert 0.0499 < values.max() < 0.05
    assert abs(float(values.mean(dtype=np.float64))) < 4 * 0.05 / np.sqrt(3 * values.size)


def test_constant_is_the_constant() -> None:
    assert initial_rows(1, table("constant:-0.25", dim=3), np.arange(2)).tolist() == [[-0.25] * 3] * 2


@pytest.mark.parametrize("init", ["uniform", "normal:0.1", "constant:2"])
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_a_linear_weight_begins_as_0_and_changes_no_other_weight(init: str, dim: int) -> None:
    rows = np.arange(9)
    found = initial_rows(5, table(init, dim + 1, linear=True), rows)
    assert found[:, :dim].tobytes() == initial_rows(5, table(init, dim), rows).tobytes()
    assert not found[:, dim].any()


@pytest.mark.skipif(not IS_X86, reason="looks for an instruction of x86 processors")
def test_uniform_values_are_computed_several_at_once() -> None:
    row_loop: Any = fill_row
    again = numba.njit(nogil=True, _nrt=False)(row_loop.py_func)
    again(table_initializer(5, table(dim=64)), 3, np.empty(64, np.float32))
    (code,) = again.inspect_asm().values()
    assert "pmuludq" in code  # multiplies several words
