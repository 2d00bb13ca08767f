"""The ledger remembers as a dict would; samples are a share of the rows, chosen by key alone."""

import random

import numpy as np
import pytest

from rowcast.job.tables import make_keys
from rowcast.prefetcher.verify.checksum_loops import SAMPLE_RANGE, find_sampled
from rowcast.prefetcher.verify.ledger import INITIAL_CELLS, NEVER_WRITTEN, Ledger
from rowcast.runtime.arrays import I64


def some_keys(chance: random.Random, count: int) -> I64:
    return np.array(sorted(chance.sample(range(3000), count)), np.int64) | np.int64(chance.randrange(3) << 48)


@pytest.mark.parametrize("seed", range(5))
def test_the_ledger_knows_what_was_given_first_and_taken_last(seed: int) -> None:
    chance, ledger = random.Random(seed), Ledger()
    known: dict[int, tuple[int, int]] = {}
    unread: set[int] = set()
    for step in range(60):
        keys = some_keys(chance, chance.randrange(200))
        sums = np.array([chance.randrange(2**40) for _ in keys], np.int64)
        if chance.random() < 0.5:
            ledger.taken(keys, sums, step)
            known |= {key: (value, step) for key, value in zip(keys.tolist(), sums.tolist(), strict=True)}
            unread |= set(keys.tolist())
        else:
            ledger.given(keys, sums)
            known = {
                key: (value, NEVER_WRITTEN) for key, value in zip(keys.tolist(), sums.tolist(), strict=True)
            } | known
            unread -= set(keys.tolist())
        assert ledger.num_unread == len(unread)
    assert ledger.num_rows == len(known) > INITIAL_CELLS, "the ledger grew"
    asked = np.array([*known, 2**55], np.int64)
    entries = ledger.look_up(asked)
    assert entries.known.tolist() == [True] * len(known) + [False]
    assert list(zip(entries.checksums.tolist(), entries.steps.tolist(), strict=True))[:-1] == list(known.values())
    assert ledger.unread_keys().tolist() == sorted(unread)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_about_the_share_of_the_rows_of_each_table_is_sampled(share: float) -> None:
    for table in (0, 1, 25):
        keys = make_keys(table, np.arange(100_000))
        found = find_sampled(keys, round(share * SAMPLE_RANGE), np.empty(len(keys), np.int64))
        assert abs(found - share * len(keys)) < 5 * (share * len(keys)) ** 0.5


def test_a_share_of_one_samples_every_row_and_a_larger_share_all_of_a_smaller() -> None:
    keys = make_keys(3, np.arange(1000))
    places: list[set[int]] = []
    for share in (0.05, 0.2, 1.0):
        out = np.empty(len(keys), np.int64)
        places.append(set(out[: find_sampled(keys, round(share * SAMPLE_RANGE), out)].tolist()))
    assert places[0] < places[1] < places[2] == set(range(1000))
