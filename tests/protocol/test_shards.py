"""Shards: one owner a row, alike everywhere, even where ids are sorted by frequency, and halved when N doubles."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowcast.job.tables import TableSpec, make_keys
from rowcast.protocol.parts import Shards
from rowcast.runtime.arrays import F64, I64

# rows of the 26 tables of Criteo Kaggle
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
BATCH_OF_A_RANK = 65_536


def table(name: str, index: int = 0, rows: int = 2**40) -> TableSpec:
    return TableSpec(
        index=index, name=name, num_embeddings=rows, embedding_dim=4, features=(name,), pooling="sum", init="uniform"
    )


def mixed(x: int) -> int:
    """SplitMix64's last three lines in Python's integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor % 2**64
    return x ^ x >> 31


rows_of = st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=30).map(lambda rows: np.array(rows, np.int64))


@given(rows_of, st.integers(1, 2**16), st.sampled_from(("clicks", "käufe", "a")), st.integers(0, 3))
def test_the_owner_follows_from_the_tables_name_and_the_block(rows: I64, count: int, name: str, index: int) -> None:
    owners = Shards([table(name, index)], count).owners(make_keys(index, rows))
    seed = xxhash.xxh3_64_intdigest(name.encode())
    golden, blocks = 0x9E3779B97F4A7C15, [row // 8 for row in rows.tolist()]
    points = [mixed((seed + block // 256 * golden) % 2**64) + block * golden for block in blocks]
    assert owners.tolist() == [(point % 2**64 >> 32) * count // 2**32 for point in points]


@given(rows_of, st.integers(1, 2**10), st.integers(1, 6))
def test_twice_as_many_shards_halve_each(rows: I64, count: int, doublings: int) -> None:
    few, many = (Shards([table("t")], n).owners(rows) for n in (count, count << doublings))
    assert (many >> doublings).tolist() == few.tolist()


def test_the_rows_of_a_block_stay_together_and_another_table_has_other_owners() -> None:
    blocks = np.arange(8 * 50_000, dtype=np.int64)
    some, others = (Shards([table(name)], 8).owners(blocks).reshape(-1, 8) for name in ("a", "b"))
    assert (some == some[:, :1]).all()
    assert 0.09 < (some[:, 0] == others[:, 0]).mean() < 0.16


def held_rows(shards: Shards, tables: list[TableSpec], samples: int, exponent: float = 1.05) -> F64:
    """The distinct rows that each owner is expected to hold in a step of `samples` look-ups of each table, whose row k
    has a probability proportional to (k + 1) ** -exponent."""
    held = np.zeros(shards.count)
    for own in tables:
        rows = np.arange(own.num_embeddings, dtype=np.int64)
        weights = (rows + 1.0) ** -exponent
        occurs = -np.expm1(samples * np.log1p(-np.minimum(weights / weights.sum(), 1 - 1e-12)))
        held += np.bincount(shards.owners(make_keys(own.index, rows)), occurs, shards.count)
    return held


@pytest.mark.parametrize(("count", "most"), [(8, 1.003), (60, 1.01), (64, 1.01)])
def test_no_owner_holds_many_more_rows_than_the_others_if_ids_are_sorted_by_frequency(count: int, most: float) -> None:
    tables = [table(f"cat_{index}", index, rows) for index, rows in enumerate(CRITEO)]
    held = held_rows(Shards(tables, count), tables, count * BATCH_OF_A_RANK)
    assert held.max() / held.mean() <= most


@pytest.mark.parametrize("count", [8, 64])
def test_ids_that_are_multiples_of_something_are_spread_as_well(count: int) -> None:
    shards = Shards([table("t")], count)
    for stride in (*range(1, 100), 233, 377, 610, 646, 987, 1024, 4096):  # in blocks; the points of Fibonacci numbers
        blocks = np.arange(100 * count, dtype=np.int64) * stride  # of blocks are close to each other
        held = np.bincount(shards.owners(blocks << 3), minlength=count)
        assert held.max() / held.mean() <= 1.5, stride
